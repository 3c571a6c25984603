"""Tables inside written pages, between `<!-- generated: name -->` and `<!-- end -->`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import speed

from roundelay import _core
from roundelay.cli._choose import algorithms_of
from roundelay.collectives import collectives

__all__ = ["REGIONS"]

NATIVE = Path(__file__).parent.parent / "native"


def short_table() -> str:
    """Return the README's table: which algorithms each collective has."""
    rows = [
        f"| [{each.name}](docs/algorithms.md#{each.name}) "
        f"| {', '.join(algorithm.short_name for algorithm in algorithms_of(each))} |\n"
        for each in collectives
    ]
    return "| collective | algorithms |\n|---|---|\n" + "".join(rows)


def memory_table() -> str:
    """Return what the shared memory of a job takes, for some numbers of ranks."""
    sizes = (2, 4, 8, 16, 64, 256)
    taken = [f"{_core.World.create(size, arena=0).used / 2**20:.1f} MiB" for size in sizes]
    return (
        f"| ranks | {' | '.join(map(str, sizes))} |\n"
        f"|---|{'---:|' * len(sizes)}\n"
        f"| memory | {' | '.join(taken)} |\n"
    )


def native_table() -> str:
    """Return the files of the native core, in their own words."""
    lines = ["| file | what it is |", "|---|---|"]
    said: dict[str, tuple[list[str], str]] = {}
    # A header speaks for the file that goes with it.
    for path in sorted(NATIVE.iterdir(), key=lambda path: (path.stem, path.suffix != ".hpp")):
        words = path.read_text(encoding="utf-8").partition("\n")[0]
        files, _ = said.setdefault(path.stem, ([], words.removeprefix("// ")))
        files.append(path.name)
    lines += [f"| `{'`, `'.join(files)}` | {words} |" for files, words in said.values()]
    return "".join(f"{line}\n" for line in lines)


REGIONS: dict[str, Callable[[], str]] = {
    "algorithms": short_table,
    "memory": memory_table,
    "native": native_table,
    "speed": speed.two_ranks,
    "all_reduce": speed.all_reduce,
    "collectives": speed.collectives,
}
