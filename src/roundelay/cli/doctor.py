"""`roundelay doctor`: is this host fit for ranks, and what to do where it is not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import click
from rich.text import Text

from roundelay import __version__
from roundelay.cli._doctor_environment import Finding, environment_findings, python_finding
from roundelay.cli._tables import empty_table
from roundelay.cli._types import console_for, glyphs_option, json_option
from roundelay.errors import InvalidArgumentError, NoEngineError
from roundelay.view.terminal_text import ASCII, Glyphs, safe

__all__ = ["command"]

MOST_RANKS = 256
STYLES = {"ok": "green", "absent": "dim", "warning": "yellow", "failed": "bold red"}


@click.command("doctor")
@click.option("-n", "--size", type=int, default=2, show_default=True, help="For how many ranks.")
@click.option("--clean", is_flag=True, help="Remove what dead jobs of yours left behind.")
@click.option("--paste", is_flag=True, help="Plain text, to paste into a report.")
@glyphs_option
@json_option
def command(*, size: int, clean: bool, paste: bool, glyphs: Glyphs, as_json: bool) -> None:
    """Check this host, with a cure for everything that is in the way.

    Ends with 0 when ranks can run here, warnings or not, and with 1 when they can't. Nothing is
    shown of the environment but what launchers set.
    """
    if not 1 <= size <= MOST_RANKS:
        raise InvalidArgumentError(f"-n {size}: take 1 to {MOST_RANKS} ranks.")
    findings = list(_findings(size, clean=clean))
    usable = all(finding.mark != "failed" for finding in findings)
    if as_json:
        found = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"usable": usable, "findings": found}, indent=1))
    elif paste:
        _paste(findings)
    else:
        _print(findings, glyphs)
        click.echo(_verdict(findings, usable=usable))
    if not usable:
        raise click.exceptions.Exit(1)


def _findings(size: int, *, clean: bool) -> Iterator[Finding]:
    yield python_finding()
    try:
        from roundelay import _core  # noqa: F401, PLC0415 - before what Linux alone has
        from roundelay.cli._doctor_host import host_findings  # noqa: PLC0415
    except NoEngineError as error:
        yield Finding("failed", "native core", "not there", str(error))
    else:
        yield from host_findings(size)
    yield from environment_findings(os.environ, size=size, clean=clean)


def _print(findings: Sequence[Finding], glyphs: Glyphs) -> None:
    failed = "x" if glyphs is ASCII else glyphs.failed
    marks = {"ok": glyphs.done, "absent": "-", "warning": "!", "failed": failed}
    table = empty_table(glyphs)
    table.add_column("", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        said = Text(safe(finding.said, glyphs))
        if finding.cure:
            said.append(f"\n{glyphs.arrow} {safe(finding.cure, glyphs)}", STYLES[finding.mark])
        table.add_row(Text(marks[finding.mark], STYLES[finding.mark]), finding.name, said)
    console_for().print(table)


def _paste(findings: Sequence[Finding]) -> None:
    click.echo(f"roundelay {__version__}")
    for finding in findings:
        cure = f" -> {safe(finding.cure, ASCII)}" if finding.cure else ""
        click.echo(f"[{finding.mark}] {finding.name}: {safe(finding.said, ASCII)}{cure}")


def _verdict(findings: Sequence[Finding], *, usable: bool) -> str:
    warnings = sum(finding.mark == "warning" for finding in findings)
    if not usable:
        return "Ranks can't run here yet; see the cures above."
    return f"Ranks can run here; {warnings} to look at." if warnings else "Ranks can run here."
