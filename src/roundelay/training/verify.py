"""What `rd.verify` compares: ranks under a strategy with one device on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.mesh import Mesh
from roundelay.parallel.sharding import sharding_of
from roundelay.parallel.staging import staging_of
from roundelay.training._join_mesh import Plan
from roundelay.training._mesh_ranks import rows_of
from roundelay.training._run import run_of
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
#: What of a model's largest gradient is rounding, in steps of a dtype; and below what an element is
#: so small that its sign, which is all that Adam takes a first step by, may be rounding.
NOISE, DOUBTFUL = 64, 640
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

    @property
    def rounding(self) -> float:
        """The last digit of the largest element of all gradients."""
        grads = [grad for grad in self.gradients.values() if grad.numel()]
        largest = max((float(grad.abs().max()) for grad in grads), default=0.0)
        return largest * max((torch.finfo(grad.dtype).eps for grad in grads), default=0.0)


def verify_on(comm: Communicator, trial: Trial) -> list[list[Difference]]:
    """Be one rank: train a copy under the strategy; return how each parameter differed, by step."""
    mesh = None if trial.axes is None else Mesh(comm=comm, **trial.axes)
    whole = _one_device(trial, (mesh or Mesh(dp=comm.size, comm=comm))[()])
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
    watch = None if mesh is None else Watch(mine)
    found, doubtful = [], dict[str, torch.Tensor]()
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
        state = full_state_dict(mine)
        _doubt(expected, doubtful)
        differences += [
            trial.difference(step, comm.rank, name, one, tensor)
            for name, tensor in expected.state.items()
            for one in (_sure(state[name], tensor, doubtful.get(name)),)
        ]
        found.append(differences)
    return found


def _doubt(seen: Seen, doubtful: dict[str, torch.Tensor]) -> None:
    """Note elements whose gradients are rounding, of which Adam makes steps of full length."""
    for name, grad in seen.gradients.items():
        size = grad.abs()
        small = size <= DOUBTFUL * seen.rounding
        if not small.all() or not size.any():  # what is zero beside others is no rounding
            small &= size > 0
        doubtful[name] = doubtful[name] | small if name in doubtful else small


def _sure(
    found: torch.Tensor, expected: torch.Tensor, doubtful: torch.Tensor | None
) -> torch.Tensor:
    """Return a parameter without what nobody can tell of it."""
    if doubtful is None or not bool(doubtful.any()):
        return found
    return torch.where(doubtful.to(found.device), expected.to(found), found)


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
            noise = NOISE * expected.rounding
            found.append(trial.difference(step, rank, name, gradients[name], part,
                                          "gradient", order, noise))  # fmt: skip
    return found


def _one_device(trial: Trial, alone: Communicator) -> list[Seen]:
    """Train on a rank alone; by torch itself, unless the precision is ours."""
    model = copy.deepcopy(trial.model)
    optimizer = trial.make_optimizer(model.parameters())
    ours: Any = None
    if trial.precision != "fp32":
        model, ours = prepare(model, optimizer, precision=trial.precision, comm=alone)
    watch = Watch(model)
    states = []
    for batch in trial.batches:
        if ours is None:
            trial.loss(model, *batch).backward()  # type: ignore[no-untyped-call]
        else:
            _backward(trial, model, batch, len(batch[0]))
        gradients = gradients_of(model)
        if trial.clip is not None:
            clip = clip_grad_norm_ if ours is None else lambda _, norm: ours.clip_grad_norm_(norm)
            clip(model.parameters(), trial.clip)
        (ours or optimizer).step()
        (ours or optimizer).zero_grad()
        found = model.state_dict() if ours is None else full_state_dict(model)
        state = {name: tensor.detach().clone() for name, tensor in found.items()}
        states.append(Seen(watch.take(), gradients, state))
    return states


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
