"""Gradients from backward to the step: this rank's part of the sums, as the optimizer wants it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Array
from roundelay.training._autograd import weakly
from roundelay.training._setup import Setup
from roundelay.training._step import AGAIN
from roundelay.training.shards.operands import told
from roundelay.training.shards.shard import Shard
from roundelay.training.strategies.zero._flat_parameter import FlatParameter
from roundelay.training.strategies.zero._grad_buckets import GradBucket, GradBuckets
from roundelay.training.strategies.zero._grad_shards import GradShards
from roundelay.training.strategies.zero._partition import Partition
from roundelay.training.strategy import Only, StrategyState, chosen

PARTIAL = (
    "The gradient of {name} is not complete: the backward passes of this step so far were inside "
    "rd.accumulate, or of a loader's batch of which more is to come, and what they weigh is known "
    "at the end. Look at it after the last pass."
)


class ShardedGrads(StrategyState):
    """The gradients of one model in training."""

    def __init__(self, setup: Setup, partition: Partition, stage: int, *, check: bool) -> None:
        self.setup = setup
        self._tensors = [parameter.tensor for parameter in setup.parameters]
        # A scaled loss may overflow: its step is skipped then, and nothing is wrong. A device that
        # is asked, with no other rank to warn, would have to finish backward first.
        devices = {tensor.device.type for tensor in self._tensors}
        alone = setup.comm.size == 1 and devices != {"cpu"}
        check = check and setup.scaler is None and not alone
        self.buckets = GradBuckets(setup, partition.trained, keep=stage == 1, check=check)
        self._shown, self._bare = partition.shown, partition.bare
        self._grad_shards = GradShards(self._tensors, self._shown, self.gradient, self._change)
        self._has: set[int] = set()  # parameters that have a gradient, on any rank
        self._lifted: set[int] = set()  # whose stand-in made room for a gradient
        self._ready = False  # whether `_grads` is what the optimizer will see
        self._grads: dict[int, torch.Tensor] = {}  # this rank's pieces, by parameter
        self._edited = False  # whether they are no longer what was summed up
        self._factor = 1.0  # what sums in half precision are still to be multiplied with
        self._hooks = [
            tensor.register_hook(weakly(self.make_way, index))  # type: ignore[no-untyped-call]
            for index, tensor in enumerate(self._tensors)
        ]

    def make_way(self, index: int) -> None:
        """Have the stand-in of a gradient make room for one that is about to come."""
        if self._gone(index):
            self._notice()
        tensor = self._tensors[index]
        if isinstance(tensor.grad, Shard):
            if any(isinstance(grad, Shard) for grad in self._grad_shards.own(index)):
                self._adopt()
            tensor.grad = None
            self._lifted.add(index)

    def _gone(self, index: int) -> bool:
        """Tell whether the user has taken a gradient away."""
        return index in self._has and index not in self._lifted and self._grad_shards.gone(index)

    # ---- while backward runs

    @property
    def lifted(self) -> bool:  # type: ignore[override] # an attribute of other strategies
        """Whether stand-ins made room for gradients in this pass."""
        return bool(self._lifted)

    def begin_pass(self, order: Sequence[FlatParameter]) -> None:
        """Expect every gradient anew."""
        self._notice()
        if self.setup.step.shared and (self._factor != 1.0 or (self._edited and self._casts)):
            raise InvalidArgumentError(AGAIN)  # what is there is not what was summed up
        with _plainly():
            self._adopt()
        rows = {id(bucket.flat): bucket for bucket in self.buckets.all}
        self.buckets.order = [rows[id(flat)] for flat in order]
        self.buckets.begin()
        self._ready, self._edited, self._grads = False, False, {}

    def _notice(self, *, before_step: bool = False) -> None:
        """Forget the gradients that the user has forgotten."""
        with _plainly():
            gone = set(filter(self._gone, self._has))
            for index in gone:
                self._grad_shards.release(index)
        if gone:
            self._has -= gone
            if before_step or self._has:  # or it is as zero_grad() does
                names = [self.setup.parameters[index].name for index in sorted(gone)]
                self.setup.step.did(f"letting go of the gradients of {', '.join(names)}")
            self._grads = {index: grad for index, grad in self._grads.items() if index not in gone}
            self.buckets.forget(gone)

    def settle(self, used: Array, factor: float | None) -> None:
        """Know which parameters have a gradient on any rank, and put stand-ins into `.grad`."""
        self.setup.used = set(np.flatnonzero(used).tolist())
        self._has |= self.setup.used
        if factor is not None:
            self.scale_grads(factor)
        self.stand_in()
        self.buckets.used.clear()

    def stand_in(self) -> None:
        """Have gradients stand in `.grad`, where they may be used, changed and taken away."""
        self._has.update(self.buckets.used)
        self._lifted.clear()
        with _plainly():
            for index in self._has:
                self._grad_shards.put(index)

    def _adopt(self) -> None:
        """Take divided gradients that the user has set: they are the sums that others add to."""
        own = {index: grad for index in range(len(self._tensors)) if index not in self._lifted
               for grad in self._grad_shards.own(index) if isinstance(grad, Shard)}  # fmt: skip
        if own and self._casts:
            raise InvalidArgumentError(AGAIN)
        self._take_own(own)
        for index in own:
            self._grad_shards.put(index)

    def _take_own(self, own: Mapping[int, torch.Tensor]) -> None:
        """Take gradients that the user has set; one may be what another has been so far."""
        for index, grad in own.items():
            name = self.setup.parameters[index].name
            self.setup.step.did(f"setting the gradient of {name} to {told(grad)}")
        found = {index: self._shown[index].own(grad.detach()).clone()
                 for index, grad in own.items()}  # fmt: skip
        for index in own:
            self._grad_shards.release(index)
        for index, values in found.items():
            self._write(index, values)
        self._has.update(own)

    def _write(self, index: int, values: torch.Tensor) -> None:
        """Have this rank's part of a sum be that of a gradient that the user has set."""
        for bucket in self.buckets.all:
            bucket.filled = bucket.filled or index in bucket.places
            for piece in bucket.flat.pieces:
                if piece.index == index:
                    bucket.part[piece.inside].copy_(values)
                    if self._casts:
                        mine = values.to(bucket.flat.master.dtype, copy=True)
                        self._grads[index] = mine.view(self._bare[index].shape)
        self._edited = True

    # ---- before the step

    @property
    def _casts(self) -> bool:
        return self.setup.precision.mixed

    def gradient(self, index: int) -> torch.Tensor:
        """Return this rank's piece of a gradient, as the optimizer will see it."""
        step = self.setup.step
        if step.waiting and (step.weighed or step.parts > 1):
            name = self.setup.parameters[index].name
            raise InvalidArgumentError(PARTIAL.format(name=name))
        if not self._ready:
            self._make_ready()
        found = self._grads.get(index)
        return self._bare[index].detach()[:0].view(-1) if found is None else found.view(-1)

    def _change(self, index: int, what: str) -> None:
        self._edited = True
        self.setup.step.scales(index, _factor(what))
        self.setup.step.did(f"{what} into the gradient of {self.setup.parameters[index].name}")

    def _make_ready(self) -> None:
        self._ready, grads = True, []
        for bucket in self.buckets.all:
            if all(piece.index in self._grads for piece in bucket.flat.pieces):
                continue
            cut = bucket.flat.cut(self._cast(bucket))
            for piece, grad in zip(bucket.flat.pieces, cut, strict=True):
                if piece.index in self._has and piece.index not in self._grads:
                    self._grads[piece.index] = grad
                    grads.append(grad)
        if self.setup.scaler is not None:
            self.setup.scaler.unscale(grads, self._factor)
        elif self._casts and self._factor != 1.0 and grads:
            torch._foreach_mul_(grads, self._factor)

    def _cast(self, bucket: GradBucket) -> torch.Tensor:
        """Return a row's part in the optimizer's dtype, as a copy if it is multiplied there."""
        host, kind = self.setup.host, bucket.flat.master.dtype
        if host is None or not host.parameters or not self._casts:
            return bucket.part.to(kind)
        as_it_is = bucket.part.dtype == kind and self._factor == 1.0 and self.setup.scaler is None
        return bucket.part if as_it_is else host.cast(bucket.part, kind)

    def ready(self) -> None:
        """Make this rank's gradients what the optimizer will see: in its dtype, unscaled."""
        self._notice(before_step=True)
        if not self._ready:
            self._make_ready()
        with _plainly():
            own = {index: grad for index in range(len(self._tensors))
                   for grad in self._grad_shards.own(index)}  # fmt: skip
        if own:
            self._take_own(own)
            self._make_ready()
            self.stand_in()

    def before_step(self, only: Only = None) -> None:
        """Give an optimizer its gradients, for its step."""
        self.ready()
        host = self.setup.host
        coming = []
        for index in chosen(range(len(self._bare)), only):
            bare, grad = self._bare[index], self._grads.get(index)
            if host is None or grad is None or (host.parameters and grad.device == bare.device):
                bare.grad = grad
            else:
                coming.append((bare, grad))
        if host is not None:
            host.take(coming)

    def _picked(self, only: Only) -> Iterable[torch.Tensor]:
        if only is None:
            return self._grads.values()
        return [grad for index, grad in self._grads.items() if index in only]

    def scale_grads(self, factor: float, only: Only = None) -> None:
        """Multiply gradients, now or when they get to the optimizer."""
        if self._ready or only is not None:
            self.ready()
            self._edited = True
            for grad in self._picked(only):
                grad.mul_(factor)
        elif self._casts:
            self._factor *= factor
        else:
            self.buckets.scale(factor)

    def clamp_grads(self, value: float, only: Only = None) -> None:
        """Cut every element to at most this size."""
        self.ready()
        self._edited = True
        for grad in self._picked(only):
            grad.clamp_(-value, value)

    def grad_norm(self, norm_type: float, only: Only = None) -> float:
        """Return the norm of gradients, which all ranks compute together."""
        if not norm_type > 0:
            raise InvalidArgumentError(
                f"clip_grad_norm_ under ZeRO takes norms above 0 or infinity, not {norm_type!r}."
            )
        self.ready()
        norms = [
            torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64).item()
            for grad in self._picked(only)
        ]
        if math.isinf(norm_type):
            most = np.array([max(norms, default=0.0)])
            return float(self.setup.within.all_reduce(most, "max")[0])
        within, found = self.setup.within, np.array(norms)
        with np.errstate(over="ignore"):
            total = float(within.all_reduce(np.array([np.sum(found**norm_type)]))[0])
        unit = 1.0
        if np.isinf(total):  # on every rank; the norm itself may be smaller
            unit = float(within.all_reduce(np.array([max(norms, default=0.0)]), "max")[0])
            if math.isfinite(unit):
                parts = np.array([np.sum((found / unit) ** norm_type)])
                total = float(within.all_reduce(parts)[0])
        return unit * float(total ** (1 / norm_type))

    def stepped(self, only: Only = None) -> None:
        """Let go of copies that were made for the step, unless they are all that there is."""
        for bare in chosen(self._bare, only):
            bare.grad = None
        if self._casts and not self._edited and self.setup.scaler is None:
            self._let_go(only)

    def _let_go(self, only: Only) -> None:
        """Make what the optimizer sees anew, when it is next asked for."""
        self._ready = False
        gone = list(self._grads) if only is None else only
        self._grads = {index: grad for index, grad in self._grads.items() if index not in gone}

    def zero(self, only: Only = None) -> None:
        """Make gradients zero that there are."""
        self._let_go(only)
        if only is None:
            self._factor, self._edited = 1.0, False
            for bucket in self.buckets.all:
                bucket.part.zero_()
        else:
            self.buckets.forget(only)

    def forget(self, only: Only = None) -> None:
        """Let go of gradients."""
        with _plainly():
            self._grad_shards.clear(only)
        self._let_go(only)
        gone = set(self._has) if only is None else set(only)
        self._has -= gone
        self._lifted -= gone
        self.buckets.used -= gone
        if only is None:
            self._factor, self._edited = 1.0, False
        self.buckets.forget(only)

    def remove(self) -> None:
        """Watch the parameters no more."""
        for hook in self._hooks:
            hook.remove()


def _plainly() -> Any:
    """Have parameters that are away tell their gradients without ado."""
    return torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001 - torch's documented way


def _factor(what: str) -> float:
    """Return by what an operation multiplies; nan where it is none of those.

    >>> _factor("mul_(0.5)"), _factor("div_(4)"), _factor("add_(1)")
    (0.5, 0.25, nan)
    """
    found = re.fullmatch(r"(mul|div)_\(([-+.\de]+)\)", what)
    if found is None or not float(found[2]):
        return math.nan
    return float(found[2]) if found[1] == "mul" else 1 / float(found[2])
