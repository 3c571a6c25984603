"""What does it cost to start many ranks? Seconds, CPU-seconds and memory, as processes and threads.

Once with a function that does nothing, and once with a small all-reduce, the first call. Memory is
that of all processes together, with what is reserved for them, beyond as many bare forks of the
same Python; and what a rank has for itself, beyond such a fork. Writes results/start_up.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import roundelay as rd
from roundelay import _core
from roundelay.communicator import Communicator

RESULTS = Path(__file__).parent / "results"
RANKS = "2,8,16,32,64,128,256,512"
ENGINES = ("shared_memory", "threads")
ROUNDS = 3
KIB, MIB = 1 << 10, 1 << 20


def nothing(comm: Communicator) -> None:
    """Do nothing."""


def all_reduce(comm: Communicator) -> None:
    """Make a first call."""
    comm.all_reduce(np.ones(4))


def cpu_seconds() -> float:
    """Return what this process and the children that it has reaped have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def timed(work: Callable[[Communicator], None], ranks: int, engine: str) -> tuple[float, float]:
    """Return wall and CPU-seconds of a run, the least of a few."""
    found = []
    for _ in range(ROUNDS):
        wall, cpu = time.perf_counter(), cpu_seconds()
        rd.run(work, ranks, engine)
        found.append((time.perf_counter() - wall, cpu_seconds() - cpu))
    return min(wall for wall, _ in found), min(cpu for _, cpu in found)


def resident(folder: Path, ranks: int) -> tuple[int, int]:
    """Return what this process takes while all are there, but for the shared world.

    Its share of all that it can reach, and what it alone can reach; both in bytes.
    """
    meet(folder / "there", ranks)
    # Read with little Python, which would take memory too.
    file = os.open("/proc/self/smaps_rollup", os.O_RDONLY)
    text = os.read(file, 1 << 16)
    os.close(file)
    meet(folder / "seen", ranks)
    found = {}
    for line in text.decode().splitlines()[1:]:
        name, number, *_ = line.split()
        found[name] = int(number) * KIB
    return found["Pss:"] - found["Pss_Shmem:"], found["Private_Dirty:"]


def meet(place: Path, ranks: int) -> None:
    """Wait until all ranks have come, without a call of ours: each adds a byte to a file."""
    file = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, b".")
    while os.fstat(file).st_size < ranks:
        time.sleep(0.1)
    os.close(file)


def bare_forks(folder: Path, ranks: int) -> tuple[int, int]:
    """Return the memory of as many processes that do the same, and know nothing of one another."""
    ends = []
    for _ in range(ranks):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, json.dumps(resident(folder, ranks)).encode())
            os._exit(0)
        os.close(writer)
        ends.append(reader)
    found = []
    for reader in ends:
        found.append(json.loads(os.read(reader, 64)))
        os.close(reader)
        os.wait()
    return sum(share for share, _ in found), sum(own for _, own in found)


def memory(ranks: int, engine: str) -> tuple[float, float]:
    """Return what ranks take while all are there, beyond what Python takes by itself.

    MiB of all of them, with the world that they share; and KiB that a rank has for itself.
    """
    with tempfile.TemporaryDirectory() as name:
        ours, bare = Path(name, "ours"), Path(name, "bare")
        ours.mkdir()
        bare.mkdir()

        def work(comm: Communicator) -> tuple[int, int, int]:
            world = os.fstat(comm._engine.world.fd).st_blocks * 512  # type: ignore[attr-defined] # noqa: SLF001
            return *resident(ours, ranks), world

        threads = engine == "threads"
        without = resident(bare, 1) if threads else bare_forks(bare, ranks)
        found = rd.run(work, ranks, engine)[: 1 if threads else ranks]
    share, own = (sum(each) for each in list(zip(*found, strict=True))[:2])
    return (share + found[0][2] - without[0]) / MIB, (own - without[1]) / ranks / KIB


def measure(ranks: int, engine: str) -> dict[str, object]:
    """Return one row of the table."""
    row: dict[str, object] = {"ranks": ranks, "engine": engine}
    for work in (nothing, all_reduce):
        wall, cpu = timed(work, ranks, engine)
        row[work.__name__] = {"wall_seconds": round(wall, 3), "cpu_seconds": round(cpu, 3)}
    together, each = memory(ranks, engine)
    row["mebibytes"], row["own_kibibytes"] = round(together, 1), round(each)
    return row


def main() -> None:
    """Measure, write the result and say it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default=RANKS, help=f"numbers of ranks ({RANKS})")
    options = parser.parse_args()
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        for engine in ENGINES:
            rows.append(measure(ranks, engine))
            print(rows[-1], flush=True)
    command = "python benchmarks/start_up.py"
    result = {
        "command": command if options.ranks == RANKS else f"{command} --ranks {options.ranks}",
        "python": platform.python_version(),
        "cores": _core.available_cores(),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "start_up.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
