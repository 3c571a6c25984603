"""`hvd.DistributedOptimizer`: gradients are reduced as backward computes them; `step` waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

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
from roundelay.fronts.horovod.torch.wrapping import mixed_in, named, watch

__all__ = ["DistributedOptimizer"]

Parameter = torch.nn.Parameter
Group = tuple[Parameter, ...]


class ReducedSteps:
    """What a wrapped optimizer does more: mixed into its class, before all that it has itself."""

    param_groups: list[dict[str, Any]]

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
        self._begun: dict[Group, tuple[Any, list[Any]]] = {}
        self._synchronized, self._should_synchronize = False, True
        self._group_of: dict[Parameter, Group] = {}
        self.set_backward_passes_per_step(passes)
        if process_set.included() and current("DistributedOptimizer()").size > 1:
            for group in self._grouped([p for p in names if p.requires_grad], groups):
                self._group_of.update(dict.fromkeys(group, group))
            watch(self, self._group_of, ReducedSteps._came)

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
        if len(group) == 1 and grads[0].is_sparse and not self.sparse_as_dense:
            self._begun[group] = sparse_allreduce_async(grads[0], **options), []
            return
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        packed = [self._compression.compress(grad) for grad in dense]
        before, after = self._scales
        options |= {"prescale_factor": before, "postscale_factor": after}
        if len(packed) == 1:
            begun = allreduce_async_(packed[0][0], **options)
        else:
            begun = grouped_allreduce_async_([tensor for tensor, _ in packed], **options)
        self._begun[group] = begun, [context for _, context in packed]

    def synchronize(self) -> None:
        """Wait until all gradients are those of all ranks; those that are missing count as zero."""
        for group in dict.fromkeys(self._group_of.values()):
            if group not in self._begun:
                self._begin(group)
        for group, (handle, contexts) in self._begun.items():
            if callable(handle):
                _replace(group[0], handle())
                continue
            results = synchronize(handle)
            results = [results] if len(group) == 1 else results
            for p, tensor, context in zip(group, results, contexts, strict=True):
                _replace(p, self._compression.decompress(tensor, context))
        self._begun.clear()
        self._left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` take gradients as they are: after `synchronize`, and clipping, say."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Wait for the gradients of all ranks, and step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced twice.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Forget gradients, unless some are still on their way."""
        if self._begun:
            raise InvalidArgumentError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(), while gradients are on their way."
            )
        super().zero_grad(*arguments, **options)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state, and forget what is on its way."""
        self._begun.clear()
        self._synchronized, self._should_synchronize = False, True
        self._left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        super().load_state_dict(state_dict)  # type: ignore[misc]


def _replace(p: Parameter, grad: torch.Tensor) -> None:
    if p.grad is None or p.grad.is_sparse:
        p.grad = grad if grad.is_sparse else grad.to_sparse()
    elif p.grad is not grad:
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
        if process_set is not global_process_set:
            raise UnsupportedOperationError("op=hvd.Adasum takes no process_set=: all ranks.")
        wrapped = mixed_in(optimizer, AdasumSteps)
        wrapped.distribute(*options)
        return wrapped
    wrapped = mixed_in(optimizer, ReducedSteps)
    more = op, gradient_predivide_factor, groups, sparse_as_dense, process_set
    wrapped.distribute(*options, *more)
    return wrapped
