"""A prepared model at work: the strategy, its hooks, and the step at hand."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roundelay import _core
from roundelay.communicator import Communicator, Traffic
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.staging import staging_of
from roundelay.training._autograd import weighed
from roundelay.training._exchange import compare_steps
from roundelay.training._grad_hooks import GradHooks
from roundelay.training._module_hooks import ModuleHook
from roundelay.training._origins import Turn
from roundelay.training._setup import Setup
from roundelay.training._step import StepState
from roundelay.training.checkpoint.saving import Saves
from roundelay.training.strategy import Strategy, StrategyState

# Source lines in errors are the user's, not those of torch between him and us.
_core.skip_package(f"{Path(torch.__file__).parent}/")

WHOLE_BY_NAME = (
    "rd.full_state_dict(model) has whole tensors for a model that you build anew, and rd.save a "
    "checkpoint that loads on any mesh, or none."
)
FIRST_UNPREPARE = "Take it back first: model, optimizer = rd.unprepare(model)."


class Run:
    """One model in training on one rank."""

    def __init__(self, strategy: Strategy, setup: Setup) -> None:
        self.strategy, self.setup = strategy, setup
        self.step = setup.step
        self.state: StrategyState = strategy.share(setup)
        self.grad_hooks = GradHooks(self.state)
        self.grad_hooks.at_end.append(self._share_out)
        #: The steps, and what the ranks had exchanged, when counting began.
        self.counted_from: tuple[int, list[Traffic] | None] = 0, self.state.traffic()
        self.along_from = self.sent_along()
        self.trained = {
            id(parameter.tensor) for parameter in setup.parameters
        }  # parameters of the model
        self._weighing: list[Any] = []  # hooks
        self._looking = False  # whether we see what the model is given
        #: On the model itself, beside those of the strategy.
        self.hooks: list[Any] = []
        if setup.precision.mixed:
            follow = self._follow_loading()
            self.hooks.append(setup.model.register_load_state_dict_pre_hook(ModuleHook(follow)))  # type: ignore[no-untyped-call]
        if strategy.synchronous and setup.comm.size > 1:
            hook = ModuleHook(partial(_saw_forward, weakref.ref(self.step)))
            self.hooks.append(setup.model.register_forward_hook(hook, always_call=True))
        setup.comm.at_step(0)
        self.saves = Saves(lambda: setup.everyone)
        vars(setup.model)[_KEPT] = _Kept(self)
        _live.runs = [weakref.ref(run) for run in (*live_runs(), self)]

    def _follow_loading(self) -> Callable[..., None]:
        """Return what has `model.load_state_dict` reach what the optimizer steps on, unrounded."""
        weak = weakref.ref(self)  # as in `weakly`

        def follow(
            module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, *_: object
        ) -> None:
            run = weak()
            if run is None or module is not run.setup.model:  # but a copy of it
                return
            named = enumerate(run.setup.names_now())
            for name, index in [(name, index) for index, names in named for name in names]:
                values, like = state.get(prefix + name), run.setup.parameters[index].tensor
                if values is not None and values.shape == like.shape:  # torch tells if it is not
                    run.state.loaded(index, values)

        return follow

    def close(self) -> None:
        """Leave the model: no hook is left on it."""
        self.grad_hooks.remove()
        for hook in (*self.hooks, *self._weighing):
            hook.remove()
        self.state.close()
        vars(self.setup.model).pop(_KEPT, None)
        _live.runs = [weakref.ref(run) for run in live_runs() if run is not self]

    @property
    def comm(self) -> Communicator:
        """The ranks that train together."""
        return self.setup.comm

    @property
    def everyone(self) -> Communicator:
        """These, and the ranks that have other parts of the model."""
        return self.setup.everyone

    @property
    def alike(self) -> Communicator:
        """All ranks that have the same modules, whatever data they see."""
        mesh = self.setup.mesh
        return self.comm if mesh is None or mesh.alone else mesh.alike

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self.step.number

    def sent_along(self) -> dict[str, int] | None:
        """Return the bytes that the model sent along the axes of a mesh, beside its strategy."""
        mesh = self.setup.mesh
        return None if mesh is None else mesh.sent()

    def _share_out(self) -> None:
        """Make the sum over a loader's micro-batches their mean; weighted losses need it not."""
        if self.step.parts > 1 and not self.step.weighed:
            self.state.scale_grads(1 / self.step.parts)

    def take_turn(self, turn: Turn, batch: Any, key: tuple[int, ...]) -> None:
        """Hear of a loader's next micro-batch; what weighs the same as it has the same key."""
        others = [one for one in self.step.turns if one is not turn]
        matters = turn.parts > 1 or turn.factor != 1
        self.step.turns = [*others, turn] if matters else others
        if self in live_runs():  # or it is drawn ahead, by another thread
            self.step.places[id(turn)] = turn.place
            self.step.dealt[id(turn)] = turn.dealt
        if self.comm.size > 1:
            self.step.origins.drawn(batch, turn, key=key)
        if turn.uneven and not self._looking and self.comm.size > 1:
            self._look()
        self._weigh()

    def _look(self) -> None:
        """See from now on what the model is given."""
        weak = weakref.ref(self)

        def before(module: torch.nn.Module, args: Any, options: Any) -> None:
            run = weak()
            if run is None or module is not run.setup.model:  # but a copy of it
                return
            if run.step.origins.given((args, options)):
                run._weigh(due=True)  # noqa: SLF001 - its own

        def after(module: torch.nn.Module, _: Any, output: Any) -> None:
            run = weak()
            if run is not None and module is run.setup.model and torch.is_grad_enabled():
                run.step.origins.returned(output)

        outside: Any = torch.compiler.disable
        model = self.setup.model
        self.hooks.append(model.register_forward_hook(ModuleHook(outside(after))))
        given = ModuleHook(outside(before))
        self.hooks.append(model.register_forward_pre_hook(given, with_kwargs=True))
        self._looking = True

    def _weigh(self, *, due: bool = False) -> None:
        """Have gradients multiplied where that is due; hooks on parameters are there only then."""
        due = due or (self.step.turn is not None and self.step.turn.factor != 1)
        due = due or self.step.origins.pending  # also when the loop is over
        if due and not self._weighing:
            step = self.step
            self._weighing = [
                weighed(parameter.tensor, step)
                for at, parameter in enumerate(self.setup.parameters)
                if at not in self.setup.experts  # whose gradients are weighed where they come from
            ]
        elif not due:
            for hook in self._weighing:
                hook.remove()
            self._weighing = []

    def leave(self, turn: Turn) -> None:
        """End a loop over a loader; gradients of a batch that it has begun and not ended go."""
        self.step.turns = [one for one in self.step.turns if one is not turn]
        self.step.places.pop(id(turn), None)
        self.step.dealt.pop(id(turn), None)
        if turn.more and self.step.owner is turn:
            self.grad_hooks.forget()
        turn.more = False
        self._weigh()

    def may_step(self) -> bool:
        """Tell whether the gradients are fit for a step; where the loss is scaled, all agree."""
        scaler = self.setup.scaler
        if scaler is None:
            return True
        if self.step.verdict is None:
            names = [parameter.name for parameter in self.setup.parameters]
            fit = scaler.settle(self.everyone, self.steps, names)
            self.step.fit += fit
            self.step.skipped += not fit
            self.step.verdict = fit
        scaler.known()
        return self.step.verdict

    def refuse_closure(self) -> None:
        """Refuse a closure where steps may have to be skipped, or wait."""
        if self.setup.scaler is not None:
            raise InvalidArgumentError(
                "step(closure) can't be skipped when gradients overflow, so it does not go with a "
                "scaled loss. Use bf16 or fp32, or an optimizer that needs no closure."
            )
        if self.step.parts > 1:
            raise InvalidArgumentError(
                "step(closure) repeats the loss of one micro-batch, and a step is for all of a "
                "batch. Have the loader give whole batches, without micro_batch=."
            )

    def take_edits(self) -> None:
        """Bring what the user has written to what is stepped on, and note it.

        What is divided, or on servers, is the same on all ranks then, whoever has written it;
        what was written into masters shows in the model only then.
        """
        if not self.state.sees_whole:
            self.grad_hooks.see_edits()
        self.state.take_edits()
        if self.state.sees_whole:
            self.grad_hooks.see_edits()

    def compare(self) -> None:
        """See that all ranks did the same since their last backward pass. Every rank calls it."""
        if self.mark() is not None and self.everyone.size > 1:
            compare_steps(self.comm, self.step)

    def compare_all(self) -> None:
        """See that, and that stages of a pipeline have the same of what they share."""
        self.compare()
        staging = staging_of(self.setup.model)
        if staging is not None:
            staging.compare_copies()

    def mark(self) -> float | None:
        """Return a number that all ranks share if they did; None where they need not."""
        self.grad_hooks.see_edits()
        return self.step.mark if self.strategy.synchronous else None

    def check_still_the_same(self) -> None:
        """Refuse a model that trains other parameters than it did; frozen ones are not used."""
        trained, model = self.trained, self.setup.model
        if not any(
            parameter.requires_grad and id(parameter) not in trained
            for parameter in _parameters(model)
        ):
            return
        for name, one in model.named_parameters():
            if one.requires_grad and id(one) not in trained:
                raise InvalidArgumentError(
                    f"The parameter {name} was {self._fate(name)}, and no rank brings its "
                    f"gradients together. Unfreeze and replace parameters before prepare, or "
                    f"between rd.unprepare and another prepare."
                )

    def _fate(self, name: str) -> str:
        """Say what became of a parameter since `prepare`."""
        replaced = any(name in known.names for known in self.setup.parameters)
        return "replaced after prepare" if replaced else "not trained at prepare"


def _saw_forward(weak: weakref.ref[StepState], _: torch.nn.Module, __: Any, output: Any) -> None:
    """Note that the model raised an error in training, which the user may catch."""
    if output is None and sys.exc_info()[0] is not None and torch.is_grad_enabled():
        step = weak()
        if step is not None:
            step.raised += 1


def _parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield all parameters, shared ones more than once, in a third of torch's own time."""
    known, left = {model}, [model]
    while left:
        module = left.pop()
        for parameter in module._parameters.values():  # noqa: SLF001 - torch has no other name
            if parameter is not None:
                yield parameter
        for child in module._modules.values():  # noqa: SLF001 - likewise
            if child is not None and child not in known:
                known.add(child)
                left.append(child)


def refuse_divided(run: Run, call: str, module: torch.nn.Module | None = None) -> None:
    """Refuse what needs whole parameters in layers that a mesh has divided, or in all stages."""
    mesh = run.setup.mesh
    if mesh is None:
        return
    mine = None if module is None else {id(one) for one in module.parameters()}
    for name, one in run.setup.model.named_parameters():
        if name in mesh.shardings and (mine is None or id(one) in mine):
            raise InvalidArgumentError(
                f"{call} would have {name} whole, and its layer computes with the part that "
                f"{mesh.mesh!r} gives this rank. {WHOLE_BY_NAME}"
            )
    if module is None and mesh.staged:
        raise InvalidArgumentError(
            f"{call} would have the whole model, and {mesh.mesh!r} gives each rank one stage of "
            f"it. {WHOLE_BY_NAME}"
        )


_KEPT = "_roundelay_run"  # the attribute by which a model keeps its run


class _Kept:
    """A run that stays behind when its model is copied or pickled: the copy is not prepared."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


_live = threading.local()  # ranks may be threads of one process


def found_run(model: object) -> Run | None:
    """Return the run of a model, if it is prepared."""
    kept = None
    if isinstance(model, torch.nn.Module):  # or what torch.compile has made of one
        inner = vars(model)["_modules"].get("_orig_mod")
        kept = vars(model).get(_KEPT) or (None if inner is None else vars(inner).get(_KEPT))
    found: Run | None = None if kept is None else kept.run
    return found


def run_of(call: str, model: object) -> Run:
    """Return the run of a prepared model."""
    found = found_run(model)
    if found is None:
        raise InvalidArgumentError(
            f"{call} needs a model that rd.prepare has returned, not {type(model).__name__}."
        )
    return found


def run_with(call: str, module: object) -> Run:
    """Return the run of a prepared model, or of the one that a module is part of."""
    if isinstance(module, torch.nn.Module):
        own = vars(module)["_modules"].get("_orig_mod", module)
        for run in live_runs():
            if any(one is own for one in run.setup.model.modules()):
                return run
    return run_of(call, module)


def live_runs() -> list[Run]:
    """Return the runs of all models that this thread has prepared and that are still there."""
    found: list[Run | None] = [one() for one in getattr(_live, "runs", [])]
    return [one for one in found if one is not None]


def refuse_prepared(model: torch.nn.Module) -> None:
    """Refuse a model of which a part is in training already: two runs would share its gradients."""
    for name, module in model.named_modules():
        if vars(module).get(_KEPT) is not None:
            what = f"The module {name} of this model" if name else "This model"
            raise InvalidArgumentError(f"{what} is prepared already. {FIRST_UNPREPARE}")
    mine = {id(one): name for name, one in model.named_parameters()}
    for run in live_runs():
        shared = [
            mine[id(parameter.tensor)]
            for parameter in run.setup.parameters
            if id(parameter.tensor) in mine
        ]
        if shared:
            raise InvalidArgumentError(
                f"The parameter {shared[0]} belongs to another prepared model, too, and would be "
                f"trained by both. Prepare one model that has both as modules."
            )
