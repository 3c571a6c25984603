"""Whether a checkpointed block is being computed again, in backward.

Its functions were looked at when they were first computed. What comes from outside of the block is
marked if that pass was looked at, and what layers in the block give by what they know today.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

__all__ = ["CHECKPOINT", "computing_again"]

CHECKPOINT = "torch.utils.checkpoint"
ENGINE = "torch.autograd.graph"  # what lies behind it is called by a node or a hook


def computing_again() -> bool:
    """Say whether torch's checkpoint is the one that calls, in a backward pass.

    Outside of backward passes that costs a look at a number.
    """
    if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - torch shows no more
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - likewise
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module in (CHECKPOINT, ENGINE):
            return bool(module == CHECKPOINT)
        frame = frame.f_back
    return False
