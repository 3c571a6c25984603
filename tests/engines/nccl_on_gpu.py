"""The engine nccl on a real GPU: one rank, every collective, reduction and dtype; prints a table.

    python tests/engines/nccl_on_gpu.py

Ends with exit code 1 if anything differs. With one rank every result is known: what was brought.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import roundelay as rd
from roundelay.errors import RoundelayError

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]
OPS = ("sum", "prod", "min", "max", "avg", "land", "lor", "lxor", "band", "bor", "bxor")
COUNTS = (0, 1, 1000, 1_000_000)


def sample(dtype: str, count: int) -> Any:
    """Return small whole numbers on the GPU."""
    return (torch.arange(count, device="cuda") % 2).to(getattr(torch, dtype))


def takes(op: str, dtype: str) -> bool:
    if "float" in dtype:
        return op not in ("band", "bor", "bxor")
    if dtype.startswith("complex"):
        return op in ("sum", "prod", "avg", "land", "lor", "lxor")
    return op != "avg"


def calls(comm: rd.Communicator, dtype: str, count: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield what was called, what came, and what is due."""
    x = sample(dtype, count)
    for op in OPS:
        if takes(op, dtype):
            yield f"all_reduce {op}", comm.all_reduce(x.clone(), op), x
            yield f"reduce {op}", comm.reduce(x.clone(), op), x
            yield f"reduce_scatter {op}", comm.reduce_scatter(x[None].clone(), op), x
            if op != "avg":
                yield f"scan {op}", comm.scan(x.clone(), op), x
    yield "out=", comm.all_reduce(x, out=torch.empty_like(x)), x
    yield "start", comm.start.all_reduce(x.clone()).wait(), x
    yield "broadcast", comm.broadcast(x.clone()), x
    yield "all_gather", comm.all_gather(x), x[None]
    yield "gather", comm.gather(x), x[None]
    yield "scatter", comm.scatter(x[None], out=torch.empty_like(x)), x
    yield "all_to_all", comm.all_to_all(x[None].clone()), x[None]
    yield "axis=0", comm.all_gather(x, axis=0, counts=[count]), x
    yield "to oneself", _through_mail(comm, x), x
    strided = torch.stack([x, x], 1)[:, 0]
    yield "strided", comm.all_reduce(strided), x


def _through_mail(comm: rd.Communicator, x: Any) -> Any:
    comm.send(x, 0, 3)
    return comm.recv(torch.empty_like(x), 0, 3)


def other_checks(comm: rd.Communicator) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield what has no place in the grid."""
    ones = torch.ones(3, device="cuda")
    yield "results lie on the GPU", lambda: bool(comm.all_gather(ones).is_cuda)
    yield "barrier", lambda: comm.start.barrier().wait() is None
    yield "split", lambda: _in_a_group(comm, ones) == [1, 1, 1]
    yield "maxloc", lambda: comm.all_reduce(ones, "maxloc").locations.tolist() == [0, 0, 0]
    yield "arrays of the host", lambda: comm.all_reduce(ones.cpu().numpy()).tolist() == [1, 1, 1]
    yield "a stream of its own", lambda: _on_a_stream(comm)
    yield "a CPU engine refuses", lambda: _refused(ones)


def _in_a_group(comm: rd.Communicator, ones: Any) -> Any:
    part = comm.split(0)
    return None if part is None else part.all_reduce(ones.clone()).tolist()


def _on_a_stream(comm: rd.Communicator) -> bool:
    cuda: Any = torch.cuda  # which has no types
    with cuda.stream(cuda.Stream()):
        x = torch.zeros(1 << 22, device="cuda")
        for _ in range(20):
            x += 1
        return bool((comm.start.all_reduce(x).wait() == 20).all())


def _refused(tensor: Any) -> bool:
    def work(comm: rd.Communicator) -> str:
        try:
            comm.all_reduce(tensor)
        except RoundelayError as error:
            return str(error)
        return ""

    return "engine='nccl'" in rd.run(work, 1, engine="threads")[0]


def main() -> int:
    """Print a line for every dtype, and what differed."""
    comm = rd.init("nccl")
    nccl: Any = torch.cuda.nccl  # which has no types
    version = ".".join(map(str, nccl.version()))
    print(f"torch {torch.__version__}, NCCL {version}, {torch.cuda.get_device_name()}")  # noqa: T201
    wrong: list[str] = []
    for dtype in DTYPES:
        good = bad = 0
        for count in COUNTS:
            for what, found, due in calls(comm, dtype, count):
                same = found.is_cuda and found.dtype is due.dtype and torch.equal(found, due)
                good, bad = good + same, bad + (not same)
                if not same:
                    wrong.append(f"{what} {dtype}[{count}]: {found} instead of {due}"[:300])
        print(f"{dtype:>12}  {good:4} right  {bad:4} wrong")  # noqa: T201
    for what, check in other_checks(comm):
        passed = check()
        print(f"{what:>24}  {'right' if passed else 'WRONG'}")  # noqa: T201
        wrong += [] if passed else [what]
    print("\n".join(wrong[:40]))  # noqa: T201
    comm.close()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
