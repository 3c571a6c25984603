"""Gradients of what is cut are cut alike, and say so wherever code of a model gets to see them.

Autograd hands out plain tensors: a norm of one would be that of this rank's part. So what hooks
get, what `.grad` is and what `torch.autograd.grad` returns is marked as the tensor is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["HOOKED", "Marking", "gradients_marked", "hook_marked", "module_hooks_marked"]

HOOKED = "torch.utils.hooks"  # where torch arranges for full backward hooks of modules
Hook = Callable[..., Any]
#: How a gradient becomes the part that a tensor is, and an ordinary tensor again.
Marking = tuple[Callable[[Any, Any], Any], type, Callable[[Any], Any]]


def hook_marked(hook: Hook, like: torch.Tensor, marking: Marking) -> Hook:
    """Return a tensor's hook that gets the gradient as a part, and gives an ordinary tensor."""
    mark, kind, plain = marking

    def hooked(gradient: torch.Tensor) -> Any:
        return tree_map_only(kind, plain, hook(mark(gradient, like)))

    return hooked


def gradients_marked(found: Any, inputs: Any, marking: Marking) -> Any:
    """Return what `torch.autograd.grad` has found, as parts of what they are gradients of."""
    mark = marking[0]
    each = [inputs] if isinstance(inputs, torch.Tensor) else [*inputs]
    if len(each) != len(found):  # a rank's own way to name inputs
        return found
    return tuple(mark(gradient, like) for gradient, like in zip(found, each, strict=True))


def module_hooks_marked(marking: Marking) -> None:
    """Have backward hooks of the module that is called get gradients as parts.

    Torch asks for the node of what goes in, or comes out, and keeps the hooks beside it.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - torch shows no more
    while frame is not None and frame.f_code.co_name != "_apply_on_tensors":
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return
    called, side = frame.f_locals["self"], frame.f_back.f_code.co_name
    sides: dict[str, Sequence[Any]] | None = vars(called).get("cut")
    if sides is None:
        sides = called.cut = {}
        called.user_hooks = [_watched(hook, sides, marking) for hook in called.user_hooks]
        called.user_pre_hooks = [_watched(hook, sides, marking) for hook in called.user_pre_hooks]
    sides[side] = frame.f_locals["args"]


def _watched(hook: Hook, sides: dict[str, Sequence[Any]], marking: Marking) -> Hook:
    """Return a module's hook that gets gradients as parts, and gives ordinary tensors."""
    mark, kind, plain = marking

    def watched(module: Any, *gradients: Any) -> Any:
        likes = [sides.get("setup_input_hook", ()), sides.get("setup_output_hook", ())]
        told = [
            tuple(map(mark, each, like)) if len(each) == len(like) else each
            for each, like in zip(gradients, likes[-len(gradients) :], strict=True)
        ]
        return tree_map_only(kind, plain, hook(module, *told))

    return watched
