"""What users hang on an optimizer, or give it: hooks around its calls, arguments of its step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import _global_optimizer_post_hooks as _post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _pre_hooks

from roundelay.arguments import shown
from roundelay.errors import InvalidArgumentError

__all__ = [
    "StepArguments",
    "around_step",
    "loaded_by_torch",
    "loaded_with_hooks",
    "state_with_hooks",
]

CLOSURE = inspect.Parameter("closure", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
Own = Callable[..., Any]  # a method of the user's optimizer


class StepArguments:
    """What `step` was called with: a closure, and whatever else the user's class takes."""

    def __init__(self, optimizer: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.args, self.options = tuple(args), dict(options)
        self._kind: type = optimizer.own_class
        self._plain = _takes_closure(self._kind)
        self._given = inspect.BoundArguments(inspect.Signature(), {})
        if args or options or not self._plain:
            self._bind(optimizer)
        self.closure: Any = self._given.arguments.pop("closure", None)
        if self.closure is not None and not callable(self.closure):
            raise InvalidArgumentError(
                f"step takes a closure, a function that returns the loss, not "
                f"{shown(self.closure)}."
            )
        #: Whether there is more than a closure.
        self.more = len(self._given.arguments) > 1

    def _bind(self, optimizer: Any) -> None:
        try:
            self._given = _signature(self._kind).bind(optimizer, *self.args, **self.options)
        except TypeError as error:
            raise InvalidArgumentError(
                f"{self._kind.__name__}.step{_signature(self._kind)} can't be called so: {error}."
            ) from None

    def refuse_more(self) -> None:
        """Refuse all but a closure, where the step runs on servers."""
        if self.more:
            words = ", ".join([*self._given.arguments][1:])
            raise InvalidArgumentError(
                f"{self._kind.__name__}.step got {words}, but it runs on the parameter server, "
                f"which hears of the options of groups only. Put it into optimizer.param_groups, "
                f"or use another strategy, such as 'ps' or 'ddp'."
            )

    def handed_on(self, own: Own) -> Own:
        """Return the own step as a function of the closure alone."""
        if self._plain and not self.more:
            return own
        given = self._given

        def step(closure: Any) -> Any:
            if closure is not None:
                given.arguments["closure"] = closure
            return own(*given.args[1:], **given.kwargs)

        return step


@functools.cache
def _signature(kind: type) -> inspect.Signature:
    """Return what the own step takes; the first of any number of arguments is a closure."""
    step: Own = kind.step  # type: ignore[attr-defined]
    own = inspect.signature(step)
    taken = [*own.parameters.values()]
    if taken[1:2] and taken[1].kind is CLOSURE.VAR_POSITIONAL:
        return own.replace(parameters=[taken[0], CLOSURE, *taken[1:]])
    return own


@functools.cache
def _takes_closure(kind: type) -> bool:
    """Tell whether the own step may be called with a closure alone, as torch's are."""
    return [*_signature(kind).parameters][1:2] == ["closure"]


@contextmanager
def around_step(optimizer: Any, given: StepArguments, *, apart: bool) -> Iterator[None]:
    """Call the optimizer's hooks around a step where it does not see whole gradients itself.

    There they see the model, and what is divided, as they are before and after.
    """
    if not apart:
        yield
        return
    optimizer.run.grad_hooks.flush()
    args = given.args or (None,)
    for hook in (*_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):  # noqa: SLF001 - torch's
        hook(optimizer, args, given.options)
    yield
    for hook in (*optimizer._optimizer_step_post_hooks.values(), *_post_hooks.values()):  # noqa: SLF001
        hook(optimizer, args, given.options)


def state_with_hooks(optimizer: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the state that `make` gathers, with hooks around it as torch calls them."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():  # noqa: SLF001 - torch's
        before(optimizer)
    state = make()
    for after in optimizer._optimizer_state_dict_post_hooks.values():  # noqa: SLF001 - likewise
        changed = after(optimizer, state)
        state = state if changed is None else changed
    return state


def loaded_with_hooks(optimizer: Any, state: Mapping[str, Any], load: Own) -> Mapping[str, Any]:
    """Have `load` take a state, with hooks around it as torch calls them; return what it took."""
    _check_state(state, ())
    state = dict(state)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():  # noqa: SLF001 - torch's
        changed = before(optimizer, state)
        state = state if changed is None else changed
    _check_state(state, ("state", "param_groups"))
    load(state)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():  # noqa: SLF001 - likewise
        after(optimizer)
    return state


def loaded_by_torch(optimizer: Any, state: Mapping[str, Any], load: Own) -> Mapping[str, Any]:
    """Have torch's own `load` take a state, which calls the hooks; return what it took."""
    _check_state(state, ())
    taken = [state]

    def last(_: Any, found: Mapping[str, Any]) -> None:
        _check_state(found, ("state", "param_groups"))
        taken.append(found)

    handle = optimizer.register_load_state_dict_pre_hook(last)
    try:
        load(dict(state))
    finally:
        handle.remove()
    return taken[-1]


def _check_state(state: object, needed: Sequence[str]) -> None:
    if not isinstance(state, Mapping) or not {*needed} <= {*state}:
        raise InvalidArgumentError(
            f"load_state_dict takes what state_dict() of an optimizer gives, not {shown(state)}."
        )
