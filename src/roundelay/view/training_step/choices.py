"""What is trained in the picture, and how; and by the planner's formulas its bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from roundelay.arguments import whole
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.networks import cluster_called
from roundelay.planning import (
    SERVERS,
    STRATEGIES,
    Candidate,
    Held,
    MeshShape,
    ModelShape,
    StepTime,
    Task,
    step_time,
    transformer,
)
from roundelay.planning.collective_time import all_gather, all_reduce, one_message, reduce_scatter
from roundelay.planning.held import ByteWidths, served, whole_everywhere, worker, zero
from roundelay.planning.step_time import groups_of

__all__ = ["SLOWNESS", "STRATEGY_NAMES", "StepChoices", "StepSizes"]

STRATEGY_NAMES = (*STRATEGIES, *SERVERS, "ps-ssp")
SHOWN_PRECISIONS = ("fp32", "bf16")
SLOWNESS = 3  # times as long as others the straggler computes
MOST_RANKS, MOST_LAYERS, MOST_STALENESS = 8, 8, 4
WIDTH, TOKENS = 4096, 2048  # of a layer; of one rank in a step
FIRST_DTYPE = 4  # bytes by which buckets are cut
MEMORY = 80 * 10**9


@dataclass(frozen=True, slots=True)
class StepChoices:
    """The strategy, and what it is to be seen with."""

    strategy: str = "ddp"
    ranks: int = 4
    layers: int = 4
    buckets: int = 2  # of ddp, zero1 and zero2
    precision: str = "bf16"
    straggler: int | None = None  # a rank that computes slowly
    staleness: int = 1  # steps that ps-ssp lets a worker get ahead
    cluster: str = "h100-ib"
    width: int = WIDTH

    def __post_init__(self) -> None:
        for what, value, known in (
            ("strategies", self.strategy, STRATEGY_NAMES),
            ("precisions", self.precision, SHOWN_PRECISIONS),
        ):
            if value not in known:
                raise UnknownNameError(what, value, known)
        whole("ranks of a training step", self.ranks, 1, MOST_RANKS)
        whole("layers of a training step", self.layers, 1, MOST_LAYERS)
        whole("buckets of a training step", self.buckets, 1, MOST_LAYERS)
        whole("staleness of a training step", self.staleness, 0, MOST_STALENESS)
        if self.straggler is not None:
            whole("straggler of a training step", self.straggler, 0)
            if self.straggler >= self.ranks:
                raise InvalidArgumentError(
                    f"The straggler is rank {self.straggler}, but there are only {self.ranks} "
                    f"ranks. Take one below {self.ranks}, or none."
                )

    @property
    def served(self) -> bool:
        """Whether a parameter server, on rank 0, brings the gradients together."""
        return self.strategy.startswith("ps")

    @property
    def divided(self) -> bool:
        """Whether ranks own shards."""
        return self.strategy.startswith("zero")


class StepSizes:
    """Bytes and seconds of one step, all by the planner."""

    def __init__(self, choices: StepChoices) -> None:
        self.choices = choices
        layers, width = choices.layers, choices.width
        block = transformer(layers=1, hidden=width, vocabulary=0).layer
        model = ModelShape(layers, width, max(1, width // 128), 0, (), block, ())
        self.unit = sum(block)  # elements of a layer
        bucket = -(-layers // min(choices.buckets, layers)) * self.unit * FIRST_DTYPE
        self.task = Task(model, cluster_called(choices.cluster), choices.ranks, MEMORY,
                         batch=choices.ranks, sequence=TOKENS, bucket=bucket)  # fmt: skip
        planned = "ps-async" if choices.strategy == "ps-ssp" else choices.strategy
        self.candidate = Candidate(
            planned, choices.precision, MeshShape(dp=choices.ranks), micro_batch=1
        )

    @cached_property
    def width(self) -> ByteWidths:
        """The bytes for each parameter."""
        return self.candidate.widths(self.task)

    @cached_property
    def seconds(self) -> StepTime:
        """What the planner says of the whole step."""
        return step_time(self.task, self.candidate)

    @cached_property
    def buckets(self) -> list[tuple[int, ...]]:
        """The layers of each bucket, the last layers first, as their gradients come."""
        each = self.task.bucket // (self.unit * FIRST_DTYPE)
        last_first = range(self.choices.layers - 1, -1, -1)
        return [tuple(last_first[at : at + each]) for at in range(0, len(last_first), each)]

    def held(self, rank: int) -> Held:
        """Return what a rank holds when the step is over."""
        choices, width = self.choices, self.width
        numel = choices.layers * self.unit
        if choices.served:
            together = choices.strategy == "ps"
            if rank:
                return worker(numel, width, together=together)
            return served(numel, width, workers=choices.ranks, together=together)
        if not choices.divided:
            return whole_everywhere(numel, width)
        alone = choices.strategy == "zero3" and choices.ranks > 1
        rows = [self.unit] * choices.layers if alone else [
            len(bucket) * self.unit for bucket in self.buckets
        ]  # fmt: skip
        return zero(rows, width, stage=int(choices.strategy[-1]), size=choices.ranks)

    def row(self, units: Sequence[int]) -> int:
        """Return the elements of a row of these layers, padded where it is divided."""
        numel, size = len(units) * self.unit, self.choices.ranks
        return -(-numel // size) * size if self.choices.divided else numel

    def took(self, collective: str, nbytes: int) -> float:
        """Return the seconds of a collective on so many bytes, or of a message to the server."""
        group, cluster = groups_of(self.task, self.candidate).data, self.task.cluster
        kinds = {
            "all_reduce": all_reduce,
            "reduce_scatter": reduce_scatter,
            "all_gather": all_gather,
        }
        return kinds.get(collective, one_message)(cluster, group, nbytes)
