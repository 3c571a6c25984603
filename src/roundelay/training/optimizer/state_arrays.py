"""An optimizer's state as plain values and arrays, which any message can carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundelay.training.checkpoint.values import pack, unpack

__all__ = ["as_arrays", "as_tensors", "received", "sendable"]


def sendable(state: Mapping[Any, Any], what: str) -> list[Any]:
    """Return state in words that go anywhere, and its tensors; or raise what has none."""
    tensors: list[Any] = []

    def put(tensor: torch.Tensor) -> str:
        tensors.append(as_arrays(tensor))
        return str(len(tensors) - 1)

    return [pack(dict(state), put, what), tensors]


def received(message: Sequence[Any]) -> dict[Any, Any]:
    """Return the state that was sent."""
    words, tensors = message
    found: dict[Any, Any] = unpack(words, lambda name: as_tensors(tensors[int(name)]))
    return found


ARRAY = {"dtype", "shape", "of"}


def as_arrays(value: Any) -> Any:  # Any: a tensor, a number, or several of them
    """Return tensors in a structure as arrays with their dtype and shape."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        kind = str(value.dtype).removeprefix("torch.")
        return {"dtype": kind, "shape": list(value.shape), "of": flat.view(torch.uint8).numpy()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(as_arrays(one) for one in value)
    if isinstance(value, dict):
        return {key: as_arrays(one) for key, one in value.items()}
    return value


def as_tensors(value: Any) -> Any:  # Any: likewise
    """Return what `as_arrays` was given."""
    if isinstance(value, dict) and value.keys() != ARRAY:
        return {key: as_tensors(one) for key, one in value.items()}
    if isinstance(value, dict):
        kind = getattr(torch, value["dtype"])
        if not len(value["of"]):  # an array of nothing has no strides to view it by
            return torch.empty(value["shape"], dtype=kind)
        flat = torch.from_numpy(value["of"].copy()).view(kind)
        return flat.view(value["shape"])
    if isinstance(value, list | tuple):
        return type(value)(as_tensors(one) for one in value)
    return value
