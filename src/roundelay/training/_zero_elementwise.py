"""Finds out whether an optimizer treats every element by itself, as it must to be divided."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError

__all__ = ["refuse_whole", "repoint_to_pieces"]

SHAPE = (6, 4)
CUT = 9  # in the middle of a row
STEPS = 3
CLOSE = 1e-9  # in float64: far above rounding, far below any difference in kind


def refuse_whole(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that needs whole parameters: step a small one, whole and cut in two."""
    for number, group in enumerate(optimizer.param_groups):
        taken = inspect.signature(type(optimizer)).parameters
        options = {key: value for key, value in group.items() if key in taken and key != "params"}
        if "lr" in options and float(options["lr"]) == 0:
            options["lr"] = 1e-2  # a warm-up begins at 0, which would show nothing
        try:
            same = torch.allclose(
                _stepped(optimizer, options, cut=False),
                _stepped(optimizer, options, cut=True),
                rtol=CLOSE,
                atol=CLOSE,
            )
        except Exception as error:  # noqa: BLE001 - whatever an optimizer raises at a part
            _refuse(optimizer, number, f"it raises {type(error).__name__}: {error}", error)
        if not same:
            _refuse(optimizer, number, "it steps differently on a part of a parameter", None)


def _refuse(
    optimizer: torch.optim.Optimizer, group: int, why: str, cause: Exception | None
) -> None:
    name = type(optimizer).__name__
    raise InvalidArgumentError(
        f"ZeRO divides parameters between the ranks, and {name} (group {group}) needs them whole: "
        f"{why}. Use strategy='ddp' or 'ps' with it, or an optimizer that treats every element by "
        f"itself, such as SGD, Adam or AdamW."
    ) from cause


def _stepped(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], *, cut: bool
) -> torch.Tensor:
    numel = SHAPE[0] * SHAPE[1]
    values = torch.linspace(-1, 1, numel, dtype=torch.float64)
    if cut:
        tensors = [torch.nn.Parameter(part.clone()) for part in (values[:CUT], values[CUT:])]
    else:
        tensors = [torch.nn.Parameter(values.view(SHAPE).clone())]
    small = type(optimizer)(tensors, **options)
    for step in range(STEPS):
        grad = torch.cos(7 * values + step)
        parts = (grad[:CUT], grad[CUT:]) if cut else (grad.view(SHAPE),)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.grad = part.clone()
        small.step()
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def repoint_to_pieces(
    optimizer: torch.optim.Optimizer,
    pieces: dict[int, tuple[slice, torch.nn.Parameter]],
    trained: Mapping[int, torch.Tensor],
) -> None:
    """Have the optimizer step on this rank's pieces; options stay, and state is cut alike.

    Both are by id of the parameter; a parameter of which this rank has no piece leaves its group.
    """
    for group in optimizer.param_groups:
        kept = []
        for one in group["params"]:
            if id(one) in pieces:
                kept.append(pieces[id(one)][1])
            elif id(one) not in trained:
                kept.append(one)  # frozen: never stepped on
        group["params"][:] = kept
    for key, tensor in trained.items():
        state = optimizer.state.pop(tensor, None)
        if state is not None and key in pieces:
            inside, piece = pieces[key]
            optimizer.state[piece] = {
                name: value if name == "step" else _cut(value, tensor.shape, inside, piece)
                for name, value in state.items()
            }


def _cut(value: Any, shape: torch.Size, inside: slice, piece: torch.Tensor) -> Any:
    """Return a piece of state as a piece of a parameter has it."""
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        return value
    kind = piece.dtype if value.is_floating_point() else value.dtype
    return value.detach().reshape(-1)[inside].to(kind, copy=True)
