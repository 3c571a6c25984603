"""ZeRO-3: units are gathered just before they are used, the next one ahead, and freed after.

Modules say when: before and after forward by their own hooks, in backward by hooks on what they
returned and on what they were given. Those hooks bring units early and let them go; that they are
never missed is the work of `SavedTensors`, by which autograd asks for what it needs. A unit that is
here is counted, so that modules may be called several times, within one another, and again while
backward recomputes activations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.training._autograd import BackwardPass, weakly
from roundelay.training._module_hooks import ModuleHook
from roundelay.training._step import StepState
from roundelay.training.shards.sharded_parameter import TRANSFORMED, is_divided, transformed
from roundelay.training.strategies.zero._saved_tensors import SavedTensors
from roundelay.training.strategies.zero._sharded_unit import ShardedUnit, UnitGathering

MOST_NOTED = 8  # calls of each unit that are remembered where the model itself is not called
FIRST = "_roundelay_first"  # what a tensor's hooks call before all else
WRITTEN = (
    "The parameter {name} was written into in place while its module ran, as "
    "nn.Embedding(max_norm=…) does. Under zero3 that would be lost when it is divided again. Write "
    "into parameters inside `with rd.whole(module)`, between steps."
)
UNTOLD = 2  # units that stay in backward though nothing will tell when they are done with


class UnitScheduler(UnitGathering):
    """All units of one model on one rank."""

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        *,
        keeps: bool = False,
        step: StepState,
    ) -> None:
        super().__init__(comm, units, keeps=keeps)
        self._step = step
        self._last: list[ShardedUnit] = []  # of the one before, which tells what comes next
        self._untold: list[ShardedUnit] = []  # in backward, and nothing tells when not; latest last
        self._saved = SavedTensors(self._units, self._ask)
        self.torn: Callable[[], Callable[[], None] | None] = _nobody  # who is told that it raised
        self.left_unit: Callable[[], Callable[[ShardedUnit], None] | None] = _nobody  # likewise
        self._hooks: list[Any] = []
        unit_modules = {id(unit.unit.module) for unit in units}
        for module in model.modules():
            needs = self._needs(module, unit_modules)
            if module is model or needs:
                self._watch(module, needs, whole=module is model)
            if isinstance(module, nn.TransformerEncoder) and not needs:
                self._show_first_layer(module, self._needs(module.layers[0], unit_modules))

    def _needs(self, module: nn.Module, unit_modules: set[int]) -> list[ShardedUnit]:
        """Return what a module computes with: its unit, and those that own what it shares."""
        found: dict[int, ShardedUnit] = {}
        waiting = [module]
        while waiting:
            inner = waiting.pop()
            for tensor in inner.parameters(recurse=False):
                owner = self._of_parameter[id(tensor)]
                found[id(owner)] = owner
            if id(module) in unit_modules:
                waiting.extend(child for child in inner.children() if id(child) not in unit_modules)
        return [unit for unit in self._units if id(unit) in found]

    def _show_first_layer(self, module: nn.TransformerEncoder, needs: list[ShardedUnit]) -> None:
        """Have the first layer whole while torch looks at its weights for the quick way of eval."""

        def shows() -> bool:
            return not (module.training or torch.is_grad_enabled())

        def before(own: nn.Module, _: Any) -> None:
            if own is module and shows():
                self._enter(needs)

        def after(own: nn.Module, _: Any, result: Any) -> None:
            if own is module and shows() and any(unit.users for unit in needs):
                self._leave(needs, result)

        self._hooks += [
            module.register_forward_pre_hook(_outside(before)),
            module.register_forward_hook(_outside(after), always_call=True),
        ]

    def _watch(self, module: nn.Module, needs: list[ShardedUnit], *, whole: bool) -> None:
        taken: list[tuple[bool, bool]] = []  # for each call: whether it entered, and watches

        def before(own: nn.Module, args: Any, options: Any) -> None:
            if own is not module:
                return  # but a copy of it, which has its parameters
            plain = self._transformed(
                module, needs
            )  # it is whole then, and torch.func takes no hooks
            if whole:
                self._begin_forward()
                self._depth += 1
            inside = plain or all(unit.here and (unit.users or unit.in_backward) for unit in needs)
            taken.append((not inside, not plain and self._saved.enter()))
            if not inside:
                self._enter(needs)
                self._at_end_of_inputs(needs, (args, options))

        def after(own: nn.Module, __: Any, ___: Any, result: Any) -> None:
            if own is not module:
                return
            entered, watches = taken.pop() if taken else (False, False)
            if watches:
                self._saved.leave()
            if entered:
                self._leave(needs, result)
            if whole:
                failed = result is None and sys.exc_info()[1] is not None
                with suppress(*[CollectiveMismatch] * failed):  # the error of forward is told
                    self._end_forward()

        self._hooks += [
            module.register_forward_pre_hook(_outside(before), with_kwargs=True),
            module.register_forward_hook(_outside(after), with_kwargs=True, always_call=True),
        ]

    def _transformed(self, module: nn.Module, needs: Sequence[ShardedUnit]) -> bool:
        """Tell whether torch.func runs; its units must stay, or not be those of the module."""
        if not transformed():
            return False
        own = any(
            id(parameter) in self._of_parameter or is_divided(parameter)
            for parameter in module.parameters()
        )
        for unit in needs if own else ():
            if not unit.pins:
                raise InvalidArgumentError(TRANSFORMED.format(name=unit.name))
        return True

    # ---- forward

    def _begin_forward(self) -> None:
        if self._depth or torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - in backward
            return
        if not any(unit.kept for unit in self._units):
            self._finish()  # what an earlier pass that failed has left
        self._last, self.order = self.order, []

    def _end_forward(self) -> None:
        self._depth -= 1
        # What was fetched ahead, before forward went another way or raised, goes; but not where
        # all ranks gather a unit once until backward is over: it would be gathered twice here.
        stays = self.keeps and torch.is_grad_enabled()
        if not self._depth and not self._inside_backward and not stays:
            for unit in self._units:
                if unit.handles is not None:
                    self._reshard(unit)

    def _enter(self, needs: Sequence[ShardedUnit]) -> None:
        for unit in needs:
            unit.users += 1
            if not self._inside_backward:
                self._note(unit)
            self._unshard(unit)
        if not self._inside_backward:
            self._prefetch(self._next())

    def _note(self, unit: ShardedUnit) -> None:
        """Remember the order of this pass; where only parts of a model are called, some of it."""
        if not self._depth and len(self.order) >= MOST_NOTED * len(self._units):
            self.order.clear()
        self.order.append(unit)

    def _next(self) -> ShardedUnit | None:
        """Return what came next the last time, if all went the same way until here."""
        count = len(self.order)
        if self.order != self._last[:count]:
            return None
        return next((one for one in self._last[count:] if not one.here), None)

    def _leave(self, needs: Sequence[ShardedUnit], result: Any) -> None:
        for unit in needs:
            unit.users -= 1
        for tensor in _differentiable(result) if torch.is_grad_enabled() else ():
            first: list[Callable[[], None]] = []
            vars(tensor)[FIRST] = first
            tensor.register_hook(self._before_backward(needs, first))  # type: ignore[no-untyped-call]
        stays = self.keeps and torch.is_grad_enabled()
        written = None
        for unit in needs:
            if unit.users or unit.in_backward or unit.pins:
                continue
            if unit.here:
                written = written or next(
                    filter(None, (flat.written() for flat in unit.flats)), None
                )
            if stays and unit.here:
                self._keep_rows(unit)
            else:
                self._reshard(unit)
        if written is not None:
            raise InvalidArgumentError(WRITTEN.format(name=written))

    # ---- backward

    def _before_backward(
        self, needs: Sequence[ShardedUnit], first: list[Callable[[], None]]
    ) -> Callable[[torch.Tensor], None]:
        # Weak: a graph must not keep the model, which may keep the graph.
        come_to = weakly(self.come_to, [self._units.index(unit) for unit in needs])

        def hook(_: torch.Tensor) -> None:
            for tell in first:  # modules that were given this tensor are done with it
                tell()
            come_to()

        return hook

    def come_to(self, numbers: Sequence[int]) -> None:
        """Bring what backward needs now, and begin to bring what it needs next."""
        needs = [self._units[number] for number in numbers]
        self._begin_backward()
        for unit in needs:
            self._unshard_for_backward(unit)
        self._prefetch(self._one_before(needs))

    def _begin_backward(self) -> None:
        if not self._inside_backward:
            self._inside_backward, self._prefetched = True, []
            BackwardPass(self.end)
            if self._step.on_backward is not None:
                self._step.on_backward()

    def _unshard_for_backward(self, unit: ShardedUnit) -> None:
        if not unit.in_backward:
            unit.in_backward = True
            unit.missing = set(unit.trained)
        self._unshard(unit)
        if unit.calls <= 0 and unit.unit.name:
            self._untold = [*(other for other in self._untold if other is not unit), unit]
            for other in self._untold[:-UNTOLD]:
                if not other.users:
                    self._reshard(other)  # autograd asks again if it must
            self._untold = [other for other in self._untold if other.here]

    def _ask(self, unit: ShardedUnit) -> None:
        """Bring a unit because autograd reads what it saved of it, wherever that had gone."""
        if unit.here:
            return
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - not in backward
            raise InvalidArgumentError(
                f"A tensor that autograd saved of {unit.name} is divided between the ranks under "
                f"zero3 and can be read in backward only."
            )
        self._begin_backward()
        self._unshard_for_backward(unit)

    def _one_before(self, needs: Sequence[ShardedUnit]) -> ShardedUnit | None:
        """Return the unit that forward used before these, which backward comes to next."""
        places = [at for at, one in enumerate(self.order) if one in needs]
        last = places[-1] if places and not self._whole(needs) else len(self.order)
        before = (one for one in reversed(self.order[:last]) if not one.in_backward and one.trained)
        return next(before, None)

    @staticmethod
    def _whole(needs: Sequence[ShardedUnit]) -> bool:
        """Tell whether this is the model itself, which ends after all of its units."""
        return any(unit.unit.name == "" for unit in needs)

    def _at_end_of_inputs(self, needs: Sequence[ShardedUnit], given: Any) -> None:
        """Free units when the gradients of all that the module was given are there."""
        if not torch.is_grad_enabled() or self._inside_backward:
            return
        for unit in needs:
            unit.open += 1
        inputs = _differentiable(given)
        if not inputs:
            return
        left = count = len(inputs)  # the hook must not hold the tensors, which hold the hook
        come_past = weakly(self.come_past, [self._units.index(unit) for unit in needs])
        for unit in needs:
            unit.calls += 1

        def tell(*_: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                left = count  # the graph may be used again
                come_past()

        for tensor in inputs:
            first = vars(tensor).get(FIRST)
            if first is None:
                tensor.register_hook(tell)  # type: ignore[no-untyped-call]
            else:
                first.append(tell)

    def come_past(self, numbers: Sequence[int]) -> None:
        """Free what backward has no more use for, whether all its gradients came or not."""
        for one in (self._units[number] for number in numbers):
            one.calls -= 1
            one.open -= 1
            if one.in_backward and not one.users and one.calls <= 0:
                self._reshard(one)
                # Not where a graph is used again, whose calls are no longer counted.
                if one.open == 0 and (tell := self.left_unit()) is not None:
                    tell(one)

    def grad_ready(self, index: int, owner: ShardedUnit) -> None:
        """Hear of a gradient of a unit, which may be the last one."""
        owner.missing.discard(index)
        done = owner.in_backward and not owner.users and not owner.missing and owner.calls <= 0
        if done and not owner.frozen:
            self._reshard(owner)

    def end(self, *, whole: bool) -> None:
        """Hear that backward is over: all of it (`whole`), or because it raised an error."""
        for unit in self._units:
            unit.open = 0
        if whole:
            self._prefetched_before = self._prefetched
            self._finish()
        elif self._inside_backward and (torn := self.torn()) is not None:
            torn()

    def _finish(self) -> None:
        """Free all that is left at the end of backward."""
        self._untold.clear()
        super()._finish()

    def remove(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()


def _outside(hook: Callable[..., None]) -> ModuleHook:
    """Return a hook into which the compiler does not look: it compiles what lies between."""
    disable: Any = torch.compiler.disable
    return ModuleHook(disable(hook))


def _nobody() -> None:
    """Stand in for a weak reference to nobody."""


def _differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure that autograd has computed, and will go back through."""
    return [one for one in tree_leaves(value)
            if isinstance(one, torch.Tensor) and one.grad_fn is not None]  # fmt: skip
