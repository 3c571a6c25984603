"""What `rd.verify` compares: ranks under a strategy with one device on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.mesh import Mesh
from roundelay.parallel.sharding import sharding_of
from roundelay.parallel.staging import staging_of
from roundelay.training._join_mesh import Plan
from roundelay.training._mesh_ranks import rows_of
from roundelay.training._watch import Watch, gradients_of, local_part, share_of
from roundelay.training.precision import Precision
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
LOOSE = 1e-2  # for half types

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

    def __str__(self) -> str:
        what = {"gradient": "the gradient of ", "activation": "the output of "}.get(self.kind, "")
        return (
            f"step {self.step}, rank {self.rank}: {what}{self.parameter} differs by "
            f"{self.relative:.3g} of its largest element"
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


@dataclass(slots=True)
class Seen:
    """One step on one device: what modules gave, gradients, and the state afterwards."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def verify_on(comm: Communicator, trial: Trial) -> list[list[Difference]]:
    """Be one rank: train a copy under the strategy; return how each parameter differed, by step."""
    whole = _one_device(trial)
    mine = copy.deepcopy(trial.model)
    mesh = None if trial.axes is None else Mesh(comm=comm, **trial.axes)
    if mesh is not None and trial.divide is not None:
        made = trial.divide(mine, mesh)
        mine = made if isinstance(made, torch.nn.Module) else mine
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
    for batch in trial.batches:
        _check_rows(mine, mesh, len(batch[0]))
    watch = None if mesh is None else Watch(mine)
    found = []
    for step, (batch, expected) in enumerate(zip(trial.batches, whole, strict=True)):
        share = [_share(comm, mesh, part) for part in batch]
        rows = len(share[0])
        _backward(trial, mine, share if rows else [part[:1] for part in batch], rows)
        differences = []
        if mesh is not None and watch is not None:
            differences = _inside(mesh, mine, watch, expected, step, len(batch[0]) if rows else 0)
        if trial.clip is not None:
            optimizer.clip_grad_norm_(trial.clip)
        optimizer.step()
        optimizer.zero_grad()
        state = full_state_dict(mine)
        differences += [
            Difference(step, comm.rank, name, _relative(state[name], tensor))
            for name, tensor in expected.state.items()
        ]
        found.append(differences)
    return found


def _check_rows(model: torch.nn.Module, mesh: Mesh | None, rows: int) -> None:
    """Refuse rows that replicas of a pipeline would have more and fewer of: they weigh the same."""
    if mesh is not None and staging_of(model) is not None and rows % rows_of(mesh).size:
        raise InvalidArgumentError(
            f"verify deals the rows of a batch to {rows_of(mesh).size} replicas of a pipeline, and "
            f"{rows} do not divide by that. Give batches of a multiple."
        )


def _backward(trial: Trial, model: Any, share: Sequence[torch.Tensor], rows: int) -> None:
    """Bring gradients of this rank's rows, of which there may be none: all call the model."""
    if staging_of(model) is None:
        backward(trial.loss(model, *share) * rows, weight=rows, model=model)
        return
    *x, target = share
    model.step(tuple(x), target)


def _share(comm: Communicator, mesh: Mesh | None, part: torch.Tensor) -> torch.Tensor:
    return part.tensor_split(comm.size)[comm.rank] if mesh is None else share_of(mesh, part)


def _inside(
    mesh: Mesh, model: torch.nn.Module, watch: Watch, expected: Seen, step: int, rows: int
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
            relative = _relative(outputs[name], part)
            found.append(Difference(step, rank, name, relative, "activation", order))
    gradients = gradients_of(model)
    parameters = dict(model.named_parameters())
    for order, (name, grad) in enumerate(expected.gradients.items()):
        if name in gradients:
            sharding = sharding_of(parameters[name])
            part = grad if sharding is None else sharding.local(grad)
            relative = _relative(gradients[name], part)
            found.append(Difference(step, rank, name, relative, "gradient", order))
    return found


def _one_device(trial: Trial) -> list[Seen]:
    alone = copy.deepcopy(trial.model)
    optimizer = trial.make_optimizer(alone.parameters())
    watch = Watch(alone)
    states = []
    for batch in trial.batches:
        trial.loss(alone, *batch).backward()  # type: ignore[no-untyped-call]
        gradients = gradients_of(alone)
        if trial.clip is not None:
            torch.nn.utils.clip_grad_norm_(alone.parameters(), trial.clip)
        optimizer.step()
        optimizer.zero_grad()
        state = {name: tensor.detach().clone() for name, tensor in alone.state_dict().items()}
        states.append(Seen(watch.take(), gradients, state))
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
