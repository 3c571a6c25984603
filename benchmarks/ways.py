"""How long does each way to run a call take here? Which one a job takes is found out as it runs.

Float32, on ordinary arrays that rotate and are rewritten. The ways of a cell are measured in turn,
in the same processes: by slots written through the caches or past them, by reading others' memory,
by rival algorithms. Last, the call as users make it. Writes results/ways.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import roundelay as rd
from roundelay import _core
from roundelay.algorithms import algorithms
from roundelay.bench.rounds import buffers_for
from roundelay.bench.workload import Buffers, Call, Workload
from roundelay.communicator import Communicator
from roundelay.communicator.selection import Selection
from roundelay.engines._native.programs import READABLE
from roundelay.schedule import Reach, compile_schedule

RESULTS = Path(__file__).parent / "results"
SIZES = (64 << 10, 1 << 20, 8 << 20)
COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "gather",
    "scatter", "all_to_all", "reduce_scatter", "scan",
)  # fmt: skip
ROUNDS, ROUND_S, WARM_UPS = 9, 0.02, 40


def names(collective: str, nbytes: int, size: int) -> list[str]:
    """Return what the ways of a call are, in their order."""
    usual = next(
        one.candidates for one in Selection(size).size_classes(collective) if nbytes <= one.up_to
    )
    found = []
    for how, reach, each in (
        ("slots", Reach(), usual.by_slots),
        ("read", READABLE, usual.by_reading),
    ):
        for name in each:
            word = name.removeprefix(f"{collective}_")
            programs = compile_schedule(algorithms.load(name).schedule(size), reach).ranks
            slots = any(program.slots for program in programs)
            found += [f"{word}, {how}", *([f"{word}, {how}, past caches"] if slots else [])]
    return found


def call(comm: Communicator, name: str, buffers: Buffers) -> Call:
    """Return a call of a collective on these buffers."""
    given, out = buffers.input, buffers.output
    if given is out:
        return partial(getattr(comm, name), given)
    root = comm.rank == 0
    rows = (comm.size, -1)
    options: dict[str, Any] = {"out": out.reshape(rows) if name in GATHERED else out}
    if name == "gather" and not root:
        options = {}
    x: Any = given if name in ("all_gather", "gather") else given.reshape(rows)
    return partial(getattr(comm, name), None if name == "scatter" and not root else x, **options)


GATHERED = ("all_gather", "gather", "all_to_all")


def measured(comm: Communicator, wanted: argparse.Namespace) -> list[dict[str, Any]]:
    """Return microseconds of every way, for all cases; runs on every rank."""
    return [
        {"ranks": comm.size, "collective": name, "bytes": nbytes,
         "microseconds": _in_turn(comm, name, nbytes)}
        for name in wanted.collectives.split(",") for nbytes in map(int, wanted.sizes.split(","))
    ]  # fmt: skip


def _in_turn(comm: Communicator, name: str, nbytes: int) -> dict[str, float]:
    work = Workload.of(
        name, nbytes, rank=comm.rank, size=comm.size, dtype="float32", op="sum", root=0
    )
    buffers = [work.make() for _ in range(buffers_for(nbytes))]
    source = buffers[0].input.copy()
    calls = [call(comm, name, each) for each in buffers]
    ways: dict[str, int | None] = dict(_numbered(names(name, nbytes, comm.size)))
    times: dict[str, list[float]] = {way: [] for way in ways}

    def turn(way: str, count: int) -> float:
        for each in buffers[:count]:
            np.copyto(each.input, source)
        _core.force_way(ways[way])
        comm.barrier()
        start = time.perf_counter()
        for at in range(count):
            calls[at % len(calls)]()
        took = (time.perf_counter() - start) / count
        _core.force_way(None)
        return float(comm.all_reduce(np.array([took]), "max")[0])

    counts = {way: max(1, min(500, int(ROUND_S / turn(way, WARM_UPS)))) for way in ways}
    for _ in range(ROUNDS):
        for way, count in counts.items():
            times[way].append(turn(way, count))
    return {way: round(statistics.median(took) * 1e6, 1) for way, took in times.items()}


def _numbered(ways: list[str]) -> Iterator[tuple[str, int | None]]:
    yield from zip(ways, range(len(ways)), strict=True)
    yield "as raced", None


def main() -> None:
    """Measure, say it, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--out", type=Path, default=RESULTS / "ways.json")
    wanted = parser.parse_args()
    given = [f" --{word} {getattr(wanted, word)}" for word in ("ranks", "collectives", "sizes")
             if getattr(wanted, word) != parser.get_default(word)]  # fmt: skip
    rows = []
    for size in map(int, wanted.ranks.split(",")):
        for row in rd.run(partial(measured, wanted=wanted), ranks=size)[0]:
            rows.append(row)
            print(row, flush=True)
    result = {
        "command": f"python benchmarks/ways.py{''.join(given)}",
        "python": platform.python_version(),
        "cores": _core.available_cores(),
        "instruction_set": _core.instruction_set(),
        "rows": rows,
    }
    wanted.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
