"""How an optimizer is wrapped: names for its parameters, a class of its own, hooks on gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError

__all__ = ["mixed_in", "named", "watch"]

Parameter = torch.nn.Parameter


def named(
    optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[str, Parameter]] | None
) -> dict[Parameter, str]:
    """Return the name of each parameter that the optimizer has; refuse names that can't be used."""
    owned = [
        (f"allreduce.noname.{i}.{j}", p)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    ]
    told: list[Any] = owned if pairs is None else [None]
    if isinstance(pairs, Iterable):
        told = list(pairs)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in told):  # noqa: PLR2004
        raise InvalidArgumentError(
            "named_parameters= takes pairs of a name and a parameter: model.named_parameters()."
        )
    if odd := [name for name, _ in told if not isinstance(name, str)]:
        raise InvalidArgumentError(f"Names in named_parameters= are words, not {odd[0]!r}.")
    names = [name for name, _ in told]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidArgumentError(
            f"Names in named_parameters= must be different, but these are there twice: {twice}."
        )
    known = {id(p) for _, p in told}
    if missing := sum(id(p) not in known for _, p in owned):
        raise InvalidArgumentError(
            f"named_parameters= has no name for {missing} of the {len(owned)} parameters of the "
            f"optimizer."
        )
    return {p: name for name, p in sorted(told, key=lambda pair: pair[0])}


def mixed_in(optimizer: torch.optim.Optimizer, kind: type[Any]) -> Any:
    """Return the optimizer in a class with `kind` before its own; it shares all that it has."""
    base = type(optimizer)
    wrapped: Any = object.__new__(type(base.__name__, (kind, base), {}))
    vars(wrapped).update(vars(optimizer))
    vars(wrapped).pop("step", None)  # of a scheduler, which calls that of the class
    return wrapped


def watch(
    optimizer: Any, params: Iterable[Parameter], came: Callable[[Any, Parameter], None]
) -> None:
    """Have `came` called with each gradient once it is added up, while the optimizer lives."""
    reference = weakref.ref(optimizer)

    def hook(p: torch.Tensor) -> None:
        living = reference()
        if living is not None:
            came(living, p)  # type: ignore[arg-type]

    for p in params:
        p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
