"""Gloo, by torch.distributed, as somebody to measure against, in the processes that are ours."""

from __future__ import annotations

import importlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roundelay.bench.workload import Buffers, Call, Workload
from roundelay.errors import InvalidArgumentError

__all__ = ["GlooPeer", "check_gloo"]

DTYPES = ("int8", "uint8", "int32", "int64", "float16", "float32", "float64")
OPS = ("sum", "prod", "min", "max", "band", "bor", "bxor")


def check_gloo() -> None:
    """Refuse to start where torch is not installed."""
    if find_spec("torch") is None:
        raise InvalidArgumentError(
            "--against gloo needs PyTorch, which brings Gloo. Install it: pip install torch"
        )


class GlooPeer:
    """A process group of torch over the ranks that are ours; they meet in `file`."""

    def __init__(self, rank: int, size: int, file: Path) -> None:
        self._torch: Any = importlib.import_module("torch")  # optional, so without types
        self._dist: Any = importlib.import_module("torch.distributed")
        self._torch.set_num_threads(1)
        self._dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank,
                                      world_size=size)  # fmt: skip

    @property
    def version(self) -> str:
        """Name the torch that brought it."""
        return f"torch {self._torch.__version__}"

    def call(self, work: Workload, buffers: Buffers) -> Call | None:
        """Return torch's call on these buffers, None where Gloo has none."""
        dist, root = self._dist, work.root
        adds = work.collective in ("all_reduce", "reduce", "reduce_scatter")
        if work.dtype not in DTYPES or (adds and work.op not in OPS):
            return None
        op = getattr(dist.ReduceOp, work.op.upper()) if adds else None
        x, out = map(self._torch.from_numpy, (buffers.input, buffers.output))
        rows = list(x.view(work.size, -1)) if work.collective == "scatter" and x.numel() else None
        parts = list(out.view(work.size, -1)) if work.collective == "gather" and len(out) else None
        calls: dict[str, Call] = {
            "all_reduce": partial(dist.all_reduce, x, op=op),
            "reduce": partial(dist.reduce, x, dst=root, op=op),
            "broadcast": partial(dist.broadcast, x, src=root),
            "all_gather": partial(
                self._named("all_gather_single", "all_gather_into_tensor"), out, x
            ),
            "gather": partial(dist.gather, x, parts, dst=root),
            "scatter": partial(dist.scatter, out, rows, src=root),
            "reduce_scatter": partial(
                self._named("reduce_scatter_single", "reduce_scatter_tensor"), out, x, op=op
            ),
            "all_to_all": partial(dist.all_to_all_single, out, x),
            "barrier": dist.barrier,
        }
        return calls.get(work.collective)

    def _named(self, new: str, old: str) -> Any:
        return getattr(self._dist, new, None) or getattr(self._dist, old)

    def close(self) -> None:
        """End the process group."""
        self._dist.destroy_process_group()
