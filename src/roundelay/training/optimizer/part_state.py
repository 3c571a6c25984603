"""Steps on parameters of which ranks have parts, at torch's speed; their state is parts, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as _post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _pre_hooks

from roundelay.parallel.part import PartTensor, as_they_lie, marked, part_of
from roundelay.training.optimizer.joined import kept
from roundelay.training.shards.groups import ELEMENTWISE

__all__ = ["stepping_on_parts"]


@contextmanager
def stepping_on_parts(optimizer: Any, closure: Callable[[], Any] | None) -> Iterator[None]:
    """Have an optimizer of torch's that works by element see ordinary tensors in its step.

    Not one that calls functions of the user's meanwhile. What it keeps for each element of a part
    is a part, too.
    """
    parts = [
        (one, cut)
        for group in vars(optimizer)["param_groups"]
        for one in group["params"]
        if (cut := part_of(one)) is not None and not hasattr(one, "home")
    ]
    if not parts:
        yield
        return
    calls = closure is not None or _pre_hooks or _post_hooks
    calls = calls or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # noqa: SLF001 - torch's
    quick = not calls and optimizer.own_class in ELEMENTWISE
    state = kept(optimizer)

    def values() -> Iterator[torch.Tensor]:
        for one, _ in parts:
            yield one
            yield from (each for each in state.get(one, {}).values() if type(each) is PartTensor)

    with as_they_lie([*values()] if quick else ()):
        yield
    for one, cut in parts:
        for each in state.get(one, {}).values():
            if type(each) is torch.Tensor and each.dim() and each.shape == one.shape:
                marked(each, cut)
