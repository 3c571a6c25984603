"""`roundelay list`: every algorithm of every collective, with its estimated cost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby

import click
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from roundelay.algorithms import Algorithm, algorithms
from roundelay.cli import _choose as choose
from roundelay.cli._progress import watched
from roundelay.cli._tables import empty_table, print_table, sent_text
from roundelay.cli._types import (
    bytes_option,
    console_for,
    glyphs_option,
    json_option,
    network_option,
)
from roundelay.errors import InvalidArgumentError, ProofError, UnsupportedSizeError, rank_count
from roundelay.schedule import Network, Price, prove
from roundelay.view.terminal_text import Glyphs, nbytes_text, safe, seconds_text

__all__ = ["command"]

#: With less room than this left for the summaries, they are left out.
LEAST_HOW = 20


@dataclass(frozen=True, slots=True)
class AlgorithmRow:
    """One algorithm at one size; `price` is None where it can't be, and `problem` says why."""

    algorithm: Algorithm
    price: Price | None
    order: str | None
    problem: str | None


@click.command("list")
@click.argument("collective", required=False)
@click.option("-n", "--size", type=int, default=8, show_default=True, help="How many ranks.")
@bytes_option
@network_option
@glyphs_option
@json_option
def command(
    *,
    collective: str | None,
    size: int,
    nbytes: int,
    network: str,
    glyphs: Glyphs,
    as_json: bool,
) -> None:
    """List all algorithms with their steps, messages, bytes, order of addition and seconds."""
    wanted = None if collective is None else choose.collective_called(collective)
    chosen = [each for each in algorithms if wanted is None or each.collective is wanted]
    chosen.sort(key=lambda each: (each.collective.name, each.name))
    if size < 1:
        raise InvalidArgumentError(f"-n {size}: there must be at least 1 rank.")
    on = choose.network_called(network, size)
    rows = [_row(each, size, nbytes, on) for each in watched(chosen, "Estimating")]
    if as_json:
        click.echo(json.dumps([_as_json(row, size, nbytes, on) for row in rows], indent=1))
    else:
        caption = f"On {rank_count(size)}, for S = {nbytes_text(nbytes)}, on the network {on.name}."
        _print(rows, caption, glyphs)


def _row(algorithm: Algorithm, size: int, nbytes: int, network: Network) -> AlgorithmRow:
    try:
        schedule = choose.schedule_of(algorithm, size)
    except UnsupportedSizeError as error:
        return AlgorithmRow(algorithm, None, None, f"takes {error.takes}")
    price = choose.priced(schedule, nbytes, network)
    try:
        order = prove(schedule).order
    except ProofError:
        return AlgorithmRow(
            algorithm, price, None, f"fails its proof: roundelay prove {algorithm.name}"
        )
    return AlgorithmRow(
        algorithm, price, order if choose.adds_up(algorithm.collective) else None, None
    )


def _as_json(row: AlgorithmRow, size: int, nbytes: int, network: Network) -> dict[str, object]:
    price = row.price
    return {
        "collective": row.algorithm.collective.name,
        "algorithm": row.algorithm.short_name,
        "name": row.algorithm.name,
        "size": size,
        "bytes": nbytes,
        "network": network.name,
        "steps": len(price.steps) if price else None,
        "messages": price.messages if price else None,
        "sent": max(price.sent) if price else None,
        "sent_fraction": max(price.sent) / price.nbytes if price else None,
        "order": row.order,
        "seconds": price.seconds if price else None,
        "problem": row.problem,
        "options": dict(row.algorithm.options),
        "summary": row.algorithm.summary,
    }


def _print(rows: list[AlgorithmRow], caption: str, glyphs: Glyphs) -> None:
    table = _table(rows, glyphs, brief=False)
    console = console_for(fit=table)
    if console.width < Measurement.get(console, console.options, table).minimum + LEAST_HOW:
        table = _table(rows, glyphs, brief=True)
        problems = [f"{row.algorithm.name} {row.problem}." for row in rows if row.problem]
        caption = "\n".join([caption, *problems])
    print_table(console, table, glyphs)
    console.print(*(Text(safe(line, glyphs)) for line in caption.splitlines()), sep="\n")


def _table(rows: list[AlgorithmRow], glyphs: Glyphs, *, brief: bool) -> Table:
    """Return all there is, for wide terminals and for grep, or in brief what fits 80 columns."""
    table = empty_table(glyphs)
    for name in ("algorithm",) if brief else ("collective", "algorithm"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "messages", "sent" if brief else "sent by a rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("order", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    if not brief:
        table.add_column("how")
    for collective, group in groupby(rows, key=lambda row: row.algorithm.collective.name):
        if brief:
            table.add_row(Text(collective, style="bold"), *[""] * 5)
        for row in group:
            name, costs = row.algorithm.short_name, _costs(row, glyphs, brief=brief)
            if brief:
                table.add_row(f"  {name}", *costs)
            else:
                how = Text(safe(row.problem or row.algorithm.summary, glyphs))
                how.stylize("yellow" if row.problem else "")
                table.add_row(collective, name, *costs, how)
        table.add_section()
    return table


def _costs(row: AlgorithmRow, glyphs: Glyphs, *, brief: bool) -> list[str]:
    price = row.price
    if price is None:
        return ["-"] * 5
    sent = f"{max(price.sent) / price.nbytes:.3g} S" if brief else sent_text(price)
    seconds = seconds_text(price.seconds or 0.0, glyphs)
    return [str(len(price.steps)), str(price.messages), sent, row.order or "-", seconds]
