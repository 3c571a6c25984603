"""Hears of every gradient the moment it is complete, and of the end of each backward pass."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointFunction

from roundelay.errors import (
    CommunicationError,
    InvalidArgumentError,
    NotFiniteError,
    RoundelayError,
)
from roundelay.training._autograd import BackwardPass, weakly
from roundelay.training._parameter_edits import ParameterEdits
from roundelay.training._phases import TracedPasses
from roundelay.training._sparse import sparse_parameters
from roundelay.training.shards.shard import Shard
from roundelay.training.strategy import StrategyState

TWICE = (
    "The gradient of {name} came twice in one backward pass, when the first of them was on its way "
    "to the other ranks. torch.utils.checkpoint with use_reentrant=True runs a backward pass of "
    "its own for each part, and {name} is used in several. Use use_reentrant=False, as torch "
    "advises."
)
REENTRANT = (
    "torch.utils.checkpoint with use_reentrant=True runs a backward pass of its own for each part, "
    "and several passes of a step can't be weighed so. Use use_reentrant=False, as torch advises."
)

SPARSE = (
    "The gradient of {name} is sparse, though no module of it had sparse=True at prepare. Have the "
    "operation that makes it give a dense one."
)

LOST = (
    "The gradients of the micro-batches before this one were let go, by model.zero_grad() for "
    "example. Use optimizer.zero_grad(), which waits until the batch is complete."
)

CHANGED = (
    "The gradient of {name} was changed after backward passes inside rd.accumulate, when it was "
    "this rank's own and not yet that of all ranks, so that the ranks would not add up what one "
    "device would. Have the last pass of a step outside, and change gradients after it; or clip by "
    "optimizer.clip_grad_norm_ or clip_grad_value_, which bring them together."
)


class GradHooks:
    """Hooks on the parameters of one model, which tell its strategy; silent while accumulating."""

    def __init__(self, state: StrategyState) -> None:
        self._state = state
        self._step = state.setup.step
        self.passes = TracedPasses(state.setup.everyone.trace, self._step)
        if self.passes.trace is not None:
            self._step.on_backward = weakly(self.passes.enter_backward)
        self._running: Callable[[], BackwardPass | None] = _nothing  # weak: autograd lets it go
        self._tensors = [parameter.tensor for parameter in state.setup.parameters]
        self._dense = set(sparse_parameters(state.setup)) - set(state.sparse)  # as they are sent
        self._come: set[int] = set()  # parameters whose gradients this pass has brought
        self._sends = False  # whether it brings them to the other ranks
        self._task = 0  # its number among autograd's passes; passes inside it have others
        #: Parameters that may come again before it is over; those that have done so before, once
        #: a pass had others inside, as reentrant checkpoints make them.
        self._held: list[int] = []
        self._twice: set[int] = set()
        self._known = False
        #: The first parameter of the last pass, and the gradient that it had then.
        self._first: tuple[int, Callable[[], Any]] = -1, _nothing
        #: Gradients of passes that only added up, as they left them: this rank's own.
        self._left_over: list[tuple[Callable[[], Any], int]] = []
        #: Told at the end of every backward pass that brought gradients together.
        self.at_end: list[Callable[[], None]] = []
        self._hooks: list[Any] = [
            _hook_last(tensor, weakly(self.grad_ready, index))
            for index, tensor in enumerate(self._tensors)
        ]
        #: Where every rank has the same whole parameters, what is written into them.
        self._edits: ParameterEdits | None = None
        if state.compares and (state.setup.comm.size > 1 or state.setup.step.beside is not None):
            self._edits = ParameterEdits(state.setup)

    def grad_ready(self, index: int) -> None:
        """Hear that a gradient is complete."""
        scaler = self._state.setup.scaler
        if scaler is not None:
            scaler.check_scaled()
        grad = self._tensors[index].grad
        if isinstance(grad, Shard):  # that a hook made of what is divided: each rank brings it
            self._tensors[index].grad = grad = grad.full().to(grad.dtype)
        if grad is not None and grad.is_sparse and index not in self._state.sparse:
            if index not in self._dense:
                name = self._state.setup.parameters[index].name
                raise InvalidArgumentError(SPARSE.format(name=name))
            self._tensors[index].grad = grad.to_dense()
        # No frame that may raise holds the pass: an error would, and autograd not let go of it.
        if self._running() is None:
            self._begin(index)
            if self._sends:
                self._state.begin_backward()
        # Without a gradient, as of what was frozen since the forward pass, nothing has come.
        if self._sends and grad is not None:
            self._came(index, grad)

    def _came(self, index: int, grad: torch.Tensor) -> None:
        if index in self._come:
            self._came_again(index)
            return
        self._come.add(index)
        if self._step.alike is not None:
            self._step.alike.note(index, grad)
        inside = torch._C._current_graph_task_id() != self._task  # noqa: SLF001 - torch has no other name
        if inside and (not self._known or index in self._twice):
            self._held.append(index)
        else:
            self._state.grad_ready(index)

    def _came_again(self, index: int) -> None:
        """Let a parameter's gradients add up until the end, if it was held for that."""
        if index not in self._held:
            name = self._state.setup.parameters[index].name
            raise InvalidArgumentError(TWICE.format(name=name))
        self._twice.add(index)

    def _let_go(self) -> None:
        """Have the strategy hear of what was held."""
        held, self._held = self._held, []
        self._known = self._known or bool(held)
        for index in held:
            self._state.grad_ready(index)

    def _begin(self, index: int) -> None:
        step, state = self._step, self._state
        self.passes.enter_backward()
        if (step.passes or step.shared or step.torn) and not self._left(index):
            if step.adds_up:
                raise InvalidArgumentError(LOST)
            step.begin()  # the user has let all gradients go, by model.zero_grad() for example
        self._check_unchanged(come=index)
        try:
            step.begin_pass()
        except InvalidArgumentError as error:
            if _inside_checkpoint():
                raise InvalidArgumentError(REENTRANT) from error
            raise
        adds = step.accumulating
        self._sends = state.every_pass or not adds
        self._come.clear()
        self._held.clear()
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no other name
        over = _Pass(index, adds, self._sends)
        self._running = weakref.ref(BackwardPass(partial(self._over, over)))

    def _left(self, index: int) -> bool:
        """Tell whether gradients of earlier passes are there, now that the first has come."""
        first, before = self._first
        return (
            any(tensor.grad is not None for at, tensor in enumerate(self._tensors) if at != index)
            or (first == index and before() is self._tensors[index].grad is not None)
            or self._state.lifted
        )

    def _over(self, over: _Pass, *, whole: bool) -> None:
        """Hear that a backward pass is over, or that it ended by an error."""
        self._running = _nothing
        self.passes.leave_backward(whole=whole)
        if not whole:
            self._broke(over)
            return
        with self.passes.exchanging():
            self._end(over)
        grad = self._tensors[over.first].grad
        self._first = over.first, _nothing if grad is None else weakref.ref(grad)

    def _end(self, over: _Pass) -> None:
        if self._held:
            self._together(self._let_go)
        if over.adds:
            if over.communicates:
                self._together(self._state.micro_batch_done)
            else:
                self._left_over = [_as_it_is(tensor.grad) for tensor in self._tensors]
            self._step.end_pass(shared=False)
        else:
            self.bring_together()

    def _check_unchanged(self, come: int = -1) -> None:
        """Refuse own gradients that were changed, but for the one that has just come once more.

        What all ranks have let go, or made zero, adds up as on one device.
        """
        left, self._left_over = self._left_over, []
        if not self._step.waiting or self._state.setup.comm.size == 1:
            return
        for index, before in enumerate(left):
            grad = self._tensors[index].grad
            if grad is None or index == come or _as_it_is(grad) == before:
                continue
            if bool(grad.count_nonzero()):
                name = self._state.setup.parameters[index].name
                raise InvalidArgumentError(CHANGED.format(name=name))

    def _together(self, act: Callable[[], None]) -> None:
        """Do what the ranks do together; where it fails, this step is over."""
        try:
            act()
        except RoundelayError as error:
            self.drop()
            self._step.torn = not isinstance(error, NotFiniteError)  # whose batch may be left out
            raise

    def bring_together(self) -> None:
        """Have the strategy make the gradients those of all ranks."""
        self.see_edits()
        self._together(self._state.backward_done)
        self._step.end_pass(shared=True)
        for tell in self.at_end:
            tell()
        self._state.brought_together()

    def see_edits(self) -> None:
        """Notice what the user has written or frozen, to tell it with the gradients."""
        self._step.frozen = {
            index: self._state.setup.parameters[index].name
            for index, tensor in enumerate(self._tensors)
            if not tensor.requires_grad
        }
        if self._edits is not None:
            doubtful = [name for name, number in self._step.written.items() if not number]
            for name, number in self._edits.found(doubtful).items():
                self._step.wrote(name, number)
        for edits in self._step.state_edits():
            for what in edits.found():
                self._step.did(what)

    def stepped(self) -> None:
        """Hear that parameters and state have changed on all ranks alike."""
        self.agreed()
        for edits in self._step.state_edits():
            edits.note()

    def agreed(self) -> None:
        """Hear that all ranks have the same parameters."""
        if self._edits is not None:
            self._edits.note()

    def flush(self) -> None:
        """Bring together what passes inside `rd.accumulate` have left, if no pass outside did."""
        if self._step.waiting:
            self._check_unchanged()
            if not self._state.every_pass:
                self._state.begin_backward()
            self.bring_together()

    def _broke(self, over: _Pass) -> None:
        """Tell the other ranks, who wait."""
        if over.communicates:
            with contextlib.suppress(RoundelayError):  # they know
                self._state.abandon(whole=not over.adds)
            self.drop()
        self._step.torn = True

    def miss(self) -> None:
        """Take part in a pass of the other ranks that does not come here, as the model failed."""
        adds = self._step.accumulating
        if adds and not self._state.every_pass:
            return
        try:
            self._state.begin_backward()
            self._state.abandon(whole=not adds)
        except CommunicationError:
            self._step.known = True

    def drop(self, *, all_of: bool = True) -> None:
        """Have this step be one that raised an error; gradients go if all ranks let go of them."""
        self._step.torn = True  # so that it counts for nothing that the user did
        if all_of:
            self.forget()
            self._step.torn = True

    def forget(self) -> None:
        """Let go of all gradients, and of what is known of their step."""
        self._step.begin()
        self._state.forget()

    def check_stepped(self, call: str) -> None:
        """Refuse to let gradients go of which no optimizer has made a step yet."""
        step = self._step
        there = self._state.lifted or any(tensor.grad is not None for tensor in self._tensors)
        if step.passes and there and not step.torn:
            raise InvalidArgumentError(
                f"{call} was called between a backward pass and the step, and would drop the "
                f"gradients. Call optimizer.step() before, or optimizer.zero_grad() to have them "
                f"dropped."
            )

    def remove(self) -> None:
        """Hear no more."""
        for hook in self._hooks:
            hook.remove()


class _OursLast(OrderedDict[int, Any]):
    """The hooks of one parameter, with ours behind those that are added later.

    They would find that the gradient has gone on its way.
    """

    ours = 0  # its number, when it is there

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        if self.ours in self and key != self.ours:
            super().__setitem__(self.ours, self.pop(self.ours))


def _hook_last(tensor: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Add a hook that is called when all others were, whenever they are added."""
    before, hooks = tensor._post_accumulate_grad_hooks, _OursLast()  # noqa: SLF001 - torch has no other name

    def earlier(tensor: torch.Tensor) -> None:
        for call in list(before.values()):  # which may still be removed
            call(tensor)

    if before:
        hooks[-1] = earlier
    tensor._post_accumulate_grad_hooks = hooks  # noqa: SLF001 - likewise
    handle: Any = tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    hooks.ours = handle.id
    return handle


def _inside_checkpoint() -> bool:
    """Tell whether this backward pass runs inside another one."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


def _as_it_is(grad: torch.Tensor | None) -> tuple[Callable[[], Any], int]:
    """Return what tells later whether a gradient was replaced or written into."""
    return (_nothing, 0) if grad is None else (weakref.ref(grad), grad._version)  # noqa: SLF001 - torch has no other name


def _nothing() -> None:
    """Stand in for a reference to what is not there."""


class _Pass(NamedTuple):
    """One backward pass."""

    first: int  # parameter whose gradient came
    adds: bool
    communicates: bool
