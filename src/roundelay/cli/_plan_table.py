"""A plan in a terminal: the table, the best marked, its reason, and each formula with numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from roundelay.cli._tables import empty_table, print_table
from roundelay.cli._types import MOST_WIDTH, console_for
from roundelay.planning import Planned, Term, TrainingPlan, four_digits, gigabytes, reason, why
from roundelay.view.terminal_text import Glyphs, number_of, safe, seconds_text

BYTES = ("params", "grads", "optim", "activ", "transient")


def print_plan(found: TrainingPlan, shown: Sequence[Sequence[Planned]], glyphs: Glyphs) -> None:
    """Print sections of rows, then what was looked at, and why the best is the best."""
    table = _table(found, shown, glyphs, brief=False)
    console = console_for(fit=table)
    room = console.options.update(width=MOST_WIDTH)
    if console.width < Measurement.get(console, room, table).maximum:
        table = _table(found, shown, glyphs, brief=True)
    print_table(console, table, glyphs)
    for line in _about(found):
        console.print(Text(safe(line, glyphs)))
    said = reason(found)
    if said:
        console.print(Text(f"Best: {safe(said, glyphs)}", style="bold green"))


def _about(found: TrainingPlan) -> list[str]:
    task, model = found.task, found.task.model
    fitting = sum(one.fits for one in found.options)
    precisions = sorted({one.candidate.precision for one in found.options})
    model_line = (
        f"{four_digits(model.params)} parameters, {number_of(model.layers, 'layer')} of width "
        f"{model.hidden}, {number_of(model.heads, 'head')}, {number_of(task.sequence, 'token')} in "
        f"a row; {number_of(task.batch, 'row')} in a step, {', '.join(precisions)}, "
        f"{task.optimizer}."
    )
    where_line = (
        f"{number_of(task.gpus, 'GPU')} of {gigabytes(task.memory)} on {task.cluster.name}, at "
        f"{100 * task.mfu:.3g} % of their peak. {number_of(len(found.options), 'way')}, of which "
        f"{fitting} fit."
    )
    lines = [model_line, where_line]
    if model.note:
        lines.append(f"{model.note[0].upper()}{model.note[1:]}. Say --layers and --hidden.")
    return lines


def _table(
    found: TrainingPlan, shown: Sequence[Sequence[Planned]], glyphs: Glyphs, *, brief: bool
) -> Table:
    table = empty_table(glyphs)
    several = len({one.candidate.precision for one in found.options}) > 1
    words = ["strategy", *["precision"] * several, "mesh", "rows"]
    for name in ("", *words):
        table.add_column(name, no_wrap=True, justify="right" if name == "rows" else "left")
    for name in (*(() if brief else BYTES), "total", "spare", "step", "waits"):
        table.add_column(name, no_wrap=True, justify="right")
    for section in shown:
        for one in section:
            table.add_row(*_cells(found, one, glyphs, brief=brief, several=several),
                          style="bold green" if one is found.best else "")  # fmt: skip
        table.add_section()
    return table


def _cells(
    found: TrainingPlan, one: Planned, glyphs: Glyphs, *, brief: bool, several: bool
) -> list[str | Text]:
    candidate, held = one.candidate, one.bytes.held
    again = "*" if candidate.recompute == "full" else ""
    parts = [held.parameters, held.gradients, held.optimizer, one.bytes.activations,
             one.bytes.transient]  # fmt: skip
    sign = "+" if one.fits else "-"
    return [
        glyphs.changed if one is found.best else "",
        candidate.strategy,
        *[candidate.precision] * several,
        str(candidate.mesh),
        f"{candidate.micro_batch}{again}",
        *([] if brief else map(gigabytes, parts)),
        gigabytes(one.bytes.total),
        Text(f"{sign}{gigabytes(abs(one.spare))}", style="" if one.fits else "red"),
        seconds_text(one.time.total, glyphs),
        f"{100 * one.time.share:.1f} %",
    ]


def print_why(found: TrainingPlan, glyphs: Glyphs) -> None:
    """Print each formula of the best, or of what is nearest, with its numbers."""
    one = found.best or found.nearest
    console = console_for()
    console.print()
    for term in why(found.task, one):
        _print_term(console, term, glyphs)


def _print_term(console: Console, term: Term, glyphs: Glyphs) -> None:
    value = gigabytes(term.value) if term.unit == "bytes" else seconds_text(term.value, glyphs)
    head = Text(f"{term.what}: ", style="bold")
    head.append(safe(f"{value} = {term.formula}", glyphs), style="not bold")
    console.print(head)
    numbers = safe(term.numbers, glyphs)
    if numbers != f"{term.value:.0f}":
        console.print(Padding(Text(f"= {numbers}", style="dim"), (0, 0, 0, 4), expand=False))
