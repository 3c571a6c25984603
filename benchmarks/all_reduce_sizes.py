"""How fast is all-reduce from Python? Beside other libraries, in the same processes and rounds.

Two, four and eight ranks, float32; once on ordinary arrays and once on arrays from `comm.empty`.
Peers that are not installed are left out. A process can hold one MPI only, so MPICH has a run of
its own. DeepSpeed spins, so that it is left out where there are many more ranks than cores. Writes
results/all_reduce_sizes.json.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

from roundelay import _core
from roundelay.bench import Case, Head, Row, Spec, installed_peers, measure

RESULTS = Path(__file__).parent / "results"
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
RANKS = (2, 4, 8)
OURS = ("roundelay", "arena")
SPINS = "deepspeed"
APART = "mpich"


def as_json(row: Row) -> dict[str, object]:
    """Return microseconds of every contender, and how ours stand to the best of the others."""
    micro = {name: round(each.seconds * 1e6, 3) for name, each in row.timings.items()}
    others = [micro[name] for name in micro if name not in OURS]
    ratios = {f"best_peer_over_{name}": round(min(others) / micro[name], 2) for name in OURS}
    floors = {
        f"floor_percent_{name}": round(100 * row.floor / row.timings[name].seconds, 1)
        for name in OURS
        if row.floor is not None
    }
    wrong = sum(each.wrong for each in row.timings.values())
    return {
        "bytes": row.nbytes,
        "microseconds": micro,
        **(ratios if others else {}),
        **floors,
        "wrong": wrong,
    }


def runs() -> Iterator[tuple[str, Spec]]:
    """Yield what is measured in the same processes, with its title."""
    cases = tuple(Case("all_reduce", nbytes) for nbytes in SIZES)
    found = installed_peers()
    for size in RANKS:
        crowded = size > 2 * _core.available_cores()
        peers = [name for name in found if name != APART and not (crowded and name == SPINS)]
        yield f"{size} ranks", Spec(size=size, cases=cases, contenders=(*OURS, *peers))
        if APART in found:
            spec = Spec(size=size, cases=cases, contenders=(*OURS, APART))
            yield f"{size} ranks, beside {APART}", spec


def main() -> None:
    """Measure, write the result and say it."""
    tables: dict[str, list[dict[str, object]]] = {}
    versions: dict[str, str] = {}
    for title, spec in runs():
        table = tables[title] = []
        for message in measure(spec):
            if isinstance(message, Head):
                versions.update(message.versions)
            else:
                table.append(as_json(message))
                print(f"{title}: {table[-1]}", flush=True)
    result = {
        "command": "python benchmarks/all_reduce_sizes.py",
        "python": platform.python_version(),
        "cores": _core.available_cores(),
        "instruction_set": _core.instruction_set(),
        "versions": versions,
        "all_reduce_float32_sum": tables,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "all_reduce_sizes.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
