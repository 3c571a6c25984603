"""What this host's links do, from measured all-reduces: latency, bandwidth and speed of folding."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roundelay.bench.messages import CaseResult, Spec
from roundelay.errors import InvalidArgumentError
from roundelay.networks import Cluster

__all__ = ["FittedHost", "fitted_host", "matrix_flops"]

LEAST_LATENCY = 1e-9
SIDE, REPEATS = 1024, 5  # of the matrices that are multiplied


@dataclass(frozen=True, slots=True)
class FittedHost:
    """A cluster of this host alone, and how far its formula is from what was measured."""

    cluster: Cluster
    errors: tuple[float, ...]  # relative, row by row

    @property
    def typical(self) -> float:
        """The median of the errors."""
        return float(np.median(self.errors))


def fitted_host(
    spec: Spec, rows: Sequence[CaseResult], *, flops: float, name: str = "host"
) -> FittedHost:
    """Fit `2 latency + S(N-1)/N (2/bandwidth + 1/fold)`, the planner's formula, to all-reduces.

    Rows count by their relative error, so that small messages decide the latency and large ones
    the bandwidth. The speed of folding is that of the memory pass that was measured beside them.
    """
    size = spec.size
    measured = [(row.nbytes, row.timings[spec.contenders[0]].seconds) for row in rows]
    floors = [row.nbytes / row.floor for row in rows if row.floor]
    if size < 2 or len(measured) < 2 or not floors:  # noqa: PLR2004 - two unknowns
        raise InvalidArgumentError(
            "--fit needs at least 2 ranks, and rows of at least two sizes, of which the largest "
            "is large enough for a memory pass: -n 2 -b 8 -e 64MiB."
        )
    fold = floors[-1]
    nbytes, seconds = (np.array(column, float) for column in zip(*measured, strict=True))
    known = np.stack([1 / seconds, nbytes / seconds], axis=1)
    start, slope = np.linalg.lstsq(known, np.ones(len(seconds)), rcond=None)[0]
    latency = max(LEAST_LATENCY, float(start) / 2)
    per_byte = (float(slope) * size / (size - 1) - 1 / fold) / 2
    bandwidth = 1 / per_byte if per_byte > 0 else fold
    share = (size - 1) / size
    told = 2 * latency + nbytes * share * (2 / bandwidth + 1 / fold)
    cluster = Cluster(
        name=name,
        source=f"measured on this host by roundelay bench --fit: all_reduce on {size} ranks, "
        f"{spec.engine}; other hosts were not measured",
        per_host=size,
        latency=latency,
        bandwidth=bandwidth,
        nic_latency=0.0,
        nic_bandwidth=bandwidth,
        reduce_bandwidth=fold,
        flops={"fp32": flops / size},
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // size,
    )
    return FittedHost(cluster, tuple(abs(told / seconds - 1).tolist()))


def matrix_flops() -> float:
    """Return how many operations this host does in a second, in products of float32 matrices."""
    one = np.ones((SIDE, SIDE), np.float32)
    best = min(_seconds(one) for _ in range(REPEATS))
    return 2 * SIDE**3 / best


def _seconds(one: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> float:
    began = time.perf_counter()
    one @ one
    return time.perf_counter() - began
