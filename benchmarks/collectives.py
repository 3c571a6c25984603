"""How fast are the other collectives from Python? Beside MPI, in the same processes and rounds.

Two and four ranks, float32; ours on private arrays and on those from `comm.empty`. Without MPI ours
are measured alone. Writes results/collectives.json.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

from roundelay import _core
from roundelay.bench import Case, Head, Row, Spec, installed_peers, measure
from roundelay.collectives import collectives

RESULTS = Path(__file__).parent / "results"
SIZES = (8, 64 << 10, 1 << 20, 8 << 20)
RANKS = (2, 4)
OURS = ("roundelay", "arena")


def cases() -> tuple[Case, ...]:
    """Return every collective but all_reduce, which has a benchmark of its own."""
    return tuple(
        Case(name, nbytes)
        for name in collectives.names()
        if name != "all_reduce"
        for nbytes in (SIZES if name != "barrier" else (0,))
    )


def as_json(row: Row) -> dict[str, object]:
    """Return microseconds of all, and how many times longer MPI takes than each of ours."""
    micro = {name: round(each.seconds * 1e6, 3) for name, each in row.timings.items()}
    found: dict[str, object] = {
        "collective": row.collective,
        "bytes": row.nbytes,
        "microseconds": micro,
        "wrong": sum(each.wrong for each in row.timings.values()),
    }
    if "mpi" in micro:
        for ours in OURS:
            found[f"mpi_over_{ours}"] = round(micro["mpi"] / micro[ours], 2)
    return found


def main() -> None:
    """Measure, write the result and say it."""
    contenders = (*OURS, *(name for name in installed_peers() if name == "mpi"))
    tables: dict[str, list[dict[str, object]]] = {}
    versions: dict[str, str] = {}
    for size in RANKS:
        table = tables[f"{size} ranks"] = []
        for message in measure(Spec(size=size, cases=cases(), contenders=contenders, floor=False)):
            if isinstance(message, Head):
                versions.update(message.versions)
            else:
                table.append(as_json(message))
                print(f"{size} ranks: {table[-1]}", flush=True)
    result = {
        "command": "python benchmarks/collectives.py",
        "python": platform.python_version(),
        "cores": _core.available_cores(),
        "instruction_set": _core.instruction_set(),
        "versions": versions,
        "float32_sum": tables,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "collectives.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
