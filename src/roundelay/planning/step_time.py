"""Seconds of a training step: what is computed, and what of the communication is not hidden.

Matrix products run at a share of the peak. Collectives cost what `collective_time` says. A strategy
sends beside backward, and what takes longer than that is waited for; tensor parallel waits for
every sum; pipelines wait at their ends, as `price_pipeline` counts for 1F1B.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.planning.candidate import PRECISIONS, Candidate, Task
from roundelay.planning.collective_time import (
    RankGroup,
    all_gather,
    all_reduce,
    group_along,
    one_message,
    reduce_scatter,
)
from roundelay.planning.held import ByteWidths
from roundelay.planning.memory import rows_of

__all__ = ["StepTime", "Volumes", "groups_of", "messages_in_a_row", "step_time", "volumes_of"]

FOLD_TRAFFIC = 3  # bytes read and written for each byte folded


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step on the slowest rank, by what they are spent on."""

    forward: float  # of all micro-batches
    backward: float
    recompute: float
    bubble: float  # waiting at the ends of the pipeline
    update: float  # the optimizer's step
    data: float  # waited for: gradients and parameters along dp and cp
    tensor: float  # sums of activations along tp
    context: float  # keys and values along cp
    pipeline: float  # activations from stage to stage
    hidden: float  # communication behind which something was computed
    sent: float  # bytes that a rank sends along the axes of data; of all ranks, the most

    @property
    def compute(self) -> float:
        """What one device would do, too."""
        return self.forward + self.backward + self.recompute + self.update

    @property
    def communication(self) -> float:
        """Communication that is waited for."""
        return self.data + self.tensor + self.context + self.pipeline

    @property
    def total(self) -> float:
        """The step."""
        return self.compute + self.bubble + self.communication

    @property
    def share(self) -> float:
        """The share of the step that is communication waited for."""
        return self.communication / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Volumes:
    """What one rank computes and sends for a micro-batch, before any of it is timed."""

    tokens: int  # of a micro-batch
    layers: int  # of a stage
    numel: int  # parameters of a stage, on one rank
    forward: float  # operations
    attention: float  # of these, in attention between tokens, of one layer
    activation: int  # bytes between two layers
    message: int  # of these, what a rank sends to the next stage
    keys_values: int  # bytes that travel around the ring of cp in one layer
    buckets: int  # messages of a pass of gradients: buckets, or units of ZeRO-3


@dataclass(frozen=True, slots=True)
class Groups:
    """Who calls together along each axis."""

    tensor: RankGroup
    context: RankGroup
    data: RankGroup
    stages: RankGroup


def groups_of(task: Task, candidate: Candidate) -> Groups:
    """Place the axes on hosts: tp innermost, then cp, dp and pp."""
    mesh, cluster = candidate.mesh, task.cluster
    return Groups(
        tensor=group_along(cluster, mesh.tp, 1),
        context=group_along(cluster, mesh.cp, mesh.tp),
        data=group_along(cluster, mesh.data, mesh.tp),
        stages=group_along(cluster, mesh.pp, mesh.tp * mesh.data),
    )


def volumes_of(task: Task, candidate: Candidate) -> Volumes:
    """Count: 2 operations for each parameter and token, and 2·s·h for each layer's attention."""
    model, mesh = task.model, candidate.mesh
    item = PRECISIONS[candidate.precision]
    tokens = candidate.micro_batch * task.sequence
    parts = mesh.tp * mesh.cp * mesh.pp
    between = 2 * task.sequence * model.hidden * tokens  # causal: half of 4·s·h
    forward = (2 * model.params * tokens + model.layers * between) / parts
    numel = model.params // (mesh.tp * mesh.pp)
    local = tokens // mesh.cp
    return Volumes(
        tokens=tokens,
        layers=model.layers // mesh.pp,
        numel=numel,
        forward=forward,
        attention=between / (mesh.tp * mesh.cp),
        activation=local * model.hidden * item,
        message=local * model.hidden * item // (mesh.tp if task.sequence_parallel else 1),
        keys_values=2 * local * model.hidden * item // mesh.tp,
        buckets=len(rows_of(task, candidate, 0)),
    )


def messages_in_a_row(stages: int, count: int) -> int:
    """Return how many messages 1F1B waits for, one after the other, as `price_pipeline` counts.

    It is exact for micro-batches in multiples of the stages, and never too few.
    """
    return 0 if stages == 1 else 2 * (stages - 1) * -(-count // stages) + 2 * (stages - 2)


def step_time(task: Task, candidate: Candidate) -> StepTime:
    """Return the seconds of a step and what they are spent on."""
    cluster, mesh, groups = task.cluster, candidate.mesh, groups_of(task, candidate)
    volumes, count = volumes_of(task, candidate), candidate.micro_batches(task)
    rate = task.rate(candidate.precision)
    forward = volumes.forward / rate
    backward, again = 2 * forward, forward if candidate.recompute == "full" else 0.0
    sums = 6 if candidate.recompute == "full" else 4
    tensor = volumes.layers * sums * all_reduce(cluster, groups.tensor, volumes.activation)
    context, hidden_context = _context(task, candidate, volumes, groups.context, rate)
    data, hidden_data = _data(task, candidate, volumes, groups.data, forward, backward + again)
    hop = one_message(cluster, groups.stages, volumes.message)
    stages = mesh.pp
    each = forward + backward + again + tensor + context
    return StepTime(
        forward=count * forward,
        backward=count * backward,
        recompute=count * again,
        bubble=(stages - 1) * each,
        update=_update(task, candidate, volumes),
        data=data,
        tensor=count * tensor,
        context=count * context,
        pipeline=messages_in_a_row(stages, count) * hop,
        hidden=count * hidden_context + hidden_data,
        sent=_sent(task, candidate, volumes),
    )


def _context(
    task: Task, candidate: Candidate, volumes: Volumes, group: RankGroup, rate: float
) -> tuple[float, float]:
    """Return what the ring of cp takes beyond attention itself in a micro-batch, and what not."""
    size = candidate.mesh.cp
    if size == 1:
        return 0.0, 0.0
    hop = one_message(task.cluster, group, volumes.keys_values)
    ahead, back = (size - 1) * hop, (2 * size - 1) * hop
    computed = volumes.attention / rate
    waited = max(0.0, ahead - computed) + max(0.0, back - 2 * computed)
    return volumes.layers * waited, volumes.layers * (ahead + back - waited)


def _data(
    task: Task,
    candidate: Candidate,
    volumes: Volumes,
    group: RankGroup,
    forward: float,
    backward: float,
) -> tuple[float, float]:
    """Return what a step waits for gradients and parameters, and what was hidden."""
    if group.size == 1:
        return 0.0, 0.0
    cluster, strategy, count = task.cluster, candidate.strategy, candidate.micro_batches(task)
    width, parts = candidate.widths(task), volumes.buckets
    row = volumes.numel * width.gradient / parts
    weights = volumes.numel * width.parameter / parts
    scatter, gather = reduce_scatter(cluster, group, row), all_gather(cluster, group, weights)
    if strategy.startswith("ps"):  # one rank hears of all others, and answers each
        both = (group.size - 1) * volumes.numel * _both_ways(candidate, width)
        return both / _server_bandwidth(task, group) + 2 * cluster.latency, 0.0
    if strategy == "ddp":
        return _beside(parts, scatter + all_gather(cluster, group, row), backward)
    if strategy == "zero3":
        ahead = _beside(parts, gather, forward)
        back = _beside(parts, gather + scatter, backward)
        return count * (ahead[0] + back[0]), count * (ahead[1] + back[1])
    passes = count if strategy == "zero2" else 1  # zero2 keeps no gradient that is not its own
    waited, hidden = _beside(parts, scatter, backward)
    return passes * waited + parts * gather, passes * hidden


def _beside(parts: int, each: float, computed: float) -> tuple[float, float]:
    """Return what is waited for, and what is hidden, where all but one of the parts overlap."""
    waited = max(each, parts * each - computed)
    return waited, parts * each - waited


def _server_bandwidth(task: Task, group: RankGroup) -> float:
    cluster = task.cluster
    return cluster.bandwidth if group.hosts == 1 else min(cluster.bandwidth, cluster.nic_bandwidth)


def _update(task: Task, candidate: Candidate, volumes: Volumes) -> float:
    """Return the time of the optimizer's step: it reads and writes all that it steps on once."""
    width = candidate.widths(task)
    owners = candidate.mesh.data if candidate.strategy.startswith("zero") else 1
    moved = width.parameter + width.gradient + 2 * width.optimizer
    return volumes.numel / owners * moved / (FOLD_TRAFFIC * task.cluster.reduce_bandwidth)


def _both_ways(candidate: Candidate, width: ByteWidths) -> int:
    """Return the bytes of a parameter to a server and back."""
    return width.gradient + _answer(candidate, width)


def _answer(candidate: Candidate, width: ByteWidths) -> int:
    """Return the bytes by which a server answers for a parameter: one that updates sends that."""
    return width.gradient if candidate.strategy == "ps" else width.updated


def _sent(task: Task, candidate: Candidate, volumes: Volumes) -> float:
    """Return the most bytes that a rank sends along the axes of data: Ψ(N-1)/N for each half.

    Where there is a server, it is that, which answers all the others; every worker sends Ψ.
    """
    size, count = candidate.mesh.data, candidate.micro_batches(task)
    if candidate.strategy.startswith("ps"):
        return (size - 1) * volumes.numel * _answer(candidate, candidate.widths(task))
    share = volumes.numel * (size - 1) / size
    halves = {"ddp": 2, "zero1": 2, "zero2": count + 1, "zero3": 3 * count}
    return halves[candidate.strategy] * PRECISIONS[candidate.precision] * share
