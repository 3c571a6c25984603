"""Tables inside written pages, between `<!-- generated: name -->` and `<!-- end -->`."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path

import ahead
import experts
import frameworks
import habits
import peers
import speed
import steps
import traces

from roundelay import _core
from roundelay.cli._choose import algorithms_of
from roundelay.collectives import collectives

__all__ = ["REGIONS"]

ROOT = Path(__file__).parent.parent
NATIVE = ROOT / "native"
PACKAGE = ROOT / "src" / "roundelay"
COMPARED = ROOT / "benchmarks/results/compare_strategies.json"
COMMAND = f"python examples/compare_strategies.py --steps 50 --json {COMPARED.relative_to(ROOT)}"


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
    worlds = [_core.World.create(size, arena=0) for size in sizes]
    taken = [f"{os.fstat(world.fd).st_blocks * 512 / 2**20:.1f} MiB" for world in worlds]
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
        files, _ = said.setdefault(path.stem, ([], words.lstrip("/# ")))
        files.append(path.name)
    lines += [f"| `{'`, `'.join(files)}` | {words} |" for files, words in said.values()]
    return "".join(f"{line}\n" for line in lines)


def rooms_table() -> str:
    """Return the packages of the library, each with the first sentence of its docstring."""
    lines = ["| room | what it is |", "|---|---|"]
    for file in sorted(PACKAGE.rglob("__init__.py")):
        room = file.parent.relative_to(PACKAGE)
        if room.parts:
            words = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split(
                "\n"
            )[0]
            lines.append(f"| `{room.as_posix()}/` | {words} |")
    return "".join(f"{line}\n" for line in lines)


def strategies_table() -> str:
    """Return what examples/compare_strategies.py has measured."""
    found = json.loads(COMPARED.read_text(encoding="utf-8"))
    lines = [
        "| strategy | loss | bytes held | bytes sent per step |",
        "|---|---:|---:|---:|",
    ]
    for row in found["rows"]:
        held, sent = ("{:,.0f} / {:,.0f}".format(*row[word]) for word in ("held", "sent"))
        lines.append(f"| `{row['strategy']}` | {row['loss']:.3f} | {held} | {sent} |")
    ranks, steps = found["ranks"], found["steps"]
    told = (
        f"A {found['size']} GPT on {ranks} ranks, {steps} steps of AdamW; bytes are predicted / "
        f"measured, of the rank that has most, with buckets of 64 KiB: `{COMMAND}`."
    )
    lines += ["", told]
    return "".join(f"{line}\n" for line in lines)


REGIONS: dict[str, Callable[[], str]] = {
    "algorithms": short_table,
    "memory": memory_table,
    "native": native_table,
    "rooms": rooms_table,
    "speed": speed.two_ranks,
    "strategies": strategies_table,
    "all_reduce": speed.all_reduce,
    "call_cost": speed.call_cost,
    "ways": speed.ways,
    "collectives": ahead.ahead,
    "horovod": speed.horovod,
    "many_ranks": speed.many_ranks,
    "start_up": speed.start_up,
    "two_hosts": speed.two_hosts,
    "expert_parallel": experts.speed_table,
    "ddp": steps.ddp,
    "zero": steps.zero,
    "tensor_parallel": steps.tensor_parallel,
    "trace_cost": traces.trace_cost,
    "gpu": steps.gpu,
    "may_do": habits.may_do,
    "fuzz": habits.fuzz,
    "peers": peers.peers,
    "frameworks": frameworks.frameworks,
    "import_cost": frameworks.import_cost,
}
