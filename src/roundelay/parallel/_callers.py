"""Who asks for the elements of a part: torch does not say, so the frames are looked at."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from roundelay.parallel import part

__all__ = ["by_fan", "makes_another"]

MAKES = torch.nn.Parameter.__new__.__code__
#: Functions of torch.nn.init that look at a shape, which is the part's.
FANS = ("xavier", "kaiming", "sparse")


def makes_another() -> bool:
    """Say whether nn.Parameter(…) asks for the elements of another one."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - torch does not say who asks
    while frame is not None and frame.f_globals.get("__name__") == part.__name__:
        frame = frame.f_back
    return frame is not None and frame.f_code is MAKES


def by_fan() -> str:
    """Return which function of torch.nn.init asks that has looked at a shape, or none."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - likewise
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "roundelay.")):
            break
        if module == "torch.nn.init" and frame.f_code.co_name.startswith(FANS):
            return frame.f_code.co_name
        frame = frame.f_back
    return ""
