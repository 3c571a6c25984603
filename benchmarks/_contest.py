"""What the benchmarks of collectives share: ours beside others, written as tables in one file."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from roundelay import _core
from roundelay.bench import CaseResult, PeerVersions, Spec, installed_peers, measure

__all__ = ["ALL_OURS", "OURS", "Asked", "asked", "contest"]

RESULTS = Path(__file__).parent / "results"
OURS = ("roundelay", "arena")  # on ordinary arrays, and on those from `comm.empty`
ALL_OURS = (*OURS, "registered")


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure: on how many ranks, beside whom, and the file for the results."""

    ranks: list[int]
    peers: list[str]
    out: Path
    command: str


def asked(description: str, name: str, *, ranks: str, peers: str = "") -> Asked:
    """Return what the command line asks for, or the usual."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--ranks", default=ranks, help=f"numbers of ranks ({ranks})")
    parser.add_argument("--peers", default=peers, help=f"beside whom ({peers or 'all there are'})")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    options = parser.parse_args()
    wanted = options.peers.split(",") if options.peers else None
    found = [one for one in installed_peers() if wanted is None or one in wanted]
    command = f"python benchmarks/{name}.py"
    for word, usual in (("ranks", ranks), ("peers", peers)):
        given = getattr(options, word)
        command += "" if given == usual else f" --{word} {given}"
    return Asked([int(word) for word in options.ranks.split(",")], found, options.out, command)


def contest(runs: Iterable[tuple[str, Spec]], options: Asked) -> None:
    """Measure every run, say it, and write all of them."""
    tables: dict[str, list[dict[str, object]]] = {}
    versions: dict[str, str] = {}
    for title, spec in runs:
        table = tables[title] = []
        for message in measure(spec):
            if isinstance(message, PeerVersions):
                versions.update(message.versions)
            else:
                table.append(_as_json(message))
                print(f"{title}: {table[-1]}", flush=True)
    result = {
        "command": options.command,
        "python": platform.python_version(),
        "cores": _core.available_cores(),
        "instruction_set": _core.instruction_set(),
        "versions": versions,
        "float32_sum": tables,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _as_json(row: CaseResult) -> dict[str, object]:
    """Return microseconds of every contender, and how ours stand to the best of the others."""
    micro = {name: round(each.seconds * 1e6, 3) for name, each in row.timings.items()}
    others = [micro[name] for name in micro if name not in ALL_OURS]
    ours = [name for name in ALL_OURS if name in micro]
    ratios = {f"best_peer_over_{name}": round(min(others) / micro[name], 2)
              for name in ours if others}  # fmt: skip
    floors = {
        f"floor_percent_{name}": round(100 * row.floor / row.timings[name].seconds, 1)
        for name in ours
        if row.floor is not None
    }
    wrong = sum(each.wrong for each in row.timings.values())
    return {
        "collective": row.collective,
        "bytes": row.nbytes,
        "microseconds": micro,
        **ratios,
        **floors,
        "wrong": wrong,
    }
