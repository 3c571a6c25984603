"""Tensors that lie in the memory of a parameter, which would part where parameters move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._setup import Setup
from roundelay.training.materialize import is_later
from roundelay.training.strategy import Strategy


class _InMemory(NamedTuple):
    """A tensor of a model, by what it is and is called, with the bytes of its storage it is in."""

    what: str  # parameter, buffer or attribute
    name: str
    tensor: torch.Tensor
    start: int
    stop: int


def refuse_shared_memory(strategy: Strategy, setup: Setup) -> None:
    """Refuse parameters that share memory, and views of parameters, where they would part.

    Parameters part that move, or are stepped on elsewhere; views keep what was there before.
    """
    moves = strategy.moves_parameters or setup.precision.mixed
    if not moves and not strategy.steps_elsewhere:
        return
    under = f"Under {type(strategy).__name__}{' in mixed precision' * setup.precision.mixed}"
    for one, other in _sharing(setup.model):
        if one.what == other.what == "parameter":
            raise InvalidArgumentError(
                f"The parameters {one.name} and {other.name} are two that share memory. {under} "
                f"each has memory of its own, and a step on one would not move the other. Have "
                f"both be the same Parameter, as in b.weight = a.weight, or use strategy='ddp' in "
                f"fp32."
            )
        view, parameter = (other, one) if one.what == "parameter" else (one, other)
        if moves and parameter.what == "parameter":
            raise InvalidArgumentError(
                f"The {view.what} {view.name} shares memory with the parameter {parameter.name}. "
                f"{under} the parameter moves to other memory, and the {view.what} would keep the "
                f"old values. Take the view in forward, clone() it, or use strategy='ddp' in fp32."
            )


def _sharing(model: torch.nn.Module) -> Iterator[tuple[_InMemory, _InMemory]]:
    """Yield the tensors of a model that lie in the same memory, two by two."""
    storages: dict[int, list[_InMemory]] = {}
    for what, name, tensor in _tensors(model):
        place = _storage(tensor)
        if place:
            size, dims = tensor.itemsize, zip(tensor.shape, tensor.stride(), strict=True)
            start = int(tensor.storage_offset()) * size
            last = sum((count - 1) * stride for count, stride in dims)
            stop = start + (int(last) + 1) * size
            storages.setdefault(place, []).append(_InMemory(what, name, tensor, start, stop))
    for listed in storages.values():
        before: list[_InMemory] = []
        for one in sorted(listed, key=lambda held: held.start):
            before = [held for held in before if held.stop > one.start]
            yield from ((held, one) for held in before if _overlap(held, one))
            before.append(one)


def _storage(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0 where it has none of its own."""
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wraps or is_later(tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _overlap(one: _InMemory, other: _InMemory) -> bool:
    """Tell whether two tensors, whose stretches of one storage do, have an element in common."""
    dense = all(held.stop - held.start == held.tensor.nbytes for held in (one, other))
    if dense or one.tensor.dtype != other.tensor.dtype:
        return True
    marks = torch.zeros(max(one.stop, other.stop) // one.tensor.itemsize, dtype=torch.bool)
    places = [
        marks.as_strided(held.tensor.shape, held.tensor.stride(), held.tensor.storage_offset())
        for held in (one, other)
    ]
    places[0].fill_(True)  # noqa: FBT003 - torch's own
    return bool(places[1].any())


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield every tensor that a model's modules hold, once: what it is, its name, and itself."""
    seen: set[int] = set()
    for what, named in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
        ("attribute", _attributes(model)),
    ):
        for name, tensor in named:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield what, name, tensor


def _attributes(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that modules have as attributes, or in lists and dicts of theirs."""
    for prefix, module in model.named_modules():
        # What a hook makes anew before each forward, as torch's spectral_norm does.
        fresh = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}  # noqa: SLF001 - torch has no other name
        for own, value in vars(module).items():
            listed = value.values() if isinstance(value, dict) else value
            for tensor in listed if isinstance(value, (list, tuple, dict)) else (value,):
                if isinstance(tensor, torch.Tensor) and own not in fresh:
                    yield f"{prefix}.{own}" if prefix else own, tensor
