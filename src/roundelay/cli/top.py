"""`roundelay top`: a job that runs on this host, live: who is in which call, and waits for whom."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Sequence

import click
from rich.console import Console
from rich.text import Text

from roundelay.algorithms import algorithms
from roundelay.cli._screen import place_lines, resizes, screen
from roundelay.cli._stage import is_interactive
from roundelay.cli._tables import empty_table, print_table
from roundelay.cli._top_table import brief, drawn
from roundelay.cli._types import console_for, glyphs_option, json_option, terminal_size
from roundelay.errors import InvalidArgumentError, OtherVersionError, RoundelayError
from roundelay.live.jobs import LiveJob, find_jobs
from roundelay.live.watch import JobSeen, JobWatch
from roundelay.view.terminal_text import Glyphs, number_of, safe

__all__ = ["command"]

ONCE_S = 0.25  # that --once looks for
QUIT = b"qQ\x04\x1b"
NO_JOB = (
    "No job of yours runs on this host, or none that shares memory: jobs of the engines gloo, mpi "
    "and nccl alone can't be looked at."
)

EXAMPLES = """\b
Examples:
  roundelay top                  the job of yours that runs on this host
  roundelay top 4711             that of process 4711, where there are several
  roundelay top --once --json    for scripts
"""


@click.command("top", epilog=EXAMPLES)
@click.argument("chosen", type=int, required=False, metavar="[JOB]")
@click.option("--once", is_flag=True, help="Look for a moment, print, and end.")
@click.option(
    "--every", type=float, default=1.0, show_default=True, help="Seconds between two tables."
)
@glyphs_option
@json_option
def command(*, chosen: int | None, once: bool, every: float, glyphs: Glyphs, as_json: bool) -> None:
    """Show every rank of a running job: its call, its line, and whom it waits for.

    The job is found by the memory that its ranks share, which is only read: it is not slowed, and
    need not be told beforehand. Only its own user can look. Where several jobs run, they are
    listed, and JOB says which: its number, or that of a process. q or Ctrl-C ends.
    """
    if not 0.05 <= every <= 3600:  # noqa: PLR2004 - a look takes a while, too
        raise InvalidArgumentError(f"--every {every:g}: take 0.05 to 3600 seconds.")
    every_job = find_jobs()
    jobs = [job for job in every_job if chosen in (None, job.number)] or [
        job for job in every_job if chosen in job.pids
    ]
    if chosen is not None and not jobs:
        raise InvalidArgumentError(
            f"{chosen} is no job of yours that runs on this host, nor a process of one. `roundelay "
            f"top` lists them."
        )
    if as_json:
        click.echo(json.dumps({"jobs": [_as_json(job) for job in jobs]}, indent=1))
        return
    if not jobs:
        raise RoundelayError(NO_JOB)
    if len(jobs) > 1:
        _list(jobs, glyphs)
        return
    watch = JobWatch(jobs[0], SHORT_NAMES)
    if once or not is_interactive():
        console = console_for()
        console.print(drawn(watch.for_a_while(ONCE_S), glyphs, console.width))
        return
    _live(watch, every, glyphs)


SHORT_NAMES = tuple(algorithm.short_name for algorithm in algorithms)


def _as_json(job: LiveJob) -> dict[str, object]:
    known = {"job": job.number}
    try:
        return {**known, **JobWatch(job, SHORT_NAMES).for_a_while(ONCE_S).as_json()}
    except RoundelayError as error:  # of another version, or over this moment
        return {**known, "command": job.command, "processes": job.pids, "refused": str(error)}


def _list(jobs: Sequence[LiveJob], glyphs: Glyphs) -> None:
    """List jobs, of which one is to be chosen."""
    table = empty_table(glyphs)
    for name in ("job", "process", "ranks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("command", no_wrap=True)
    for job in jobs:
        try:
            ranks = str(job.world().size)
        except OtherVersionError:
            ranks = "of another version"
        except RoundelayError:
            continue  # over this moment
        table.add_row(str(job.number), str(job.pids[0]), ranks, safe(brief(job.command), glyphs))
    print_table(console_for(fit=table), table, glyphs)
    click.echo(f"{number_of(len(jobs), 'job')}: choose one, as `roundelay top {jobs[0].number}`.")


def _live(watch: JobWatch, every: float, glyphs: Glyphs) -> None:
    """Draw again and again in place; leave the last table behind."""
    console = console_for()
    seen = watch.for_a_while(min(every, ONCE_S))
    try:
        with resizes() as resized, screen(console):
            while not seen.now.over:
                _draw(console, seen, glyphs)
                if _wait(watch, every, resized):
                    break
                seen = watch.seen()
    except KeyboardInterrupt:
        pass
    console.print(drawn(seen, glyphs, console.width))
    if seen.now.over:
        click.echo("The job is over.")


def _wait(watch: JobWatch, seconds: float, resized: int | None) -> bool:
    """Look at the job meanwhile; tell whether to end."""
    until, source = time.monotonic() + seconds, sys.stdin.fileno()
    wanted = [source] if resized is None else [source, resized]
    while time.monotonic() < until:
        ready, _, _ = select.select(wanted, [], [], 0.02)
        if source in ready:
            typed = os.read(source, 1024)
            return not typed or any(key in QUIT for key in typed)
        if resized in ready and resized is not None:
            os.read(resized, 4096)
            return False
        watch.glance()
    return False


def _draw(console: Console, seen: JobSeen, glyphs: Glyphs) -> None:
    console.width, console.height = terminal_size()
    with console.capture() as captured:
        console.print(drawn(seen, glyphs, console.width))
    room = max(1, console.height - 1)
    lines = captured.get().rstrip("\n").split("\n")
    more = len(lines) - room
    shown = lines[:room] + [""] * (room - len(lines[:room]))
    with console.capture() as captured:
        hint = "q quit" + (f"   {more} more lines" if more > 0 else "")
        console.print(Text(hint[: console.width - 1], style="reverse"), end="")
    place_lines(console, [*shown, captured.get()])
