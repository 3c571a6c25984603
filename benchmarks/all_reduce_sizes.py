"""How fast is all-reduce from Python? Beside Gloo and MPI, in the same processes and rounds.

Two and four ranks, float32; once on ordinary arrays and once on arrays from `comm.empty`. Peers
that are not installed are left out. Writes results/all_reduce_sizes.json.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

from roundelay import _core
from roundelay.bench import Case, Head, Row, Spec, installed_peers, measure

RESULTS = Path(__file__).parent / "results"
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
RANKS = (2, 4)
OURS = ("roundelay", "arena")


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


def main() -> None:
    """Measure, write the result and say it."""
    contenders = (*OURS, *installed_peers())
    tables: dict[str, list[dict[str, object]]] = {}
    versions: dict[str, str] = {}
    for size in RANKS:
        cases = tuple(Case("all_reduce", nbytes) for nbytes in SIZES)
        spec = Spec(size=size, cases=cases, contenders=contenders)
        table = tables[f"{size} ranks"] = []
        for message in measure(spec):
            if isinstance(message, Head):
                versions.update(message.versions)
            else:
                table.append(as_json(message))
                print(f"{size} ranks: {table[-1]}", flush=True)
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
