"""ZeRO-3: units are gathered just before they are used, the next one ahead, and freed after.

Modules say when: before and after forward by their own hooks, in backward by hooks on what they
returned and on what they were given. A unit that is here is counted, so that modules may be called
several times, within one another, and again while backward recomputes activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from roundelay.communicator import Communicator
from roundelay.communicator.start import Handle
from roundelay.training._zero_flats import Flat
from roundelay.training._zero_units import Unit

__all__ = ["Flight", "Traveller"]

FIRST = "_roundelay_first"  # what a tensor's hooks call before all else


class Traveller:
    """A unit that is away, on its way, or here."""

    def __init__(self, unit: Unit, flats: Sequence[Flat]) -> None:
        self.unit, self.flats = unit, list(flats)
        self.handles: list[Handle] | None = None  # while on its way
        self.here = False
        self.users = 0  # modules that run with it at the moment
        self.in_backward = False
        #: Parameters that get gradients, and those of them that have none yet in this pass.
        self.trained = frozenset(
            place.index for flat in flats if flat.trained for place in flat.layout.places
        )
        self.missing: set[int] = set()
        self.frozen = any(not flat.trained for flat in flats)
        self.calls = 0  # whose inputs are still to get gradients

    @property
    def nbytes(self) -> int:
        """What it takes up when it is here."""
        return sum(flat.nbytes for flat in self.flats)


class Flight:
    """All units of one model on one rank."""

    def __init__(
        self, comm: Communicator, model: nn.Module, travellers: Sequence[Traveller]
    ) -> None:
        self.comm, self._travellers = comm, list(travellers)
        self._of_parameter = {
            id(tensor): one for one in travellers for tensor in one.unit.parameters
        }
        self.order: list[Traveller] = []  # of the latest forward pass
        self._last: list[Traveller] = []  # of the one before, which tells what comes next
        self._inside_backward = False
        self._depth = 0  # of calls of the model
        self.in_flight = 0  # bytes
        self.peak = 0
        self._hooks: list[Any] = []
        units = {id(one.unit.module) for one in travellers}
        for module in model.modules():
            needs = self._needs(module, units)
            if module is model or needs:
                self._watch(module, needs, whole=module is model)

    def _needs(self, module: nn.Module, units: set[int]) -> list[Traveller]:
        """Return what a module computes with: its unit, and those that own what it shares."""
        found: dict[int, Traveller] = {}
        waiting = [module]
        while waiting:
            one = waiting.pop()
            for tensor in one.parameters(recurse=False):
                owner = self._of_parameter[id(tensor)]
                found[id(owner)] = owner
            if id(module) in units:
                waiting.extend(child for child in one.children() if id(child) not in units)
        return [one for one in self._travellers if id(one) in found]

    def _watch(self, module: nn.Module, needs: list[Traveller], *, whole: bool) -> None:
        taken: list[bool] = []  # for each call of the module that runs

        def before(_: nn.Module, args: Any, options: Any) -> None:
            if whole:
                self._begin_forward()
                self._depth += 1
            inside = all(one.here and (one.users or one.in_backward) for one in needs)
            taken.append(not inside)
            if not inside:
                self._enter(needs)
                self._at_end_of_inputs(needs, (args, options))

        def after(_: nn.Module, __: Any, ___: Any, result: Any) -> None:
            if taken and taken.pop():
                self._leave(needs, result)
            if whole:
                self._end_forward()

        self._hooks += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    # ---- forward

    def _begin_forward(self) -> None:
        if self._depth or torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - in backward
            return
        self._finish()  # what an earlier pass that failed has left
        self._last, self.order = self.order, []

    def _end_forward(self) -> None:
        self._depth -= 1
        if not self._depth and not self._inside_backward:
            for one in self._travellers:
                if one.handles is not None:  # fetched ahead, and then forward went another way
                    self._drop(one)

    def _enter(self, needs: Sequence[Traveller]) -> None:
        for one in needs:
            one.users += 1
            if not self._inside_backward:
                self.order.append(one)
            self._bring(one)
        if not self._inside_backward:
            self._fetch(self._next())

    def _next(self) -> Traveller | None:
        """Return what came next the last time, if all went the same way until here."""
        count = len(self.order)
        if self.order != self._last[:count]:
            return None
        return next((one for one in self._last[count:] if not one.here), None)

    def _leave(self, needs: Sequence[Traveller], result: Any) -> None:
        for one in needs:
            one.users -= 1
        outputs = _differentiable(result) if torch.is_grad_enabled() else []
        for tensor in outputs:
            first: list[Callable[[], None]] = []
            vars(tensor)[FIRST] = first
            tensor.register_hook(self._before_backward(needs, first))  # type: ignore[no-untyped-call]
        hidden = torch.is_grad_enabled() and not outputs and result is not None
        for one in needs:
            # Where no output can be watched, only the end of backward can tell.
            if not one.users and not one.in_backward and not (hidden and one.trained):
                self._drop(one)

    # ---- backward

    def _before_backward(
        self, needs: Sequence[Traveller], first: list[Callable[[], None]]
    ) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            for tell in first:  # modules that were given this tensor are done with it
                tell()
            if not self._inside_backward:
                self._inside_backward = True
                engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as in _arrivals
                engine.queue_callback(self._finish)
            for one in needs:
                if not one.in_backward:
                    one.in_backward = True
                    one.missing = set(one.trained)
                self._bring(one)
            self._fetch(self._one_before(needs))

        return hook

    def _one_before(self, needs: Sequence[Traveller]) -> Traveller | None:
        """Return the unit that forward used before these, which backward comes to next."""
        places = [at for at, one in enumerate(self.order) if one in needs]
        last = places[-1] if places and not self._whole(needs) else len(self.order)
        before = (one for one in reversed(self.order[:last]) if not one.in_backward and one.trained)
        return next(before, None)

    @staticmethod
    def _whole(needs: Sequence[Traveller]) -> bool:
        """Tell whether this is the model itself, which ends after all of its units."""
        return any(one.unit.name == "" for one in needs)

    def _at_end_of_inputs(self, needs: Sequence[Traveller], given: Any) -> None:
        """Free units when the gradients of all that the module was given are there."""
        if not torch.is_grad_enabled() or self._inside_backward:
            return
        inputs = _differentiable(given)
        if not inputs:
            return
        left = count = len(inputs)  # the hook must not hold the tensors, which hold the hook
        for one in needs:
            one.calls += 1

        def tell(*_: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                left = count  # the graph may be used again
                for one in needs:
                    one.calls -= 1
                    self._drop_if_done(one)

        for tensor in inputs:
            first = vars(tensor).get(FIRST)
            if first is None:
                tensor.register_hook(tell)  # type: ignore[no-untyped-call]
            else:
                first.append(tell)

    def arrived(self, index: int, owner: Traveller) -> None:
        """Hear of a gradient of a unit, which may be the last one."""
        owner.missing.discard(index)
        if not owner.frozen:
            self._drop_if_done(owner)

    def _drop_if_done(self, one: Traveller) -> None:
        if one.in_backward and not one.users and not one.missing and one.calls <= 0:
            self._drop(one)

    def _finish(self) -> None:
        """Free all that is left at the end of backward."""
        self._inside_backward = False
        for one in self._travellers:
            one.users = one.calls = 0
            one.in_backward = False
            one.missing.clear()
            self._drop(one)

    # ---- moving

    def _fetch(self, one: Traveller | None) -> None:
        """Begin to gather a unit."""
        if one is None or one.here or one.handles is not None:
            return
        self.in_flight += one.nbytes
        self.peak = max(self.peak, self.in_flight)
        one.handles = []
        for flat in one.flats:
            mine, whole = flat.make_room()
            one.handles.append(self.comm.start.all_gather(mine, out=whole, axis=0))

    def _bring(self, one: Traveller) -> None:
        if one.here:
            return
        self._fetch(one)
        self._land(one)
        for flat in one.flats:
            flat.attach()
        one.here = True

    @staticmethod
    def _land(one: Traveller) -> None:
        for handle in one.handles or ():
            handle.wait()
        one.handles = None

    def _drop(self, one: Traveller) -> None:
        if one.handles is not None:
            self._land(one)
        elif not one.here:
            return
        one.here = False
        self.in_flight -= one.nbytes
        for flat in one.flats:
            flat.free()

    def remove(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()


def _differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure that autograd has computed, and will go back through."""
    return [one for one in tree_leaves(value)
            if isinstance(one, torch.Tensor) and one.grad_fn is not None]  # fmt: skip
