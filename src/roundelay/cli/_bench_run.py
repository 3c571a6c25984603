"""Run measurements with a bar on standard error, and write what they teach."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from roundelay.bench import CaseResult, PeerVersions, Spec, measure
from roundelay.bench.tune import specs, tuned
from roundelay.cli._types import console_on_errors
from roundelay.collectives import collectives
from roundelay.tuning import Tuning, tuning_path
from roundelay.view.terminal_text import nbytes_text

__all__ = ["run_all", "tune"]


def run_all(runs: Sequence[Spec], label: str) -> tuple[list[CaseResult], dict[str, str]]:
    """Return all rows of all runs, and the versions of the peers."""
    rows: list[CaseResult] = []
    versions: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    shown = console_on_errors()
    with Progress(
        *columns, console=shown, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(label, total=sum(len(run.cases) for run in runs))
        for run in runs:
            for message in measure(run):
                if isinstance(message, PeerVersions):
                    versions.update(message.versions)
                else:
                    rows.append(message)
                    told = f"{label} {message.collective} {nbytes_text(message.nbytes)}"
                    progress.update(task, advance=1, description=told)
    return rows, versions


def tune(collective: str | None, size: int, sizes: Sequence[int], *, engine: str) -> None:
    """Measure algorithms against one another; write this host's table, and say what it says."""
    names = collectives.names() if collective is None else [collective]
    runs = list(specs(names, size, sizes, engine=engine))
    rows, _ = run_all(runs, "Tuning")
    path = tuning_path(os.environ)
    try:
        base = Tuning.load(path, size=size)
    except FileNotFoundError:
        base = Tuning()
    made = tuned(rows, base)
    made.save(path, size=size)
    for name in names:
        said = [
            f"{choice.algorithm}" + (f" up to {nbytes_text(choice.up_to)}" if more else "")
            for choice, more in zip(made.table[name], _all_but_last(made, name), strict=True)
        ]
        click.echo(f"{name}: {', then '.join(said)}")
    click.echo(f"Wrote {path}; every run on {size} ranks or more reads it.", err=True)


def _all_but_last(made: Tuning, collective: str) -> list[bool]:
    choices = made.table[collective]
    return [number < len(choices) - 1 for number in range(len(choices))]
