"""Source lines in errors are the user's: not ours, and not those of torch between him and us."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from roundelay import _core

__all__ = ["pass_over_torch"]


def pass_over_torch() -> None:
    """Have calls told by the innermost line that is neither ours nor torch's."""
    _core.skip_package(str(Path(torch.__file__).parent) + "/")
    # Coalesced calls are made when a `with` block ends, from inside this file.
    _core.skip_package(contextlib.__file__)
