"""`hvd.DistributedOptimizer`: gradients are reduced as backward computes them; `step` waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from roundelay.arguments import number, shown, whole
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.basics import (
    Adasum,
    Average,
    ProcessSet,
    global_process_set,
    reduction_of,
)
from roundelay.fronts.horovod.errors import UnsupportedOperationError
from roundelay.fronts.horovod.session import current
from roundelay.fronts.horovod.torch.adasum_optimizer import AdasumSteps
from roundelay.fronts.horovod.torch.checks import compressor_of
from roundelay.fronts.horovod.torch.collectives import (
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from roundelay.fronts.horovod.torch.compression import Compression, Compressor
from roundelay.fronts.horovod.torch.functions import broadcast_object
from roundelay.fronts.horovod.torch.wrapping import Copied, mixed_in, named, names_of_new, watch

__all__ = ["DistributedOptimizer"]

Parameter = torch.nn.Parameter
Group = tuple[Parameter, ...]


class _Begun(NamedTuple):
    """Gradients on their way, as they were when they left."""

    handle: Any  # to wait for; of a sparse gradient, a function that does
    contexts: list[Any]  # of the compression
    grads: list[torch.Tensor]
    versions: list[int]

    def changed(self, group: Group) -> list[Parameter]:
        """Return the parameters whose gradients somebody else has written to meanwhile."""
        were = zip(group, self.grads, self.versions, strict=True)
        return [p for p, grad, version in were if p.grad is not grad or grad._version != version]  # noqa: SLF001 - there is no other name


class ReducedSteps(Copied):
    """What a wrapped optimizer does more: mixed into its class, before all that it has itself."""

    def distribute(
        self,
        names: dict[Parameter, str],
        compression: type[Compressor],
        passes: int,
        op: int,
        predivide: float,
        groups: int | Sequence[Sequence[Parameter]] | None,
        sparse_as_dense: bool,  # noqa: FBT001
        process_set: ProcessSet,
    ) -> None:
        """Begin: form groups, and watch gradients."""
        self._parameter_names, self._compression, self.op = names, compression, op
        self._scales = (1 / predivide, predivide) if op == Average else (1.0, 1.0)
        self.sparse_as_dense, self.process_set = sparse_as_dense, process_set
        self._begun: dict[Group, _Begun] = {}
        self._synchronized, self._should_synchronize = False, True
        self._for_scaler = False  # which has them reduced, and `step` does not again
        self._group_of: dict[Parameter, Group] = {}
        self.set_backward_passes_per_step(passes)
        self._reduces = bool(process_set.included() and current("DistributedOptimizer()").size > 1)
        if self._reduces:
            for group in self._grouped([p for p in names if p.requires_grad], groups):
                self._group_of.update(dict.fromkeys(group, group))
            self.watch_again()

    def watch_again(self) -> None:
        """Watch the gradients of the parameters that it has."""
        watch(self, [p for p in self._group_of if p.requires_grad], ReducedSteps._came)

    def _take_new(self) -> None:
        """Take in parameters that were frozen or not there before: none is stepped on unreduced."""
        if not self._reduces:
            return
        self._parameter_names |= names_of_new(self.param_groups, self._parameter_names)
        owned = [p for group in self.param_groups for p in group["params"]]
        new = [
            p for p in owned
            if p not in self._group_of and (p.requires_grad or p.grad is not None)
        ]  # fmt: skip
        for p in new:
            self._group_of[p], self._left[p] = (p,), self.backward_passes_per_step
        watch(self, [p for p in new if p.requires_grad], ReducedSteps._came)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are reduced as well; all ranks add the same."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._take_new()

    def _grouped(
        self, params: list[Parameter], groups: int | Sequence[Sequence[Parameter]] | None
    ) -> list[Group]:
        """Return which parameters are reduced together, in the order that rank 0 has them."""
        if groups is None:
            return [(p,) for p in params]
        names = {self._parameter_names[p]: p for p in params}
        first = self.process_set.ranks[0]
        order = broadcast_object([*names], first, process_set=self.process_set)
        params = [names[name] for name in order]
        if isinstance(groups, int):
            share, extra = divmod(len(params), groups)
            ends = [n * share + min(n, extra) for n in range(groups + 1)]
            return [tuple(params[a:b]) for a, b in pairwise(ends) if a < b]
        known = {id(p) for p in params}
        told = [tuple(p for p in group if id(p) in known) for group in groups]
        inside = {id(p) for group in told for p in group}
        return [group for group in told if group] + [(p,) for p in params if id(p) not in inside]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect so many backward passes before the gradients are reduced."""
        passes = whole("backward_passes_per_step", passes, 1)
        self.backward_passes_per_step = passes
        self._left = dict.fromkeys(self._parameter_names, passes)

    def _came(self, p: Parameter) -> None:
        """Take note of a gradient; reduce those of its group once all of them have come."""
        group = self._group_of[p]
        if self._left[p] <= 0:
            raise InvalidArgumentError(
                f"The gradient of {self._parameter_names[p]!r} came more often than "
                f"backward_passes_per_step={self.backward_passes_per_step} before step(). Raise "
                f"that to accumulate gradients."
            )
        self._left[p] -= 1
        if group not in self._begun and not any(self._left[q] for q in group):
            self._begin(group)

    def _begin(self, group: Group) -> None:
        for p in group:
            if p.grad is None:  # others may have one, by another branch of the model
                p.grad = torch.zeros_like(p)
        name = self._parameter_names[group[0]]
        options: Any = {"name": name, "op": self.op, "process_set": self.process_set}
        grads = [p.grad for p in group if p.grad is not None]
        seen = grads, [grad._version for grad in grads]  # noqa: SLF001 - there is no other name
        if len(group) == 1 and grads[0].is_sparse and not self.sparse_as_dense:
            self._begun[group] = _Begun(sparse_allreduce_async(grads[0], **options), [], *seen)
            return
        # By `data` we write without counting as somebody who has.
        dense = [grad.to_dense() if grad.is_sparse else grad.data for grad in grads]
        packed = [self._compression.compress(grad) for grad in dense]
        before, after = self._scales
        options |= {"prescale_factor": before, "postscale_factor": after}
        if len(packed) == 1:
            begun = allreduce_async_(packed[0][0], **options)
        else:
            begun = grouped_allreduce_async_([tensor for tensor, _ in packed], **options)
        self._begun[group] = _Begun(begun, [context for _, context in packed], *seen)

    def synchronize(self) -> None:
        """Wait until all gradients are those of all ranks; those that are missing count as zero."""
        if not self._had_by_scaler():
            self._reduce()

    def before_scaler(self) -> None:
        """Reduce before a scaler looks for infinities: all ranks leave out a step, or none does."""
        if not self._should_synchronize:
            self._require_reduced("scaler")
        elif not self._synchronized or self._for_scaler or self._under_way():
            self._reduce()
            self._for_scaler = True

    def _had_by_scaler(self) -> bool:
        """Tell whether a scaler has had these gradients reduced, and divided them since."""
        return self._for_scaler and not self._under_way()

    def _reduce(self) -> None:
        self._take_new()
        for group in dict.fromkeys(self._group_of.values()):
            if group not in self._begun:
                self._begin(group)
        changed: list[Parameter] = []
        for group, begun in self._begun.items():
            changed += begun.changed(group)
            if callable(begun.handle):
                _replace(group[0], begun.handle())
                continue
            results = synchronize(begun.handle)
            results = [results] if len(group) == 1 else results
            for p, tensor, context in zip(group, results, begun.contexts, strict=True):
                _replace(p, self._compression.decompress(tensor, context))
        self._begun.clear()
        self._left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        if changed:
            raise InvalidArgumentError(
                f"The gradient of {self._parameter_names[changed[0]]!r} was changed after "
                f"backward(), while it was on its way, so nobody knows what was reduced. To clip, "
                f"scale or look at gradients, call optimizer.synchronize() after backward(), and "
                f"step() inside `with optimizer.skip_synchronize():`."
            )
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` take gradients as they are: after `synchronize`, and clipping, say."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients of all ranks, and step.

        A closure may be called often: each time its gradients, and its loss, are reduced before
        the optimizer sees them. So all ranks decide alike, and call it equally often.
        """
        if closure is None:
            self._settle()
            return super().step()  # type: ignore[misc]
        if ready := self._under_way():  # of a backward pass before this step
            self._settle()
        called = 0

        def reduced() -> Any:
            nonlocal called
            called += 1
            loss = closure()
            self._settle()
            return self._of_all(loss)

        found = super().step(reduced)  # type: ignore[misc]
        if not called and not ready and self._reduces:
            raise InvalidArgumentError(
                f"{type(self).__name__}.step(closure) did not call the closure, so it has stepped "
                f"on gradients that were not reduced. Call backward(), then step() without one."
            )
        return found

    def _under_way(self) -> bool:
        """Tell whether gradients have come that are not reduced yet."""
        passes = self.backward_passes_per_step
        return bool(self._begun) or any(left != passes for left in self._left.values())

    def _settle(self) -> None:
        """See to it that the gradients that the optimizer will read are those of all ranks."""
        if not self._should_synchronize:
            self._require_reduced("optimizer")
        elif not self._had_by_scaler():
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced twice.",
                    stacklevel=3,
                )
            self._reduce()
        self._synchronized = self._for_scaler = False

    def _require_reduced(self, whose: str) -> None:
        """Refuse gradients of this rank alone."""
        if self._reduces and self._under_way():
            raise InvalidArgumentError(
                f"{whose}.step() was called inside skip_synchronize(), but gradients have come "
                f"that are not reduced yet. Call optimizer.synchronize() after the last backward() "
                f"and before that block, or step() outside of it."
            )

    def _of_all(self, loss: Any) -> Any:
        """Return the loss of all ranks, by which some optimizers decide how far they go."""
        one = isinstance(loss, torch.Tensor) and loss.numel() == 1
        if not self._reduces or not (one or isinstance(loss, float)):
            return loss
        mine = loss.detach().clone() if one else torch.tensor(loss, dtype=torch.float64)
        name = "DistributedOptimizer.step(closure)"
        synchronize(allreduce_async_(mine, name=name, op=self.op, process_set=self.process_set))
        return mine if one else mine.item()

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Forget gradients, unless some are still on their way."""
        if self._begun:
            raise InvalidArgumentError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(), while gradients are on their way."
            )
        if self._for_scaler:  # which has left out the step
            self._synchronized = self._for_scaler = False
        self._take_new()
        super().zero_grad(*arguments, **options)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state, and forget what is on its way."""
        self._begun.clear()
        self._synchronized, self._should_synchronize, self._for_scaler = False, True, False
        self._left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        super().load_state_dict(state_dict)  # type: ignore[misc]


def _replace(p: Parameter, grad: torch.Tensor) -> None:
    if p.grad is None or p.grad.is_sparse:
        p.grad = grad if grad.is_sparse else grad.to_sparse()
    elif p.grad.data_ptr() != grad.data_ptr():
        p.grad.copy_(grad)


def _checked(groups: Any) -> list[list[Parameter]]:
    """Return the groups as lists; refuse what is no tensor, or there twice."""
    told = list(groups) if isinstance(groups, Iterable) else [None]
    lists: list[list[Any]] = [
        list(group) if isinstance(group, Iterable) else [None] for group in told
    ]
    found = [p for group in lists for p in group]
    if len({id(p) for p in found}) < len(found) or not all(
        isinstance(p, torch.Tensor) for p in found
    ):
        raise InvalidArgumentError(
            "groups= takes a number, or lists of parameters, each of them once."
        )
    return lists


def _refuse_adasum(optimizer: torch.optim.Optimizer, process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise UnsupportedOperationError("op=hvd.Adasum takes no process_set=: all ranks.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOperationError(
            "op=hvd.Adasum combines the steps of single parameters, and LBFGS makes one of all "
            "together: take op=hvd.Average."
        )


def DistributedOptimizer(  # noqa: N802, PLR0917 - Horovod's name and order
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Parameter]] | None = None,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 - Horovod's order
    process_set: ProcessSet = global_process_set,
) -> Any:  # an optimizer of the same kind, which mypy can't name
    """Return the optimizer with gradients reduced over all ranks before every step.

    It is of a subclass of its own, with the same parameters, options and state.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"hvd.DistributedOptimizer takes an optimizer of torch, not {shown(optimizer)}."
        )
    if isinstance(optimizer, (ReducedSteps, AdasumSteps)):
        raise InvalidArgumentError(
            "hvd.DistributedOptimizer was given an optimizer of its own: its gradients are reduced "
            "already. Wrap an optimizer once."
        )
    op = reduction_of("DistributedOptimizer", op)
    current("DistributedOptimizer()").known(process_set)
    compressor_of(compression)
    if not number("gradient_predivide_factor", gradient_predivide_factor) > 0:
        raise InvalidArgumentError(
            f"gradient_predivide_factor is above 0, not {gradient_predivide_factor!r}."
        )
    if gradient_predivide_factor != 1.0 and op != Average:
        raise InvalidArgumentError("gradient_predivide_factor= goes with op=hvd.Average only.")
    if num_groups and groups is None:
        warnings.warn("num_groups= is now called groups=.", DeprecationWarning, stacklevel=2)
        groups = num_groups
    if isinstance(groups, int) and groups <= 0:
        raise InvalidArgumentError(f"groups= is 1 or more, or lists of parameters, not {groups!r}.")
    if groups is not None and not isinstance(groups, int):
        groups = _checked(groups)
    names = named(optimizer, named_parameters)
    options = names, compression, backward_passes_per_step
    if op == Adasum and current("DistributedOptimizer()").size > 1:
        _refuse_adasum(optimizer, process_set)
        wrapped = mixed_in(optimizer, AdasumSteps)
        wrapped.distribute(*options)
        return wrapped
    wrapped = mixed_in(optimizer, ReducedSteps)
    more = op, gradient_predivide_factor, groups, sparse_as_dense, process_set
    wrapped.distribute(*options, *more)
    return wrapped
