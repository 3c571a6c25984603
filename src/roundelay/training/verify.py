"""What `rd.verify` compares: ranks under a strategy with one device on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from roundelay.communicator import Communicator
from roundelay.training.precision import Precision
from roundelay.training.prepare import prepare
from roundelay.training.state import full_state_dict
from roundelay.training.steps import backward
from roundelay.training.strategy import Strategy

__all__ = ["Difference", "Loss", "MakeOptimizer", "Verdict", "judge", "rounding", "verify_on"]

#: The largest difference that rounding explains, relative to a parameter's largest element.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
LOOSE = 1e-2  # for half types

Loss = Callable[..., torch.Tensor]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a run left what one device does."""

    step: int
    rank: int
    parameter: str
    relative: float

    def __str__(self) -> str:
        return (
            f"step {self.step}, rank {self.rank}: {self.parameter} differs by {self.relative:.3g} "
            f"of its largest element"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verify found: the first difference beyond rounding, if any, and the largest at all."""

    strategy: str
    ranks: int
    steps: int
    first: Difference | None
    largest: Difference

    @property
    def same(self) -> bool:
        """Whether the ranks did what one device does, up to rounding."""
        return self.first is None

    def __str__(self) -> str:
        told = f"{self.strategy} on {self.ranks} ranks, {self.steps} steps"
        if self.first is None:
            return f"{told}: the same as one device; the largest difference is in {self.largest}"
        return f"{told}: NOT the same as one device. First in {self.first}"


def verify_on(
    comm: Communicator,
    model: torch.nn.Module,
    make_optimizer: MakeOptimizer,
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    loss: Loss,
    strategy: str | Strategy = "ddp",
    precision: str | Precision = "fp32",
    clip: float | None = None,
) -> list[list[Difference]]:
    """Be one rank: train a copy under the strategy; return how each parameter differed, by step."""
    whole = _one_device(model, make_optimizer, batches, loss, clip)
    mine = copy.deepcopy(model)
    mine, optimizer = prepare(
        mine, make_optimizer(mine.parameters()), strategy=strategy, precision=precision, comm=comm
    )
    found = []
    for step, (batch, expected) in enumerate(zip(batches, whole, strict=True)):
        share = [part.tensor_split(comm.size)[comm.rank] for part in batch]
        rows = len(share[0])
        if not rows:  # a loss of nothing, for which all ranks call the model nevertheless
            share = [part[:1] for part in batch]
        backward(loss(mine, *share) * rows, weight=rows, model=mine)
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        state = full_state_dict(mine)
        found.append([
            Difference(step, comm.rank, name, _relative(state[name], expected[name]))
            for name in expected
        ])  # fmt: skip
    return found


def _one_device(
    model: torch.nn.Module,
    make_optimizer: MakeOptimizer,
    batches: Sequence[Sequence[torch.Tensor]],
    loss: Loss,
    clip: float | None,
) -> list[dict[str, torch.Tensor]]:
    alone = copy.deepcopy(model)
    optimizer = make_optimizer(alone.parameters())
    states = []
    for batch in batches:
        loss(alone, *batch).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(alone.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: one.detach().clone() for name, one in alone.state_dict().items()})
    return states


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    difference = (found.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    return float(difference / scale if scale else difference)


def judge(
    every: Iterable[Difference], *, strategy: str, ranks: int, steps: int, tolerance: float
) -> Verdict:
    """Return the first difference beyond the tolerance, if any, and the largest at all."""
    listed = sorted(every, key=lambda one: (one.step, -one.relative))
    first = next((one for one in listed if not one.relative <= tolerance), None)  # NaN too
    largest = max(listed, key=lambda one: one.relative)
    return Verdict(strategy, ranks, steps, first, largest)


def rounding(model: torch.nn.Module, precision: str | Precision) -> float:
    """Return the largest difference that rounding explains for this model."""
    if precision != "fp32":
        return LOOSE
    kinds = {parameter.dtype for parameter in model.parameters()}
    return max((TOLERANCE.get(kind, LOOSE) for kind in kinds), default=LOOSE)
