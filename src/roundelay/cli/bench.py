"""`roundelay bench`: how fast collectives are here, beside memory and other libraries."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Literal

import click
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from roundelay import __version__, _core
from roundelay.bench import Case, CaseResult, Spec
from roundelay.bench.messages import ARENA, OURS, PEERS
from roundelay.bench.report import Comparison, document, lines
from roundelay.bench.workload import check_reduction
from roundelay.cli import _choose as choose
from roundelay.cli._bench_run import run_all, save_fit, tune
from roundelay.cli._tables import empty_table, print_table
from roundelay.cli._types import MOST_WIDTH, NBYTES, console_for, glyphs_option, json_option
from roundelay.errors import InvalidArgumentError, UnknownNameError, rank_count
from roundelay.launch.local import engine_called
from roundelay.reductions import DTYPES
from roundelay.view.chart import Axis, chart
from roundelay.view.terminal_text import Glyphs, nbytes_text, seconds_text, three_digits

__all__ = ["command"]

MOST_RANKS = 256
PLAIN_DTYPES = [name for name in DTYPES if name != "bfloat16"]  # which numpy lacks


@click.command("bench")
@click.argument("collective", required=False)
@click.option("-n", "--size", type=int, default=2, show_default=True, help="How many ranks.")
@click.option("--engine", default="shared_memory", show_default=True, help="How ranks are started.")
@click.option("-b", "first", type=NBYTES, default="8", show_default=True, help="Fewest bytes.")
@click.option("-e", "last", type=NBYTES, default="64MiB", show_default=True, help="Most bytes.")
@click.option("-f", "factor", type=int, default=8, show_default=True, help="From row to row.")
@click.option(
    "--dtype", type=click.Choice(PLAIN_DTYPES), default="float32", show_default=True, metavar="TYPE"
)
@click.option("--op", default="sum", show_default=True, help="The reduction.")
@click.option("--algorithm", help="This one, instead of the one that is chosen by itself.")
@click.option("--arena", is_flag=True, help="On buffers from comm.empty(), which need no copy.")
@click.option(
    "--against", metavar="PEERS", help="Take turns with gloo, deepspeed, one of mpi, mpich, intel."
)
@click.option("--iterations", type=int, help="Calls per row; as time allows.")
@click.option("--plot", "drawing", type=click.Path(path_type=Path), help="Write an SVG, too.")
@click.option("--fit", "fitting", is_flag=True, help="Save this host's network, for `plan`.")
@click.option("--tune", "tuning", is_flag=True, help="Choose algorithms for this host, and save.")
@glyphs_option
@json_option
def command(
    *,
    collective: str | None,
    size: int,
    engine: str,
    first: int,
    last: int,
    factor: int,
    dtype: str,
    op: str,
    algorithm: str | None,
    arena: bool,
    against: str | None,
    iterations: int | None,
    drawing: Path | None,
    tuning: bool,
    fitting: bool,
    glyphs: Glyphs,
    as_json: bool,
) -> None:
    """Measure a collective, all_reduce by default, for rising numbers of bytes.

    Times are medians over many rounds on buffers that rotate and are rewritten; peers take turns
    with us, round by round. All results are checked. The floor, which takes its turn too, is the
    time in which our own kernel reads and writes that much memory in place on all ranks at once.

    With --tune the algorithms of the collective, or of all, are measured against one another, and
    the fastest are written to the table that every later run reads. With --fit latency, bandwidth
    and speed of folding are fitted to the rows, and saved as the network `host`, which --network
    then takes wherever it is an option.
    """
    named = None if collective is None else choose.collective_called(collective).name
    _check(size, first, last, factor, iterations, drawing)
    if fitting and (named not in (None, "all_reduce") or tuning or algorithm or arena):
        raise InvalidArgumentError(
            "--fit measures all_reduce as it is: leave out --tune, --algorithm, --arena and other "
            "collectives."
        )
    engine_called(engine, "start")
    if tuning:
        return tune(named, size, _sizes(first, last, factor), engine=engine)
    name = named or "all_reduce"
    check_reduction(name, op, dtype)
    spec = Spec(
        size=size,
        cases=tuple(Case(name, n) for n in _sizes(first, last, factor)[: _rows_of(name)]),
        contenders=(_ours(name, algorithm, arena=arena), *_peers(against)),
        engine=engine,
        dtype=dtype,
        op=op,
        iterations=iterations or 0,  # which is: as time allows
    )
    rows, versions = run_all([spec], "Measuring")
    if drawing is not None:
        _draw(drawing, rows, f"{name} on {rank_count(size)}, {dtype}")
    if fitting:
        save_fit(spec, rows)
    if as_json:
        click.echo(json.dumps({**_machine(), **document(spec, rows, versions)}, indent=1))
    else:
        _print(spec, rows, versions, glyphs)
    _end(rows)
    return None


def _check(
    size: int, first: int, last: int, factor: int, iterations: int | None, drawing: Path | None
) -> None:
    if not 1 <= size <= MOST_RANKS:
        raise InvalidArgumentError(f"-n {size}: take 1 to {MOST_RANKS} ranks.")
    if first > last:
        raise InvalidArgumentError(f"-b {first} is more than -e {last}; turn them round.")
    if factor < 2:  # noqa: PLR2004 - said in the message
        raise InvalidArgumentError(f"-f {factor}: bytes grow by a factor of 2 or more.")
    if iterations is not None and iterations < 1:
        raise InvalidArgumentError(f"--iterations {iterations}: take 1 or more.")
    if drawing is not None and (drawing.suffix != ".svg" or not drawing.parent.is_dir()):
        raise InvalidArgumentError(
            f"--plot {drawing}: name a file that ends in .svg, in a folder that is there."
        )


def _sizes(first: int, last: int, factor: int) -> list[int]:
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return sizes


def _rows_of(collective: str) -> int | None:
    return 1 if collective == "barrier" else None  # a barrier has no bytes to vary


def _ours(collective: str, algorithm: str | None, *, arena: bool) -> str:
    if algorithm is None:
        return ARENA if arena else OURS
    if arena:
        raise InvalidArgumentError("Take --algorithm or --arena, not both.")
    return choose.algorithm_of(choose.collective_called(collective), algorithm).name


def _peers(against: str | None) -> list[str]:
    peers = [name.strip() for name in against.split(",")] if against is not None else []
    for name in peers:
        if name not in PEERS:
            raise UnknownNameError("--against", name, PEERS)
    return list(dict.fromkeys(peers))


def _machine() -> dict[str, object]:
    return {
        "roundelay": __version__,
        "python": platform.python_version(),
        "instruction_set": _core.instruction_set(),
        "cores": _core.available_cores(),
        "machine": f"{platform.system()} {platform.machine()}",
        "kernel": os.uname().release,
    }


def _draw(path: Path, rows: list[CaseResult], title: str) -> None:
    try:
        path.write_text(_plot(rows, title), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"--plot {path}: can't write ({error.strerror}).") from error
    click.echo(f"Wrote {path}.", err=True)


def _plot(rows: list[CaseResult], title: str) -> str:
    """Return an SVG of time over bytes; rows without bytes, as a barrier's, are left out."""
    rows = [row for row in rows if row.nbytes]
    names = dict.fromkeys(name for row in rows for name in row.timings)
    curves: dict[str, list[tuple[float, float]]] = {
        name: [(row.nbytes, row.timings[name].seconds) for row in rows if name in row.timings]
        for name in names
    }
    curves["memory floor"] = [(row.nbytes, row.floor) for row in rows if row.floor]
    return chart(
        curves,
        title=title,
        across=Axis("bytes of the largest buffer of a rank", base=2, every=3, text=nbytes_text),
        up=Axis("time of one call", base=10, text=seconds_text),
    )


def _print(spec: Spec, rows: list[CaseResult], versions: dict[str, str], glyphs: Glyphs) -> None:
    table = _table(spec, rows, glyphs, brief=False)
    console = console_for(fit=table)
    room = console.options.update(width=MOST_WIDTH)
    if console.width < Measurement.get(console, room, table).maximum:
        table = _table(spec, rows, glyphs, brief=True)
    print_table(console, table, glyphs)
    where = f"{spec.engine}, arena" if spec.contenders[0] == ARENA else spec.engine
    beside = "".join(f", {name}: {version}" for name, version in versions.items())
    console.print(
        f"{spec.cases[0].collective} on {rank_count(spec.size)} ({where}), {spec.dtype}, "
        f"{_core.available_cores()} cores{beside}. algbw and busbw in GB/s; floor: the share of "
        f"the memory-bandwidth limit; ratio: our speed-up over the peer."
    )


def _table(spec: Spec, rows: list[CaseResult], glyphs: Glyphs, *, brief: bool) -> Table:
    """Return all columns, or in brief those that change from row to row."""
    unit = f"({glyphs.micro}s)"
    details = [] if brief else ["count", "type", "redop", "root"]
    speeds = ["busbw"] if brief else ["algbw", "busbw"]
    names = ["size", *details, f"time {unit}", *speeds, "#wrong", "floor"]
    names += [each for peer in spec.contenders[1:] for each in (f"{peer} {unit}", "ratio")]
    table = empty_table(glyphs)
    for name in names:
        side: Literal["left", "right"] = "left" if name in ("type", "redop") else "right"
        table.add_column(name, justify=side, no_wrap=not brief, overflow="fold")
    for line in lines(spec, rows):
        shown = [] if brief else _details(spec, line)
        table.add_row(
            str(line.row.nbytes), *shown, *_figures(line, brief=brief), *_beside(spec, line)
        )
    return table


def _details(spec: Spec, line: Comparison) -> list[str]:
    contract = choose.collective_called(line.row.collective)
    op = spec.op if choose.adds_up(contract) else "none"
    root = spec.root if contract.rooted else -1
    return [str(line.row.count), spec.dtype, op, str(root)]


def _figures(line: Comparison, *, brief: bool) -> list[str | Text]:
    return [
        three_digits(line.timing.seconds * 1e6),
        *([] if brief else [f"{line.alg_bw:.2f}"]),
        f"{line.bus_bw:.2f}",
        Text(str(line.timing.wrong), style="bold red" if line.timing.wrong else ""),
        "-" if line.floor_percent is None else f"{line.floor_percent:.0f} %",
    ]


def _beside(spec: Spec, line: Comparison) -> list[str | Text]:
    cells: list[str | Text] = []
    for peer in spec.contenders[1:]:
        if peer not in line.peers:
            cells += ["-", "-"]
            continue
        ratio = line.ratio(peer)
        style = "green" if ratio >= 1 else "yellow"
        cells += [
            three_digits(line.peers[peer].seconds * 1e6),
            Text(f"{three_digits(ratio)}x", style=style),
        ]
    return cells


def _end(rows: list[CaseResult]) -> None:
    """End with 1 when any result was wrong: a fast wrong number is no result."""
    wrong = {name for row in rows for name, timing in row.timings.items() if timing.wrong}
    if wrong:
        click.echo(f"Wrong results from {', '.join(sorted(wrong))}.", err=True)
        raise click.exceptions.Exit(1)
