"""What is asked of a plan, with what is usual where nobody says: command line and page share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.networks import Cluster
from roundelay.planning.candidate import DEVICE_BUCKET, PRECISIONS, SERVERS, STRATEGIES, Task
from roundelay.planning.model import ModelShape
from roundelay.planning.search import PlanChoices

__all__ = ["AXES", "MOST_GPUS", "USUAL_SEQUENCE", "asked_choices", "asked_task"]

MOST_GPUS = 10_000_000
USUAL_SEQUENCE = 2048
USUAL_TOKENS = 4 << 20  # of a step, where nobody says
AXES = ("dp", "tp", "cp", "pp")


def asked_task(
    model: ModelShape,
    cluster: Cluster,
    *,
    gpus: int,
    memory: int | None = None,
    batch: int | None = None,
    sequence: int = USUAL_SEQUENCE,
    mfu: float = 0.4,
    flops: float | None = None,
    optimizer: str = "adam",
    bucket: int = DEVICE_BUCKET,
) -> Task:
    """Return the task; without a batch a step has about 4 Mi tokens, and rows for every rank.

    >>> from roundelay.networks import cluster_called
    >>> from roundelay.planning.model import transformer
    >>> model = transformer(params=7_500_000_000)
    >>> asked_task(model, cluster_called("h100-ib"), gpus=64).batch
    2048
    """
    if flops is not None:
        cluster = replace(cluster, flops=dict.fromkeys(PRECISIONS, flops))
    memory = memory or cluster.memory
    if memory is None:
        raise InvalidArgumentError(
            f"The cluster {cluster.name} does not say how much memory a rank has. Give --memory."
        )
    usual = max(1, USUAL_TOKENS // sequence // gpus) * gpus
    return Task(
        model, cluster, gpus, memory, batch or usual, sequence, mfu, optimizer, bucket=bucket
    )


def asked_choices(
    cluster: Cluster,
    *,
    strategies: Sequence[str] = (),
    precisions: Sequence[str] = (),
    micro_batches: Sequence[int] = (),
    recompute: str | None = None,
    axes: Mapping[str, object] | None = None,
) -> PlanChoices:
    """Return what is left to choose; a precision that nobody names is the cluster's first."""
    wanted = tuple(strategies) or STRATEGIES
    for kind, names, known in (("strategies", wanted, (*STRATEGIES, *SERVERS)),
                               ("precisions", precisions, tuple(PRECISIONS))):  # fmt: skip
        for name in names:
            if name not in known:
                raise UnknownNameError(kind, name, known)
    fixed: dict[str, int] = {}
    for name, count in (axes or {}).items():
        if name not in AXES:
            raise UnknownNameError("--mesh", name, AXES)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InvalidArgumentError(f"--mesh {name}={count}: take a whole number from 1.")
        fixed[name] = count
    usual = next((name for name in PRECISIONS if name in cluster.flops), "bf16")
    return PlanChoices(
        strategies=tuple(dict.fromkeys(wanted)),
        precisions=tuple(dict.fromkeys(precisions)) or (usual,),
        micro_batches=tuple(micro_batches) or None,
        recompute=("none", "full") if recompute is None else (recompute,),
        **fixed,
    )
