"""What autograd keeps of a forward pass until backward: counted from live storages, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["kept_by"]


class _Activation:
    """A tensor that autograd has saved, while it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a result that its own graph holds would never be freed.
        self.tensor = tensor.detach()


def kept_by(forward: Callable[[], Any], model: torch.nn.Module) -> int:
    """Return the bytes that a forward pass leaves for backward, without parameters and buffers.

    The pass is run once, and let go; random numbers are drawn again as if it had not been. What
    gradient checkpointing computes again is not kept, and is not counted.
    """
    saved: WeakSet[_Activation] = WeakSet()

    def pack(tensor: torch.Tensor) -> _Activation:
        kept = _Activation(tensor)
        saved.add(kept)
        return kept

    own = [*model.parameters(), *model.buffers()]
    devices = {tensor.device.index for tensor in own if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        with saved_tensors_hooks(pack, lambda kept: kept.tensor):
            result = forward()
        held = dict(filter(None, (_storage(kept.tensor) for kept in saved)))
    del result
    mine = dict(filter(None, map(_storage, own)))
    return sum(nbytes for place, nbytes in held.items() if place not in mine)


def _storage(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return where a tensor's memory begins and its bytes; None for one without any."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a subclass that computes, or a fake
        return None
