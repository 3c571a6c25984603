"""Finds out whether an optimizer looks at several parameters at once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError

SHAPE = (6, 4)
SIZES = (1.0, 1e3, 1e-3)  # of the gradients of each step: what clips by size shows in one of them
CLOSE = 1e-9  # in float64: far above rounding, far below any difference in kind


def refuse_coupled(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at several parameters at once.

    It steps on two small parameters together, and on each of them by itself.
    """
    for number, group in enumerate(optimizer.param_groups):
        options = _options(optimizer, group)
        why, cause = "it steps differently on one parameter by itself", None
        try:
            whole = _stepped(optimizer, options, [[0, 1]])
            divided = _stepped(optimizer, options, [[0], [1]])
            if all(torch.allclose(one, two, rtol=CLOSE, atol=CLOSE)
                   for one, two in zip(whole, divided, strict=True)):  # fmt: skip
                continue
        except Exception as error:  # noqa: BLE001 - whatever an optimizer raises
            why, cause = f"it raises {type(error).__name__}: {error}", error
        raise InvalidArgumentError(
            f"Several servers have some of the parameters each, and {type(optimizer).__name__} "
            f"(group {number}) needs all of them at once: {why}. Use ParameterServer(servers=1), "
            f"update='worker', or another strategy."
        ) from cause


def _options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizer was made with: options of a group, and attributes of its own."""
    taken = inspect.signature(type(optimizer)).parameters
    known = {**vars(optimizer), **group}
    options = {key: known[key] for key in taken if key in known and key != "params"}
    if "lr" in options and float(options["lr"]) == 0:
        options["lr"] = 1e-2  # a warm-up begins at 0, which would show nothing
    return options


def _stepped(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], shares: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Step on two parameters, of which each optimizer has a share; return both."""
    line = torch.linspace(-1, 1, SHAPE[0] * SHAPE[1], dtype=torch.float64).view(SHAPE)
    values = [torch.nn.Parameter(line + 0.25 * two) for two in range(2)]
    for share in shares:
        small = type(optimizer)([values[number] for number in share], **options)
        for step, size in enumerate(SIZES):
            for number in share:
                values[number].grad = size * torch.cos((7 + number) * line + step)
            small.step()
    return [one.detach() for one in values]
