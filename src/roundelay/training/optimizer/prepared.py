"""The user's optimizers, which after `prepare` step on every rank alike."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from roundelay.arguments import number, shown
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, RoundelayError
from roundelay.training._mesh_state import grad_norm
from roundelay.training._parameter_edits import StateEdits
from roundelay.training._phases import stepping
from roundelay.training._run import Run
from roundelay.training.optimizer.own_calls import (
    StepArguments,
    around_step,
    loaded_by_torch,
    loaded_with_hooks,
    state_with_hooks,
)
from roundelay.training.optimizer.part_state import stepping_on_parts
from roundelay.training.optimizer.whole_state import load_whole_state, whole_state
from roundelay.training.shards.groups import ShardedGroups
from roundelay.training.shards.operands import operation

__all__ = ["PreparedOptimizer", "give_back", "take_over"]

DEEPEST = 8  # calls between a scheduler's step and the optimizer
OFTEN = (
    "{0}.step() was called between the micro-batches of one batch, so that it would step several "
    "times for one step of the optimizer. Write scheduler = rd.scheduler(scheduler) before the "
    "loop, or `if loader.last_of_step: scheduler.step()`."
)


class PreparedOptimizer:
    """What `prepare` adds to an optimizer; the rest is the class that the user chose."""

    run: Run
    place: int  # among the optimizers of the model
    known: set[int]  # what its groups have, by id
    inside: bool = False  # whether its own step runs
    own_class: type  # that the user chose

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters, with their options; no scheduler's between micro-batches."""
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        if self.run.step.accumulating:
            _refuse_scheduler(sys._getframe(1))  # noqa: SLF001 - who asks
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)["param_groups"] = groups

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 - as torch marks its own
    def step(self, *args: Any, **options: Any) -> Any:
        """Step as before, on gradients that all ranks have brought together."""
        run, now = self.run, self.run.step
        given = StepArguments(self, args, options)
        if run.strategy.steps_elsewhere:
            given.refuse_more()
        if now.holds or self.place in now.options:
            now.check_options(self.place, vars(self)["param_groups"])
        if now.holds:
            now.wait(self.place)
            return None  # more micro-batches of this batch are to come
        now.check_whole()
        _refuse_in_backward("optimizer.step()")
        run.check_still_the_same()
        self._check_groups()
        state, only, closure = run.state, self._only, given.closure
        own: Any = super().step  # type: ignore[misc]
        if not state.sees_whole and hasattr(own, "hooked"):
            own = functools.partial(own.__wrapped__, self)  # `around_step` calls hooks
        own = given.handed_on(own)
        if given.more:
            now.did(operation("step", args, options))
        run.take_edits()

        def ready() -> Any:
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            self._ready()
            return loss

        with (
            stepping(run.comm.trace, now.number),
            around_step(self, given, apart=not state.sees_whole),
        ):
            if closure is None:
                run.grad_hooks.flush()
                self._ready()
                result = self._step(own, None) if run.may_step() else None
            else:
                run.refuse_closure()
                result = self._step(own, ready)
            now.stepped(self.place)
            if now.verdict is not False:
                used = run.setup.used
                run.setup.stepped_on |= used if only is None else used.intersection(only)
            state.after_step(only)
        run.comm.at_step(now.number)
        run.grad_hooks.stepped()
        return result

    def _ready(self) -> None:
        """Make gradients ready, and note what was done to them."""
        self.run.state.before_step(self._only)
        self._see_done()

    def _see_done(self) -> None:
        for what, shared in self.run.state.done_to_grads(self._only):
            self.run.step.did(what, shared)
        used, only = self.run.setup.used, self._only
        self.run.step.all_scaled(used if only is None else used.intersection(only))

    def _step(self, own: Any, closure: Callable[[], Any] | None) -> Any:
        """Step; what a step has done that ends by an error of the user's, the model has, too."""
        state, self.inside = self.run.state, True
        try:
            with stepping_on_parts(self, closure):
                return state.step(own, closure, self.place)
        except RoundelayError:
            raise
        except Exception:
            state.broke_step(self._only)
            self.run.grad_hooks.stepped()
            raise
        finally:
            self.inside = False

    def _check_groups(self) -> None:
        """Refuse groups that have other parameters than at `prepare`."""
        now = {id(one) for group in vars(self)["param_groups"] for one in group["params"]}
        run, others = (
            self.run,
            (vars(optimizer)["known"] for optimizer in self.run.setup.optimizer.all),
        )
        if now != self.known and (
            not now >= self.known or not (now - self.known).isdisjoint(run.trained.union(*others))
        ):
            raise InvalidArgumentError(
                "The groups of the optimizer have other parameters than at prepare, and ranks keep "
                "gradients and state for those. Take it back first, model, optimizer = "
                "rd.unprepare(model), change the groups, and prepare it again."
            )

    @property
    def _only(self) -> Collection[int] | None:
        """The numbers of its parameters; None where the model has no other optimizer."""
        return self.run.setup.only(self.place)

    # What torch looks at to see that hooks around the step are called already, in the own step.
    vars(step)["hooked"] = True

    @property
    def state(self) -> Any:
        """What the optimizer keeps: where that is divided, tensors that behave as the whole."""
        groups: ShardedGroups | None = vars(self).get("groups")
        if groups is None:
            if not self.inside:
                _watch_state(self)
            return self.run.state.shown_state(vars(self)["state"])
        return vars(self)["state"] if groups.inside else groups.state

    @state.setter
    def state(self, value: Any) -> None:
        own = vars(self).get("state")
        if "run" in vars(self) and "groups" not in vars(self):
            shown = self.run.state.shown_state(own)
            if shown is not own:
                shown.clear()  # which says why it can't be
        vars(self)["state"] = value

    @property
    def _has_all(self) -> bool:
        """Whether this rank has the whole state, of whole parameters, of all the model."""
        mesh = self.run.setup.mesh
        return self.run.state.sees_whole and (mesh is None or not (mesh.shardings or mesh.staged))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of this optimizer, as one device has it. All ranks call it.

        It is gathered on every rank; `rd.save` writes what fits nowhere.
        """
        if self._has_all:
            whole: dict[str, Any] = super().state_dict()  # type: ignore[misc]
            return whole
        return state_with_hooks(self, lambda: whole_state(self.run, self.place))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the whole state of this optimizer, of any strategy's. All ranks call it."""
        self.run.grad_hooks.see_edits()
        if self._has_all:
            taken = loaded_by_torch(self, state_dict, super().load_state_dict)  # type: ignore[misc]
        else:
            load = functools.partial(load_whole_state, self.run, self.place)
            taken = loaded_with_hooks(self, state_dict, load)
        self.run.step.did(operation("load_state_dict", [taken], {}))
        for edits in self.run.step.state_edits():
            edits.note()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse_copy("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy("Copying or pickling")

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as backward should see it: `optimizer.scale(loss).backward()`.

        It is multiplied by the loss scale in fp16, and is the same loss in every other precision.
        """
        if not isinstance(loss, torch.Tensor):
            raise InvalidArgumentError(f"scale takes a loss, a tensor, not {shown(loss)}.")
        scaler = self.run.setup.scaler
        return loss if scaler is None else scaler.apply(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Forget its gradients, wherever the strategy keeps them, and how their losses weigh.

        Gradients of other optimizers stay. Not while a loader's batch has micro-batches to come
        whose gradients are to be added.
        """
        if self.run.step.adds_up:
            return
        self.run.step.forgets(self.place, len(self.run.setup.optimizer.all))
        own = super().zero_grad  # type: ignore[misc]
        self.run.state.zero_grad(own, set_to_none=set_to_none, only=self._only)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale its gradients down to a norm of at most `max_norm`; return what it was.

        The norm is that of one device on the whole batch under every strategy, over the parameters
        of this optimizer. All ranks call it.
        It is NaN, and nothing is scaled, while a loader's batch has more micro-batches to come.
        """
        if self.run.step.holds:
            return torch.tensor(math.nan)
        most, order = number("max_norm", max_norm), number("norm_type", norm_type)
        if not most > 0:
            raise InvalidArgumentError(f"clip_grad_norm_ takes a norm above 0, not {max_norm!r}.")
        self.run.grad_hooks.flush()
        state = self.run.state
        self._see_done()
        self.run.step.did(f"clip_grad_norm_({most}, {order})")
        try:
            state.enter("clip_grad_norm_")
            norm = grad_norm(state, order, self._only)
        except CollectiveMismatch as error:
            raise CollectiveMismatch(
                f"{error}\nThis rank was in clip_grad_norm_, which all ranks call with the same "
                f"norm_type, or none: the norm is that of all gradients."
            ) from None
        factor = most / (norm + 1e-6)  # as torch does
        if factor < 1:
            state.scale_grads(factor, self._only)
        state.brought_together(self._only)
        return torch.tensor(norm, dtype=torch.float64)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Cut every element of its gradients to at most `clip_value`. All ranks call it."""
        if self.run.step.holds:
            return
        most = number("clip_value", clip_value)
        if not most > 0:
            raise InvalidArgumentError(
                f"clip_grad_value_ takes a value above 0, not {clip_value!r}."
            )
        self.run.grad_hooks.flush()
        self._see_done()
        self.run.step.did(f"clip_grad_value_({most})")
        self.run.state.clamp_grads(most, self._only)
        self.run.state.brought_together(self._only)


def _refuse_in_backward(call: str) -> None:
    """Refuse what needs gradients that all ranks have brought together, while they come."""
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - has no other name
        raise InvalidArgumentError(
            f"{call} was called inside backward, by a hook, where gradients are still this rank's "
            f"own and incomplete. Call it after loss.backward()."
        )


def _refuse_copy(call: str) -> NoReturn:
    raise InvalidArgumentError(
        f"{call} of a prepared optimizer would copy the ranks' hold on its model. Keep "
        f"optimizer.state_dict(), which all ranks call, rd.save(path, model, optimizer), or take "
        f"model, optimizer = rd.unprepare(model) first."
    )


def _refuse_scheduler(frame: FrameType | None) -> None:
    """Refuse a scheduler's step between the micro-batches of a batch, of which it knows nothing."""
    found: list[tuple[object, str]] = []
    while frame is not None and len(found) < DEEPEST:
        found.append((frame.f_locals.get("self"), frame.f_code.co_name))
        frame = frame.f_back
    steps = [one for one, name in found if name == "step" and isinstance(one, LRScheduler)]
    made = any(isinstance(one, LRScheduler) and name == "__init__" for one, name in found)
    if steps and not made:
        raise InvalidArgumentError(OFTEN.format(type(steps[-1]).__name__))


def give_back(optimizer: Any) -> None:  # Any: a prepared optimizer, and torch's own afterwards
    """Make a prepared optimizer a plain one of the user's class that steps on the parameters."""
    setup = optimizer.run.setup
    groups = setup.groups[setup.optimizer.groups_of(optimizer.place)]
    tracked = "step" in vars(optimizer)
    vars(optimizer).pop("step", None)
    optimizer.__class__ = optimizer.own_class
    del optimizer.run, optimizer.place, optimizer.known
    for name in ("groups", "edits", "inside"):
        vars(optimizer).pop(name, None)
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group["params"][:] = own
    optimizer.state.clear()
    if tracked:
        _let_schedulers_know(optimizer)


def _watch_state(optimizer: Any) -> None:
    """Look from now on what is written into the state, which the user gets to see."""
    run = optimizer.run
    if "edits" not in vars(optimizer) and run.state.sees_whole and run.comm.size > 1:
        look = functools.partial(_places, optimizer)
        vars(optimizer)["edits"] = StateEdits(look, whole=True)


def _places(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an optimizer keeps, each with its place in words."""
    setup = optimizer.run.setup
    named = zip(setup.stepped, setup.parameters, strict=True)
    names = {id(tensor): one.name for tensor, one in named}
    experts = {id(setup.stepped[index]) for index in setup.experts}
    for key, state in vars(optimizer)["state"].items():
        if id(key) in experts:  # of which every rank has others
            continue
        tensor = isinstance(key, torch.Tensor)
        name = names.get(id(key), "a frozen parameter") if tensor else str(key)
        for word, value in (state if isinstance(state, dict) else {"all": state}).items():
            leaves = [value] if isinstance(value, torch.Tensor) else tree_leaves(value)
            for at, leave in enumerate(leaves):
                which = f"{word}[{at}]" if at else word
                yield f"{which} in the optimizer's state of {name}", leave


def take_over(optimizer: torch.optim.Optimizer, run: Run, place: int) -> None:
    """Make the optimizer a prepared one, in place: schedulers that have it stay right."""
    own = type(optimizer)
    tracked = "step" in optimizer.__dict__  # a scheduler wants to know whether it was called
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = _prepared(own)  # type: ignore[arg-type] # mypy takes no class for hashable
    optimizer.run, optimizer.place = run, place  # type: ignore[attr-defined]
    groups = vars(optimizer)["param_groups"]
    optimizer.known = {id(one) for group in groups for one in group["params"]}  # type: ignore[attr-defined]
    run.step.optimizers.append(weakref.ref(optimizer))
    if tracked:
        _let_schedulers_know(optimizer)


@functools.cache
def _prepared(own: type) -> type:
    kept = {"__doc__": own.__doc__, "__module__": own.__module__, "own_class": own}
    return type(own.__name__, (PreparedOptimizer, own), kept)


def _let_schedulers_know(optimizer: Any) -> None:  # Any: torch's private attributes
    step = type(optimizer).step

    @functools.wraps(step)
    def stepped(*args: Any, **options: Any) -> Any:
        optimizer._opt_called = True  # noqa: SLF001 - what torch's schedulers look at
        return step(optimizer, *args, **options)

    vars(stepped)["_wrapped_by_lr_sched"] = True
    optimizer.step = stepped
