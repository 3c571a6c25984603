"""`roundelay view`: a recorded run: where its time went, who waited for whom, and its timeline."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Callable
from pathlib import Path

import click
from rich.text import Text

from roundelay.cli._tables import empty_table, print_table
from roundelay.cli._types import console_for, glyphs_option, json_option
from roundelay.cli._write import check_place, write_text
from roundelay.errors import InvalidArgumentError
from roundelay.records import RunRecord, read_run
from roundelay.view.flight_recorder import flight_recorder
from roundelay.view.perfetto import perfetto
from roundelay.view.run_lanes import RunWindow, windows
from roundelay.view.run_page import run_page
from roundelay.view.run_summary import RunSummary, summary
from roundelay.view.run_svg import run_style, run_svg
from roundelay.view.terminal_text import Glyphs, number_of, safe, seconds_text

__all__ = ["command"]

PAGE = "timeline.html"
OPENING = {
    ".html": "open it in any browser; it needs no network",
    ".svg": "open it in a browser, or put it in a document",
    ".json": "open it at ui.perfetto.dev, which keeps it on your machine, or in chrome://tracing",
}
EXAMPLES = """\b
Examples:
  roundelay run --trace t train.py       record a run
  roundelay view t                       where its time went
  roundelay view t --open                its timeline, in a browser
  roundelay view t --out t.json          for Perfetto
  roundelay view t --flight-recorder f   for torch's analyzer
"""


@click.command("view", epilog=EXAMPLES)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "-o",
    "--out",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Write FILE.html (a timeline), .svg (one step of it) or .json (for Perfetto).",
)
@click.option("--step", type=int, help="The step to sum up and to draw.  [default: all, the last]")
@click.option(
    "--flight-recorder",
    "recorder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Write what torch's flight recorder would, for torch.distributed.flight_recorder.",
)
@click.option("--open", "opens", is_flag=True, help=f"Write DIR/{PAGE}, and open a browser on it.")
@glyphs_option
@json_option
def command(
    *,
    folder: Path,
    out: tuple[Path, ...],
    step: int | None,
    recorder: Path | None,
    opens: bool,
    glyphs: Glyphs,
    as_json: bool,
) -> None:
    """Sum up the run that was recorded in DIR, and draw it.

    `roundelay run --trace DIR`, or RD_TRACE=DIR, records one. DIR can be looked at while the run
    goes on, and after it was killed.
    """
    for path in out:
        if path.suffix.lower() not in OPENING and not path.is_dir():
            raise InvalidArgumentError(
                f"--out {path}: the name must end in .html (a timeline), .svg (one step of it) or "
                f".json (for Perfetto)."
            )
        check_place(path, example="timeline.html")
    run = read_run(folder)
    window = _window(run, step)
    told = summary(run, None if step is None else window)
    if as_json:
        click.echo(json.dumps(told.as_json(), indent=1))
    else:
        _tell(run, told, glyphs)
    for path in out:
        kind = path.suffix.lower()
        write_text(path, _drawings(run, window, step)[kind](), OPENING[kind])
    if recorder is not None:
        _record(run, recorder)
    if opens:
        page = folder / PAGE
        write_text(page, run_page(run), OPENING[".html"])
        webbrowser.open(page.absolute().as_uri())


def _drawings(run: RunRecord, window: RunWindow, step: int | None) -> dict[str, Callable[[], str]]:
    shown = None if step is None else [window]
    return {
        ".html": lambda: run_page(run, shown),
        ".svg": lambda: run_svg(run, window, style=run_style()),
        ".json": lambda: perfetto(run),
    }


def _window(run: RunRecord, step: int | None) -> RunWindow:
    """Return the step that was asked for, or the last one."""
    every = windows(run, every=True)
    if step is None:
        return every[-1]
    found = [window for window in every if window.key == f"step-{step}"]
    if not found:
        known = [window.name for window in every]
        span = known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
        raise InvalidArgumentError(f"--step {step} is not in this record, which has {span}.")
    return found[0]


def _record(run: RunRecord, folder: Path) -> None:
    try:
        paths = flight_recorder(run, folder)
    except OSError as error:
        raise InvalidArgumentError(
            f"--flight-recorder {folder}: can't write ({error.strerror or error})."
        ) from error
    click.echo(
        f"Wrote {number_of(len(paths), 'file')} to {folder}: read them with python -m "
        f"torch.distributed.flight_recorder.fr_trace {folder}",
        err=True,
    )


def _tell(run: RunRecord, told: RunSummary, glyphs: Glyphs) -> None:
    table = empty_table(glyphs)
    table.add_column("rank", justify="right", no_wrap=True)
    kinds = [kind for kind in ("forward", "backward", "exchange", "gather", "step", "checkpoint")
             if any(kind in one.phases for one in told.ranks)]  # fmt: skip
    for name in (*kinds, "calls", "in calls", "waited", "most for", "background", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    late = told.straggler
    for one in told.ranks:
        whom = max(one.waited_for, key=lambda rank: one.waited_for[rank], default=None)
        marked = late is not None and late[0] == one.rank
        table.add_row(
            Text(str(one.rank), style="bold red" if marked else ""),
            *(_time(one.phases.get(kind, 0), glyphs) for kind in kinds),
            str(one.calls),
            _time(one.in_calls, glyphs),
            _time(one.waited, glyphs),
            "-" if whom is None else f"rank {whom}",
            _time(one.background, glyphs),
            "-" if one.overlap is None else f"{100 * one.overlap:.0f} %",
        )
    console = console_for(fit=table)
    program = safe(run.ranks[0].program.rpartition("/")[2], glyphs)
    length = seconds_text(told.length / 1e9, glyphs)
    steps = f"{glyphs.dot}{number_of(told.steps, 'step')}" if told.steps else ""
    console.print(f"{program}{glyphs.dot}{number_of(run.size, 'rank')}{glyphs.dot}{length}{steps}")
    print_table(console, table, glyphs)
    for line in _remarks(run, told, glyphs):
        console.print(safe(line, glyphs))


def _remarks(run: RunRecord, told: RunSummary, glyphs: Glyphs) -> list[str]:
    lines = []
    if told.straggler is not None:
        rank, total = told.straggler
        lines.append(
            f"Others waited longest for rank {rank}: {seconds_text(total / 1e9, glyphs)} in all."
        )
    lines += [f"Rank {one.rank} was in {one.unfinished} when its record ended."
              for one in told.ranks if one.unfinished]  # fmt: skip
    missing = sorted(set(range(run.size)) - {one.rank for one in run.ranks})
    if missing:
        lines.append(f"Of rank {', '.join(map(str, missing[:8]))} there is no record here.")
    dropped = max(record.dropped for record in run.ranks)
    if dropped:
        lines.append(f"Up to {dropped} earlier events of a rank were overwritten by later ones.")
    if run.left_out:
        lines.append(f"{number_of(len(run.left_out), 'file')} of other jobs were left out.")
    return lines


def _time(ns: int, glyphs: Glyphs) -> str:
    return seconds_text(ns / 1e9, glyphs) if ns else "-"
