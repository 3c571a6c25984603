"""Tables of results, and how amounts stand in them."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from roundelay.cli._types import MOST_WIDTH
from roundelay.schedule import Price
from roundelay.view import Picture
from roundelay.view.terminal_text import ASCII, UNICODE, Glyphs, nbytes_text, safe, seconds_text


def empty_table(glyphs: Glyphs) -> Table:
    """Return an empty table in the house's look."""
    lines = box.ASCII2 if glyphs is ASCII else box.ROUNDED
    return Table(box=lines, border_style="dim", header_style="bold")


def print_table(console: Console, table: Table, glyphs: Glyphs) -> None:
    """Print a table; where it has no room, every row as a name and what is known of it."""
    room = Measurement.get(console, console.options.update(width=MOST_WIDTH), table)
    rigid = all(column.no_wrap for column in table.columns)
    if console.width >= (room.maximum if rigid else room.minimum):
        console.print(table)
        return
    named = next(number for number, column in enumerate(table.columns) if column.header)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        facts = zip(table.columns[named + 1 :], row[named + 1 :], strict=True)
        known = [f"{column.header} {cell}" for column, cell in facts if str(cell) not in ("", "-")]
        console.print(Text(" ".join(map(str, row[: named + 1])), style="bold"))
        if known:
            console.print(Padding(Text(glyphs.dot.join(known)), (0, 0, 0, 4)))


def sent_text(price: Price) -> str:
    """Say what the busiest rank sends, also as a multiple of the buffer S."""
    most = max(price.sent)
    return f"{nbytes_text(most)} = {most / price.nbytes:.3g} S" if most else "0"


def outputs(
    ranks: Sequence[str], texts: Sequence[str], *, rank_name: str, ascii_only: bool
) -> Table:
    """Show what every rank gets back."""
    glyphs = ASCII if ascii_only else UNICODE
    table = empty_table(glyphs)
    table.add_column(safe(rank_name, glyphs), no_wrap=True)
    table.add_column("output", overflow="fold")
    for rank, text in zip(ranks, texts, strict=True):
        table.add_row(safe(rank.removeprefix(rank_name), glyphs), safe(text, glyphs))
    return table


def compare(pictures: Sequence[Picture], orders: Sequence[str], *, ascii_only: bool) -> Table:
    """Put the prices of two schedules beside each other; the lower of two numbers is bold."""
    glyphs = ASCII if ascii_only else UNICODE
    table = empty_table(glyphs)
    table.add_column("")
    for picture in pictures:
        table.add_column(safe(picture.schedule.name, glyphs), justify="right")
    prices = [picture.price for picture in pictures if picture.price is not None]

    def row(label: str, amounts: list[float], texts: list[str]) -> None:
        best = min(amounts) if len(set(amounts)) > 1 else None
        cells = [
            Text(text, style="bold green" if amount == best else "")
            for amount, text in zip(amounts, texts, strict=True)
        ]
        table.add_row(label, *cells)

    steps = [len(price.steps) for price in prices]
    row("steps", [*steps], [*map(str, steps)])
    messages = [price.messages for price in prices]
    row("messages", [*messages], [*map(str, messages)])
    row("a rank sends at most", [max(p.sent) for p in prices], [*map(sent_text, prices)])
    loads = [max(price.links.values(), default=0) for price in prices]
    row("busiest link carries", [*loads], [*map(nbytes_text, loads)])
    seconds = [price.seconds or 0.0 for price in prices]
    where = f"on {safe(prices[0].network or '', glyphs)}"
    row(where, seconds, [seconds_text(each, glyphs) for each in seconds])
    table.add_row("order of addition", *orders)
    return table
