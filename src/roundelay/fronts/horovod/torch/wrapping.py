"""How an optimizer is wrapped: names for its parameters, a class of its own, hooks on gradients."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.torch.scaling import SeenByScaler

__all__ = ["Copied", "mixed_in", "named", "names_of_new", "watch"]

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


def names_of_new(
    groups: Sequence[Mapping[str, Any]], known: Mapping[Parameter, str]
) -> dict[Parameter, str]:
    """Return names for parameters that joined an optimizer later, by their places in it."""
    return {
        p: f"allreduce.noname.{i}.{j}"
        for i, group in enumerate(groups)
        for j, p in enumerate(group["params"])
        if p not in known
    }


class Copied(SeenByScaler):
    """How a wrapped optimizer is copied: with all that it knows of its parameters, or not at all.

    torch copies only what every optimizer has.
    """

    process_set: Any = None
    _begun: dict[Any, Any]

    def watch_again(self) -> None:
        """Watch the gradients of the parameters that it has."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._begun:
            raise InvalidArgumentError(
                "A wrapped optimizer can't be copied while gradients are on their way: copy it "
                "after optimizer.step() or optimizer.synchronize()."
            )
        made: Any = object.__new__(type(self))
        memo[id(self)] = made
        if self.process_set is not None:
            memo[id(self.process_set)] = self.process_set  # all ranks know this one
        kept = {
            word: copy.deepcopy(value, memo)
            for word, value in vars(self).items()
            if word != "step" and "_hooks" not in word  # a scheduler's, and the user's
        }
        made.__setstate__(kept)
        made.watch_again()
        return made

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise InvalidArgumentError(
            "A wrapped optimizer can't be pickled, nor copied by copy.copy: its gradients belong "
            "to this job. Save optimizer.state_dict(), and load it into one that is wrapped anew."
        )


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
