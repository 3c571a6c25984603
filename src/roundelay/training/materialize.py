"""`rd.materialize_later`: build a model that is larger than what one rank can hold."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from roundelay.arguments import shown
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.training._deferred_init import DeferredInit, Recipe
from roundelay.training._setup import send_from_first
from roundelay.training.shards.sharded_parameter import (
    absence,
    reshard_parameter,
    unshard_parameter,
)

__all__ = ["is_later", "materialize", "materialize_later", "start_from_first"]

RECIPE = "_roundelay_recipe"
WHY = (
    "was made under rd.materialize_later and has no elements yet. rd.prepare gives it some, and so "
    "does rd.materialize(model)."
)


@contextmanager
def materialize_later() -> Iterator[None]:
    """Have modules made inside hold no memory for their parameters until `prepare` divides them.

    They get the very weights that they would have got, also from initialisations of your own that
    run inside: how a parameter was made is written down and played back, one unit at a time.
    Buffers are made at once.

    >>> import roundelay as rd
    >>> with rd.materialize_later():
    ...     model = torch.nn.Linear(2, 3)
    >>> model.weight
    <parameter weight (3, 2), which has no elements here>
    >>> rd.materialize(model).weight.shape
    torch.Size([3, 2])
    """
    tape, here = DeferredInit(), threading.get_ident()
    made: dict[int, tuple[str, torch.nn.Parameter]] = {}

    def registered(_: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and threading.get_ident() == here and not is_later(parameter):
            tape.let_go(parameter)
            made.setdefault(id(parameter), (name, parameter))

    hook = register_module_parameter_registration_hook(registered)
    try:
        with tape:
            yield
    finally:
        hook.remove()
    for name, parameter in made.values():
        if tape.knows(parameter):
            vars(parameter)[RECIPE] = tape.recipe(parameter)
            reshard_parameter(parameter, absence(parameter, name, WHY))


def is_later(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter is still to be made."""
    return RECIPE in vars(parameter)


def _make(parameter: torch.nn.Parameter, *, empty: bool = False) -> None:
    recipe: Recipe = vars(parameter).pop(RECIPE)
    shape, dtype = parameter.shape, parameter.dtype
    unshard_parameter(parameter, torch.empty(shape, dtype=dtype) if empty else recipe.make())


def materialize(model: torch.nn.Module) -> torch.nn.Module:
    """Make all parameters of a model that was built under `materialize_later`; return the model."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"materialize takes a torch.nn.Module, not {shown(model)}.")
    for parameter in model.parameters():
        if is_later(parameter):
            _make(parameter)
    return model


def start_from_first(comm: Communicator, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make these parameters, those that are still to be made, as rank 0 has them."""
    later = [parameter for parameter in parameters if is_later(parameter)]
    for one in later:
        _make(one, empty=comm.rank != 0)
    if comm.size > 1:
        send_from_first(comm, later)
