"""`roundelay demo`: ranks at work on this host in a few seconds, or broken on purpose."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence

import click
import msgspec
from rich.text import Text

from roundelay.bench import Case, CaseResult, Spec
from roundelay.cli._bench_run import run_all
from roundelay.cli._faults import BrokenRun, break_run
from roundelay.cli._leftovers import left_behind, traces
from roundelay.cli._small_host import Shown
from roundelay.cli._tables import empty_table, print_table
from roundelay.cli._types import console_for, glyphs_option, json_option
from roundelay.errors import InvalidArgumentError, RoundelayError
from roundelay.view.terminal_text import Glyphs, nbytes_text, safe, seconds_text

__all__ = ["command"]

RANKS = 4
CASES = (
    *(Case("all_reduce", nbytes) for nbytes in (8, 64 << 10, 8 << 20)),
    *(Case(name, 1 << 20) for name in ("broadcast", "all_gather", "reduce_scatter", "all_to_all")),
)
SECONDS_PER_CASE = 0.1
FAULTS = {
    "kill": "SIGKILL for rank 2 in the midst of an all_reduce",
    "stop": "SIGSTOP for rank 2 in the midst of an all_reduce, SIGCONT after the others gave up",
    "mismatch": "rank 2 calls barrier where the others call all_reduce",
    "shm-full": "no room in /dev/shm, and no room at all",
}

_read = msgspec.json.Decoder(Shown).decode


@click.command("demo")
@click.option("--fault", type=click.Choice([*FAULTS]), help="Break a run, and see what it says.")
@click.option(
    "--timeout", type=float, default=6.0, show_default=True, help="Seconds, for --fault stop."
)
@glyphs_option
@json_option
def command(*, fault: str | None, timeout: float, glyphs: Glyphs, as_json: bool) -> None:
    """Start four processes, let them communicate, and check every result against numpy.

    With --fault the run is broken on purpose: you see the error that every rank gets, how long it
    took, and what was left behind.
    """
    if not 0 < timeout < math.inf:  # the fault lasts for as long
        raise InvalidArgumentError(
            f"--timeout {timeout:g}: take a positive number of seconds, and a finite one."
        )
    if fault is None:
        return _work(glyphs, as_json=as_json)
    if not as_json:
        click.echo(f"{RANKS} processes; {FAULTS[fault]}.", err=True)
    if fault == "shm-full":
        return _without_room(as_json=as_json, glyphs=glyphs)
    broken = break_run(fault, RANKS, timeout=timeout)
    if as_json:
        click.echo(json.dumps(_as_json(fault, broken), indent=1))
    else:
        _tell(broken, glyphs)
    return _end(broken, expected=RANKS - (fault == "kill"))


def _work(glyphs: Glyphs, *, as_json: bool) -> None:
    spec = Spec(size=RANKS, cases=CASES, seconds=SECONDS_PER_CASE, floor=False)
    rows, _ = run_all([spec], "Working")
    if as_json:
        click.echo(json.dumps([_row_as_json(row) for row in rows], indent=1))
    else:
        _show(rows, glyphs)
        click.echo(
            "see it: roundelay explain all_reduce --algorithm two_shot -n 4\n"
            "break it: roundelay demo --fault kill",
        )
    if any(timing.wrong for row in rows for timing in row.timings.values()):
        raise RoundelayError(
            "Some results differ from numpy's. `roundelay doctor` checks the host."
        )


def _show(rows: Sequence[CaseResult], glyphs: Glyphs) -> None:
    table = empty_table(glyphs)
    table.add_column("collective", no_wrap=True)
    for name in ("buffer", "time", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("as numpy says", no_wrap=True)
    for row in rows:
        timing = row.timings["roundelay"]
        right = Text(glyphs.done, style="green")
        table.add_row(
            row.collective,
            nbytes_text(row.nbytes),
            seconds_text(timing.seconds, glyphs),
            f"{row.nbytes / timing.seconds / 1e9:.2f}",
            Text(f"{glyphs.failed} {timing.wrong} differ", style="red") if timing.wrong else right,
        )
    console = console_for(fit=table)
    console.print(f"{RANKS} processes on this host, float32:")
    print_table(console, table, glyphs)


def _row_as_json(row: CaseResult) -> dict[str, object]:
    timing = row.timings["roundelay"]
    return {
        "collective": row.collective,
        "bytes": row.nbytes,
        "seconds": timing.seconds,
        "wrong": timing.wrong,
    }


def _tell(broken: BrokenRun, glyphs: Glyphs) -> None:
    same: dict[tuple[str, str], list[int]] = {}
    for error in broken.errors:
        same.setdefault((error.kind, error.message), []).append(error.rank)
    for (kind, message), ranks in same.items():
        word = "rank" if len(ranks) == 1 else "ranks"
        click.echo(f"\n{word} {', '.join(map(str, ranks))}: {kind}:")
        for line in message.splitlines():
            click.echo(f"  {safe(line, glyphs)}")
    took = seconds_text(broken.seconds(), glyphs)
    click.echo(f"\n{took} from the fault to the last clean error.")
    _tell_left(broken.left, glyphs)


def _tell_left(left: dict[str, list[str]], glyphs: Glyphs) -> None:
    click.echo("Left behind:")
    for kind, found in left.items():
        click.echo(f"  {kind}: {safe(', '.join(found), glyphs) or 'none'}")


def _as_json(fault: str, broken: BrokenRun) -> dict[str, object]:
    return {
        "fault": fault,
        "seconds": broken.seconds(),
        "errors": [
            {"rank": error.rank, "error": error.kind, "message": error.message,
             "seconds": error.at - broken.at}
            for error in broken.errors
        ],
        "left_behind": broken.left,
    }  # fmt: skip


def _end(broken: BrokenRun, *, expected: int) -> None:
    """End with 1 when a rank got no clean error, or something was left behind."""
    if len(broken.errors) < expected:
        raise RoundelayError(f"Only {len(broken.errors)} of {expected} ranks got a clean error.")
    left = [name for names in broken.left.values() for name in names]
    if left:
        raise RoundelayError(f"This was left behind: {', '.join(left)}.")


def _without_room(*, as_json: bool, glyphs: Glyphs) -> None:
    before = traces()
    done = subprocess.run(
        [sys.executable, "-m", "roundelay.cli._small_host"],
        stdout=subprocess.PIPE,
        check=False,
    )
    shown = [_read(line) for line in done.stdout.splitlines()]
    left = left_behind(before)
    if as_json:
        tries = [msgspec.to_builtins(each) for each in shown]
        click.echo(json.dumps({"fault": "shm-full", "tries": tries, "left_behind": left}, indent=1))
    else:
        click.echo("Ranks share a memfd: memory without a name, which needs no /dev/shm.")
        for each in shown:
            click.echo(f"\n{each.what}:")
            click.echo(f"  {each.error}{': ' * bool(each.error)}{safe(each.said, glyphs)}")
        click.echo()
        _tell_left(left, glyphs)
    if done.returncode != 0:
        raise RoundelayError(
            f"A process ended with exit code {done.returncode}, not with an error."
        )
