"""What the benchmarks of collectives share: ours beside others, written as tables in one file."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from roundelay import _core
from roundelay.bench import CaseResult, PeerVersions, Spec, installed_peers, measure
from roundelay.bench.peer_mpi import MPIS

__all__ = ["ALL_OURS", "OURS", "Asked", "asked", "contest", "together"]

RESULTS = Path(__file__).parent / "results"
OURS = ("roundelay", "arena")  # on ordinary arrays, and on those from `comm.empty`
ALL_OURS = (*OURS, "registered")


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure: on how many ranks, beside whom, and the file for the results."""

    ranks: list[int]
    peers: list[str]
    collectives: list[str]
    sizes: list[int]
    seconds: float
    out: Path
    command: str


def asked(
    description: str,
    name: str,
    *,
    ranks: str,
    collectives: Iterable[str],
    sizes: Iterable[int],
    peers: str = "",
    seconds: float = 0.3,
) -> Asked:
    """Return what the command line asks for, or the usual; says which peers are not here."""
    usual = {
        "ranks": (ranks, "numbers of ranks"),
        "peers": (peers, "beside whom" if peers else "beside whom: all there are"),
        "collectives": (",".join(collectives), "which of them"),
        "sizes": (",".join(map(str, sizes)), "bytes of the whole message"),
        "seconds": (str(seconds), "for each case and contender, roughly"),
    }
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for word, (value, what) in usual.items():
        parser.add_argument(f"--{word}", default=value, help=f"{what} ({value})")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    options = parser.parse_args()
    command = f"python benchmarks/{name}.py"
    for word, (value, _) in usual.items():
        given = getattr(options, word)
        command += "" if given == value else f" --{word} {given}"
    here = installed_peers()
    wanted = options.peers.split(",") if options.peers else here
    for missing in (one for one in wanted if one not in here):
        print(f"{missing} is left out: it is not installed (roundelay bench --against {missing})",
              file=sys.stderr)  # fmt: skip
    return Asked(
        ranks=[int(word) for word in options.ranks.split(",")],
        peers=[one for one in wanted if one in here],
        collectives=options.collectives.split(","),
        sizes=[int(word) for word in options.sizes.split(",")],
        seconds=float(options.seconds),
        out=options.out,
        command=command,
    )


def together(peers: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield who can be measured in one run, with words for a title: a process holds one MPI only.

    The first run has the first MPI and all that are none; without any peer ours run alone.
    """
    given = list(peers)
    mpis = [name for name in MPIS if name in given]
    yield "", tuple(name for name in given if name not in mpis[1:])
    for name in mpis[1:]:
        yield f", beside {name}", (name,)


def contest(runs: Iterable[tuple[str, Spec]], options: Asked) -> None:
    """Measure every run, say it, and write what there is after each; one title may have several."""
    tables: dict[str, list[dict[str, object]]] = {}
    versions: dict[str, str] = {}
    for title, spec in runs:
        table = tables.setdefault(title, [])
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
