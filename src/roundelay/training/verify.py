"""What `rd.verify` compares: ranks under a strategy with one device on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.mesh import Mesh
from roundelay.parallel.sharding import sharding_of
from roundelay.parallel.staging import is_pipeline, staging_of
from roundelay.training._doubt import (
    DoubleCheck,
    Gradients,
    Masks,
    last_digit,
    small_beside,
    sure_of,
    unlike,
    widened,
)
from roundelay.training._join_mesh import Plan
from roundelay.training._mesh_ranks import rows_of
from roundelay.training._run import run_of
from roundelay.training._watch import Watch, gradients_of, local_part, share_of
from roundelay.training.precision import Precision, precision_of
from roundelay.training.prepare import prepare
from roundelay.training.state import full_state_dict
from roundelay.training.steps import backward
from roundelay.training.strategy import Strategy

__all__ = [
    "Difference",
    "Divide",
    "Loss",
    "MakeOptimizer",
    "Plan",
    "Trial",
    "Verdict",
    "judge",
    "rounding",
    "verify_on",
]

#: The largest difference that rounding explains, relative to a parameter's largest element.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
NOISE = 64  # what of a model's largest gradient is rounding, in steps of a dtype
LOWER = 16  # by what a loss scale is divided at which steps are skipped
LOOSE = 3e-2  # for 16 bits, and relative to the norm: Adam may turn a step where a sign is rounding

Loss = Callable[..., torch.Tensor]
Divide = Callable[[torch.nn.Module, Mesh], Any]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a run left what one device does."""

    step: int
    rank: int
    parameter: str  # its name; or that of the module, if it is its output that differs
    relative: float
    kind: str = "parameter"  # or "gradient", of a parameter, or "activation"
    order: int = 0  # of activations and gradients, as they are computed
    scale: str = "largest element"  # or "norm", in 16 bits

    def __str__(self) -> str:
        what = {"gradient": "the gradient of ", "activation": "the output of "}.get(self.kind, "")
        return (
            f"step {self.step}, rank {self.rank}: {what}{self.parameter} differs by "
            f"{self.relative:.3g} of its {self.scale}"
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


@dataclass(frozen=True, slots=True)
class Trial:
    """What is trained, on one device and on ranks: the model, the optimizer, and how."""

    model: torch.nn.Module
    make_optimizer: MakeOptimizer
    batches: Sequence[Sequence[torch.Tensor]]
    loss: Loss
    strategy: str | Strategy = "ddp"
    precision: str | Precision = "fp32"
    clip: float | None = None
    axes: Mapping[str, int] | None = None  # of a mesh
    plan: Plan | None = None
    sequence_parallel: bool = False
    #: What is done to each rank's model before it is prepared; it may return a pipeline.
    divide: Divide | None = None

    def difference(
        self,
        step: int,
        rank: int,
        name: str,
        found: torch.Tensor,
        expected: torch.Tensor,
        kind: str = "parameter",
        order: int = 0,
        noise: float = 0.0,
    ) -> Difference:
        """Return how something differs: by its largest element, or in 16 bits by its norm.

        `noise` is by how much elements may be off, however small all of them are.
        """
        exact = self.precision == "fp32"
        relative = _relative(found, expected, torch.inf if exact else 2.0, noise)
        scale = "largest element" if exact else "norm"
        return Difference(step, rank, name, relative, kind, order, scale)


@dataclass(slots=True)
class Seen:
    """One step on one device: what modules gave, gradients, and the state afterwards."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    doubtful: Masks  # which elements of gradients are rounding alone
    skipped: bool  # whether it was no step at all


def verify_on(comm: Communicator, trial: Trial) -> list[list[Difference]]:
    """Be one rank: train a copy under the strategy; return how each parameter differed, by step.

    A loss that is scaled is so by less, and all begins anew, as long as steps are skipped: others
    overflow on one device than on ranks, and of those that both skip nothing is compared.
    """
    precision = precision_of(trial.precision)
    scale = precision.first_scale
    while scale is not None:
        trial = replace(trial, precision=replace(precision, loss_scale=scale))
        scale = scale / LOWER if scale > 1 else None
        found = _compared(comm, trial, may_skip=scale is None)
        if found is not None:
            return found
    return _compared(comm, trial, may_skip=True) or []


def _compared(comm: Communicator, trial: Trial, *, may_skip: bool) -> list[list[Difference]] | None:
    """Return how one device and ranks differed; None where a step was skipped that may not be."""
    mesh = None if trial.axes is None else Mesh(comm=comm, **trial.axes)
    whole = _one_device(trial, (mesh or Mesh(dp=comm.size, comm=comm))[()])
    if not may_skip and _anywhere(comm, skipped=any(seen.skipped for seen in whole)):
        return None
    mine, optimizer = _on_ranks(comm, mesh, trial)
    watch = None if mesh is None else Watch(mine)
    found, doubtful = [], Masks()
    for step, (batch, expected) in enumerate(zip(trial.batches, whole, strict=True)):
        share = [_share(comm, mesh, part) for part in batch]
        rows = len(share[0])
        _backward(trial, mine, share if rows else [part[:1] for part in batch], rows)
        differences = []
        if mesh is not None and watch is not None:
            differences = _inside(
                trial, mesh, mine, watch, expected, step, len(batch[0]) if rows else 0
            )
        if trial.clip is not None:
            optimizer.clip_grad_norm_(trial.clip)
        optimizer.step()
        optimizer.zero_grad()
        if not may_skip and _anywhere(comm, skipped=_skipped(mine) > 0):
            return None
        state = full_state_dict(mine)
        widened(doubtful, expected.doubtful)
        differences += [
            trial.difference(step, comm.rank, name, one, tensor)
            for name, tensor in expected.state.items()
            for one in (sure_of(state[name], tensor, doubtful.get(name)),)
        ]
        found.append(differences)
    return found


def _on_ranks(comm: Communicator, mesh: Mesh | None, trial: Trial) -> tuple[Any, Any]:
    """Return what a rank trains, and its optimizer."""
    mine = copy.deepcopy(trial.model)
    if mesh is not None and trial.divide is not None:
        made = trial.divide(mine, mesh)
        mine = made if isinstance(made, torch.nn.Module) else mine
    if mesh is not None and mesh.size("pp") > 1 and staging_of(mine) is None:
        raise InvalidArgumentError(
            f"verify got {mesh!r}, and nothing cuts the model into stages along pp. Give divide="
            f"lambda model, mesh: rd.Pipeline(model, comm=mesh['pp'], loss=…), or leave out pp."
        )
    mine, optimizer = prepare(
        mine,
        trial.make_optimizer(mine.parameters()),
        strategy=trial.strategy,
        precision=trial.precision,
        comm=comm if mesh is None else None,
        mesh=mesh,
        plan=trial.plan,
        sequence_parallel=trial.sequence_parallel,
    )
    run_of("verify", mine).setup.step.alike = None  # what it tells is compared here, and named
    for batch in trial.batches:
        _check_rows(mine, mesh, len(batch[0]))
    return mine, optimizer


def _skipped(model: torch.nn.Module) -> int:
    """Return how many steps of a prepared model were skipped, as gradients overflowed."""
    scaler = run_of("verify", model).setup.scaler
    return 0 if scaler is None else scaler.skipped


def _anywhere(comm: Communicator, *, skipped: bool) -> bool:
    """Tell whether it is so on any rank, alike on all."""
    return bool(comm.all_reduce(np.array([int(skipped)]), "max")[0])


def _check_rows(model: torch.nn.Module, mesh: Mesh | None, rows: int) -> None:
    """Refuse rows that replicas of a pipeline would have more and fewer of: they weigh the same."""
    if mesh is not None and is_pipeline(model) and rows % rows_of(mesh).size:
        raise InvalidArgumentError(
            f"verify deals the rows of a batch to {rows_of(mesh).size} replicas of a pipeline, and "
            f"{rows} do not divide by that. Give batches of a multiple."
        )


def _backward(trial: Trial, model: Any, share: Sequence[torch.Tensor], rows: int) -> None:
    """Bring gradients of this rank's rows, of which there may be none: all call the model."""
    if not is_pipeline(model):
        backward(trial.loss(model, *share) * rows, weight=rows, model=model)
        return
    *x, target = share
    model.step(tuple(x), target)


def _share(comm: Communicator, mesh: Mesh | None, part: torch.Tensor) -> torch.Tensor:
    return part.tensor_split(comm.size)[comm.rank] if mesh is None else share_of(mesh, part)


def _inside(
    trial: Trial,
    mesh: Mesh,
    model: torch.nn.Module,
    watch: Watch,
    expected: Seen,
    step: int,
    rows: int,
) -> list[Difference]:
    """Return how outputs of modules and gradients differ, where they can be compared."""
    modules, rank = dict(model.named_modules()), mesh.comm.rank
    found = []
    outputs = watch.take()
    for order, (name, whole) in enumerate(expected.outputs.items()):
        if name not in outputs or not rows:
            continue
        part = local_part(modules.get(name), mesh, whole, outputs[name], rows)
        if part is not None:
            found.append(trial.difference(step, rank, name, outputs[name], part,
                                          "activation", order))  # fmt: skip
    gradients = gradients_of(model)
    parameters = dict(model.named_parameters())
    for order, (name, grad) in enumerate(expected.gradients.items()):
        if name in gradients:
            sharding = sharding_of(parameters[name])
            part = grad if sharding is None else sharding.local(grad)
            noise = NOISE * last_digit(expected.gradients)
            found.append(trial.difference(step, rank, name, gradients[name], part,
                                          "gradient", order, noise))  # fmt: skip
    return found


def _one_device(trial: Trial, alone: Communicator) -> list[Seen]:
    """Train on a rank alone; by torch itself, unless the precision is ours."""
    model = copy.deepcopy(trial.model)
    optimizer = trial.make_optimizer(model.parameters())
    ours: Any = None
    check = None
    if trial.precision != "fp32":
        compute = precision_of(trial.precision).compute
        check = None if compute is None else DoubleCheck(model, compute)
        model, ours = prepare(model, optimizer, precision=trial.precision, comm=alone)
    watch = Watch(model)
    states = []
    for batch in trial.batches:
        exact = None if check is None else check.gradients(model, trial.loss, batch)
        if ours is None:
            trial.loss(model, *batch).backward()  # type: ignore[no-untyped-call]
        else:
            _backward(trial, model, batch, len(batch[0]))
        gradients = gradients_of(model)
        doubtful = small_beside(gradients) if exact is None else _rounded_away(model, exact)
        if trial.clip is not None:
            clip = clip_grad_norm_ if ours is None else lambda _, norm: ours.clip_grad_norm_(norm)
            clip(model.parameters(), trial.clip)
        (ours or optimizer).step()
        (ours or optimizer).zero_grad()
        found = model.state_dict() if ours is None else full_state_dict(model)
        state = {name: tensor.detach().clone() for name, tensor in found.items()}
        skipped = ours is not None and _skipped(model) > 0
        states.append(Seen(watch.take(), gradients, state, doubtful, skipped))
    return states


def _rounded_away(model: torch.nn.Module, exact: Gradients) -> Masks:
    state: Any = run_of("verify", model).state  # Any: one device steps on whole gradients
    found = {name: grad for name, grad in state.stepped_on().items() if grad.isfinite().all()}
    return unlike(found, exact)


def _relative(
    found: torch.Tensor, expected: torch.Tensor, norm: float, noise: float = 0.0
) -> float:
    if expected.numel() == 0:
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    off = found.to(wide) - expected.to(wide)
    if noise:
        off = torch.where(off.abs() <= noise, 0.0, off)
    sizes = [torch.linalg.vector_norm(one, norm).item() for one in (off, expected.to(wide))]
    return float(sizes[0] / sizes[1] if sizes[1] else sizes[0])


def judge(
    every: Iterable[Difference], *, strategy: str, ranks: int, steps: int, tolerance: float
) -> Verdict:
    """Return the first difference beyond the tolerance, if any, and the largest at all."""
    listed = list(every)
    wrong = [one for one in listed if not one.relative <= tolerance]  # NaN too
    # What is inside a layer may be a part of a sum; it counts where something comes of it.
    steps_wrong = [one.step for one in wrong if one.kind != "activation"]
    order = {"activation": 0, "gradient": 1, "parameter": 2}
    first = min(
        (one for one in wrong if steps_wrong and one.step <= min(steps_wrong)),
        key=lambda one: (one.step, order[one.kind], one.order, -one.relative),
        default=None,
    )
    largest = max((one for one in listed if one.kind == "parameter"), key=lambda one: one.relative)
    return Verdict(strategy, ranks, steps, first, largest)


def rounding(model: torch.nn.Module, precision: str | Precision) -> float:
    """Return the largest difference that rounding explains for this model."""
    if precision != "fp32":
        return LOOSE
    kinds = {parameter.dtype for parameter in model.parameters()}
    return max((TOLERANCE.get(kind, LOOSE) for kind in kinds), default=LOOSE)
