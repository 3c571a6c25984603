"""torch's `GradScaler` before a wrapped optimizer: it looks at gradients before `step` does.

It leaves out a step where they are not finite. If it saw those of one rank, a rank would leave out
a step that others make, and weights would part.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.amp import GradScaler

__all__ = ["SeenByScaler"]

FILE = GradScaler.unscale_.__code__.co_filename
NAME = "_unscale_grads_"  # of classes that are made of it, in files of their own


class SeenByScaler:
    """An optimizer that is told before a scaler looks at gradients, by way of `param_groups`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of parameters; those who scale get gradients that they may look at."""
        code = sys._getframe(1).f_code  # noqa: SLF001 - there is no other name
        if code.co_name == NAME or code.co_filename == FILE:
            self.before_scaler()
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)["param_groups"] = groups

    def before_scaler(self) -> None:
        """Do what must be done before a scaler looks at gradients."""
        raise NotImplementedError
