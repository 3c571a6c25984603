"""One way to train: a strategy, a precision, a mesh, a micro-batch; and what is asked of all."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.errors import InvalidArgumentError
from roundelay.networks import Cluster
from roundelay.planning.activations import KeptHow
from roundelay.planning.held import ByteWidths
from roundelay.planning.model import ModelShape

__all__ = ["OPTIMIZERS", "PRECISIONS", "SERVERS", "STRATEGIES", "Candidate", "MeshShape", "Task"]

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
SERVERS = ("ps", "ps-async")  # planned where they are asked for
PRECISIONS = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a parameter that computes
OPTIMIZERS = {"adam": 8, "momentum": 4, "sgd": 0}  # bytes of state for a parameter
MASTER = 4  # bytes of a master weight, where parameters have fewer
DEVICE_BUCKET = 32 << 20


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Ranks along each axis; `tp` lies innermost, then `cp`, `dp` and `pp`."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def data(self) -> int:
        """Ranks between which strategies divide: those along dp and cp."""
        return self.dp * self.cp

    def __str__(self) -> str:
        axes = [(name, getattr(self, name)) for name in ("dp", "tp", "cp", "pp")]
        named = [f"{name}={count}" for name, count in axes if count > 1]
        return " ".join(named) or "dp=1"


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be trained, on what: the same for all candidates."""

    model: ModelShape
    cluster: Cluster
    gpus: int
    memory: int  # bytes of a rank
    batch: int  # rows of a step, of all ranks together
    sequence: int
    mfu: float = 0.4  # of the peak, what matrix products reach
    optimizer: str = "adam"
    bucket: int = DEVICE_BUCKET
    flash: bool = True
    sequence_parallel: bool = True

    def rate(self, precision: str) -> float:
        """Return how many operations a rank does in a second."""
        peak = self.cluster.flops.get(precision)
        if peak is None:
            known = ", ".join(self.cluster.flops) or "none"
            raise InvalidArgumentError(
                f"The cluster {self.cluster.name} does not say what a rank computes in "
                f"{precision} (it knows: {known}). Give --flops, or another --precision."
            )
        return peak * self.mfu


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to do it."""

    strategy: str
    precision: str
    mesh: MeshShape
    micro_batch: int  # rows of one rank of dp at a time
    recompute: str = "none"

    def micro_batches(self, task: Task) -> int:
        """Return how many micro-batches a step has."""
        return max(1, task.batch // (self.mesh.dp * self.micro_batch))

    def widths(self, task: Task) -> ByteWidths:
        """Return the bytes for each parameter."""
        item = PRECISIONS[self.precision]
        master = MASTER if item < MASTER else 0
        return ByteWidths(item, item, master, OPTIMIZERS[task.optimizer])

    def kept(self, task: Task) -> KeptHow:
        """Return how activations are kept."""
        return KeptHow(
            itemsize=PRECISIONS[self.precision],
            tp=self.mesh.tp,
            cp=self.mesh.cp,
            sequence_parallel=task.sequence_parallel,
            recompute=self.recompute,
            flash=task.flash,
        )
