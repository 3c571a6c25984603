"""Finds out whether an optimizer treats every element by itself, as it must to be divided."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._joined import Joined
from roundelay.training.precision import master_dtype

__all__ = ["is_elementwise", "refuse_coupled", "repoint_to_pieces"]

SHAPE = (6, 4)
CUT = 9  # in the middle of a row
SIZES = (1.0, 1e3, 1e-3)  # of the gradients of each step: what clips by size shows in one of them
CLOSE = 1e-9  # in float64: far above rounding, far below any difference in kind


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer can step on parts of parameters, or needs whole ones.

    It steps on a small parameter whole, and by two optimizers that have a part of it each. One that
    needs several parameters at once is refused.
    """
    try:
        _probe(optimizer, (slice(0, CUT), slice(CUT, None)), "{why}")
    except InvalidArgumentError:
        _probe(
            optimizer,
            None,
            "ZeRO divides parameters between the ranks, and {name} (group {group}) needs all of "
            "them at once: {why}. Use strategy='ddp' or 'ps' with it, or an optimizer that treats "
            "every parameter by itself, such as SGD, AdamW or Muon.",
        )
        return False
    return True


def refuse_coupled(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at several parameters at once."""
    _probe(
        optimizer,
        None,
        "Several servers have some of the parameters each, and {name} (group {group}) needs all of "
        "them at once: {why}. Use ParameterServer(servers=1), update='worker', or strategy='ddp'.",
    )


def _probe(optimizer: torch.optim.Optimizer, cut: tuple[slice, slice] | None, message: str) -> None:
    """Step two small parameters by one optimizer, and their parts by one optimizer each."""
    for number, group in enumerate(optimizer.param_groups):
        options = _options(optimizer, group)
        why, cause = "it steps differently on one alone", None
        try:
            whole = _stepped(optimizer, options, [[slice(None)] * 2], whole=True)
            parts = [[one, slice(0, 0)] for one in cut] if cut else [[slice(None), slice(0, 0)]]
            both = [*parts, *([part[1], part[0]] for part in parts)]
            divided = _stepped(optimizer, options, both, whole=cut is None)
            if all(torch.allclose(one, two, rtol=CLOSE, atol=CLOSE)
                   for one, two in zip(whole, divided, strict=True)):  # fmt: skip
                continue
        except Exception as error:  # noqa: BLE001 - whatever an optimizer raises at a part
            why, cause = f"it raises {type(error).__name__}: {error}", error
        text = message.format(name=type(optimizer).__name__, group=number, why=why)
        raise InvalidArgumentError(text) from cause


def _options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizer was made with: options of a group, and attributes of its own."""
    taken = inspect.signature(type(optimizer)).parameters
    known = {**vars(optimizer), **group}
    options = {key: known[key] for key in taken if key in known and key != "params"}
    if "lr" in options and float(options["lr"]) == 0:
        options["lr"] = 1e-2  # a warm-up begins at 0, which would show nothing
    return options


def _stepped(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    shares: Sequence[Sequence[slice]],
    *,
    whole: bool,
) -> list[torch.Tensor]:
    """Step on two parameters, of which each optimizer has a share; return both, flat."""
    numel = SHAPE[0] * SHAPE[1]
    values = [torch.linspace(-1, 1, numel, dtype=torch.float64) + 0.25 * two for two in range(2)]
    for share in shares:
        parts = [value[part] for value, part in zip(values, share, strict=True)]
        live = [number for number, part in enumerate(parts) if part.numel()]
        tensors = {
            number: torch.nn.Parameter(parts[number].view(SHAPE if whole else -1).clone())
            for number in live
        }
        small = type(optimizer)(list(tensors.values()), **options)
        for step, size in enumerate(SIZES):
            for number, tensor in tensors.items():
                grad = size * torch.cos((7 + number) * torch.linspace(-1, 1, numel) + step).double()
                tensor.grad = grad[share[number]].view(tensor.shape).clone()
            small.step()
        for number, tensor in tensors.items():
            parts[number].copy_(tensor.detach().reshape(-1))
    return values


def repoint_to_pieces(
    optimizer: Joined,
    pieces: dict[int, tuple[slice, torch.nn.Parameter]],
    trained: Mapping[int, torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Have the optimizer step on this rank's pieces; options stay, and state is cut alike.

    All are by id of the parameter. One of which this rank has no piece leaves an empty tensor in
    its group, so that all ranks have the same to refuse. Returns what stands for each.
    """
    stands: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for one in group["params"]:
            if id(one) in pieces:
                stands[id(one)] = pieces[id(one)][1]
            elif id(one) in trained:
                kind = master_dtype(one.dtype) if one.is_floating_point() else one.dtype
                stands[id(one)] = torch.nn.Parameter(
                    torch.empty(0, dtype=kind, device=one.device), requires_grad=True
                )
        # In place, since some optimizers know the list. Frozen ones are never stepped on.
        group["params"][:] = [stands.get(id(one), one) for one in group["params"]]
    for key, tensor in trained.items():
        state = optimizer.state.pop(tensor, None)
        if state is not None and key in pieces:
            inside, piece = pieces[key]
            optimizer.state[piece] = {
                name: value if name == "step" else _cut(value, tensor.shape, inside, piece)
                for name, value in state.items()
            }
    return stands


def _cut(value: Any, shape: torch.Size, inside: slice, piece: torch.Tensor) -> Any:
    """Return a piece of state as a piece of a parameter has it."""
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        return value
    kind = piece.dtype if value.is_floating_point() else value.dtype
    flat = value.detach().reshape(-1)[inside]
    return flat.to(piece.device, kind, copy=True).view(piece.shape)
