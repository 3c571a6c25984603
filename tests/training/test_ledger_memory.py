"""What the ledger predicts is what ranks really take from the system, as the kernel counts it."""

from __future__ import annotations

import ast
import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.training.prepare import known_strategies  # noqa: E402

ROLLUP = Path("/proc/self/smaps_rollup")
WORDS = ("Pss_Anon", "Pss_Shmem", "SwapPss")
# Without servers, which are threads: what they let go of, and when, is up to the last message.
STRATEGIES = [name for name in known_strategies() if not name.startswith("ps")]
KINDS = {"fp32": "float32", "bf16": "bfloat16"}
WIDTH, DEPTH = 512, 8  # 8 MiB of parameters in fp32
LEAST, MOST = 0.95, 1.1
NO_HUGE_PAGES, MMAP_THRESHOLD = 41, -3  # of prctl and of mallopt

pytestmark = pytest.mark.skipif(
    not ROLLUP.exists() or WORDS[0] not in ROLLUP.read_text(), reason="the kernel does not say"
)


def settle() -> None:
    """Have a tensor take the pages that it needs, and give them back when it goes.

    Else huge pages would round up, and what was freed would stay with malloc for whoever asks next.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(NO_HUGE_PAGES, 1, 0, 0, 0)
    libc.mallopt(MMAP_THRESHOLD, 1 << 16)


def taken() -> int:
    """Return the bytes of this process's memory; of what it shares, its share."""
    lines = dict(line.split(":") for line in ROLLUP.read_text().splitlines()[1:])
    return 1024 * sum(int(lines[word].split()[0]) for word in WORDS)


def tidied() -> int:
    """Return likewise what is left when all is given back that nobody needs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return taken()


def trained(comm: Any, name: str, precision: str, width: int) -> Any:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(DEPTH)))
    optimizer = torch.optim.Adam(model.parameters())
    model, own = rd.prepare(model, optimizer, strategy=name, comm=comm, precision=precision)
    for _ in range(2):
        own.zero_grad()
        model(torch.ones(1, width)).float().square().mean().backward()
        own.step()
    comm.barrier()
    return model


def be_rank(comm: Any, precision: str) -> dict[str, tuple[int, int]]:
    """Train one model after the other, all of which stay: so each takes new memory."""
    settle()
    layer = torch.nn.Linear(WIDTH, WIDTH, dtype=getattr(torch, KINDS[precision]))
    layer(torch.ones(1, WIDTH, dtype=layer.weight.dtype)).sum().backward()  # kernels have memory
    stay = [trained(comm, name, precision, 8) for name in STRATEGIES]
    found = {}
    for name in STRATEGIES:
        before = tidied()
        comm.barrier()
        stay.append(trained(comm, name, precision, WIDTH))
        found[name] = tidied() - before, rd.ledger(stay[-1]).entries[comm.rank].predicted.total
        comm.barrier()
    return found


def in_processes(work: Any, size: int, *args: Any) -> list[Any]:
    gc.collect()
    gc.freeze()  # ranks that look at what is here would copy it
    try:
        return rd.run(work, size, "shared_memory", args)
    finally:
        gc.unfreeze()


def in_a_new_process(call: str) -> Any:
    """Return what a call of this module gives there.

    Of a process that ran other tests, ranks copy what they touch: a small object that goes into a
    hole left by what was freed there takes a whole page.
    """
    code = f"import {Path(__file__).stem} as own; print(own.{call})"
    place = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, env=place, stdout=subprocess.PIPE, text=True, check=True).stdout
    return ast.literal_eval(said)


def found_by_ranks(precision: str, size: int) -> list[dict[str, tuple[int, int]]]:
    rd.run(lambda comm: [trained(comm, name, precision, 8) for name in STRATEGIES], 2, "threads")
    return in_processes(be_rank, size, precision)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("precision", KINDS)
def test_ranks_take_what_is_predicted(precision: str, size: int) -> None:
    """But for Python's own objects, 0.4 MiB of slots and flags, and a little for kernels of torch.

    Whichever way calls take, by slots or by reading, adds no more.
    """
    every = in_a_new_process(f"found_by_ranks({precision!r}, {size})")
    for rank, found in enumerate(every):
        for name, (real, predicted) in found.items():
            assert LEAST < real / predicted < MOST, (name, rank, real, predicted)


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A unit of 1 MiB that notes what the process has taken, in forward and in backward."""

    def __init__(self, width: int, seen: list[int]) -> None:
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(width, width), seen

    def forward(self, x: Any) -> Any:
        out = self.linear(x)
        out.register_hook(lambda _: self.seen.append(taken()))
        self.seen.append(taken())
        return out


def peak(comm: Any) -> tuple[int, int, int]:
    """Return the most that two steps of zero3 took, what is predicted to stay, and a unit."""
    settle()
    for width in (8, WIDTH):
        seen: list[int] = []
        before = tidied()
        comm.barrier()
        model = torch.nn.Sequential(*(Block(width, seen) for _ in range(DEPTH)))
        optimizer = torch.optim.Adam(model.parameters())
        model, own = rd.prepare(model, optimizer, strategy="zero3", comm=comm)
        for _ in range(2):
            own.zero_grad()
            model(torch.ones(1, width)).square().mean().backward()
            own.step()
        held = rd.ledger(model).entries[comm.rank].predicted.total
        unit = max(one.nbytes for one in own.run.state.partition.units)
        comm.barrier()
    return max(seen) - before, held, unit


def test_zero3_takes_two_units_beside_its_shards() -> None:
    """And while backward runs, the gradients of one, which autograd has made.

    What else a forked process takes meanwhile only adds, so the least of some runs is the model's.
    """
    runs = [in_a_new_process("in_processes(own.peak, 2)") for _ in range(3)]
    for rank in range(2):
        most, held, unit = min(run[rank] for run in runs)
        assert most < held + 4 * unit, [run[rank] for run in runs]
