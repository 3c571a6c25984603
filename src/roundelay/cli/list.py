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
from roundelay.cli._tables import print_table, sent_text, table
from roundelay.cli._types import bytes_option, console_for, network_option, wants_ascii
from roundelay.errors import InvalidArgumentError, ProofError, UnsupportedSizeError, rank_count
from roundelay.schedule import Network, Price, prove
from roundelay.view.terminal_text import ASCII, UNICODE, Glyphs, nbytes_text, safe, seconds_text

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
@click.option("--ascii", "ascii_only", is_flag=True, help="Plain ASCII only.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def command(
    *,
    collective: str | None,
    size: int,
    nbytes: int,
    network: str,
    ascii_only: bool,
    as_json: bool,
) -> None:
    """List all algorithms with their steps, messages, bytes, order of addition and seconds."""
    wanted = None if collective is None else choose.collective_called(collective)
    found = [each for each in algorithms if wanted is None or each.collective is wanted]
    found.sort(key=lambda each: (each.collective.name, each.name))
    if size < 1:
        raise InvalidArgumentError(f"-n {size}: there must be at least 1 rank.")
    on = choose.network_called(network, size)
    rows = [_row(each, size, nbytes, on) for each in watched(found, "Estimating")]
    if as_json:
        click.echo(json.dumps([_as_json(row, size, nbytes, on) for row in rows], indent=1))
    else:
        caption = f"On {rank_count(size)}, for S = {nbytes_text(nbytes)}, on the network {on.name}."
        _print(rows, caption, ASCII if wants_ascii(asked=ascii_only) else UNICODE)


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
    made = _wide(rows, glyphs)
    console = console_for(fit=made)
    if console.width < Measurement.get(console, console.options, made).minimum + LEAST_HOW:
        made = _narrow(rows, glyphs)
        caption = "\n".join(
            [caption, *(f"{row.algorithm.name} {row.problem}." for row in rows if row.problem)]
        )
    print_table(console, made, glyphs=glyphs)
    console.print(*(Text(safe(line, glyphs)) for line in caption.splitlines()), sep="\n")


def _wide(rows: list[AlgorithmRow], glyphs: Glyphs) -> Table:
    """Give every row all there is, for wide terminals and for grep."""
    made = table(ascii_only=glyphs is ASCII)
    for name in ("collective", "algorithm"):
        made.add_column(name, no_wrap=True)
    for name in ("steps", "messages", "sent by a rank"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("order", no_wrap=True)
    made.add_column("time", justify="right", no_wrap=True)
    made.add_column("how")
    for name, group in groupby(rows, key=lambda row: row.algorithm.collective.name):
        for row in group:
            how = Text(safe(row.algorithm.summary, glyphs))
            if row.problem is not None:
                how = Text(safe(row.problem, glyphs), style="yellow")
            sent = sent_text(row.price) if row.price else "-"
            steps, messages, order, time = _cells(row, glyphs)
            made.add_row(name, row.algorithm.short_name, steps, messages, sent, order, time, how)
        made.add_section()
    return made


def _narrow(rows: list[AlgorithmRow], glyphs: Glyphs) -> Table:
    """Leave out what 80 columns have no room for."""
    made = table(ascii_only=glyphs is ASCII)
    made.add_column("algorithm", no_wrap=True)
    for name in ("steps", "messages", "sent"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("order", no_wrap=True)
    made.add_column("time", justify="right", no_wrap=True)
    for name, group in groupby(rows, key=lambda row: row.algorithm.collective.name):
        made.add_row(Text(name, style="bold"), *[""] * 5)
        for row in group:
            sent = f"{max(row.price.sent) / row.price.nbytes:.3g} S" if row.price else "-"
            steps, messages, order, time = _cells(row, glyphs)
            made.add_row(f"  {row.algorithm.short_name}", steps, messages, sent, order, time)
        made.add_section()
    return made


def _cells(row: AlgorithmRow, glyphs: Glyphs) -> tuple[str, str, str, str]:
    if row.price is None:
        return "-", "-", "-", "-"
    seconds = seconds_text(row.price.seconds or 0.0, glyphs)
    return str(len(row.price.steps)), str(row.price.messages), row.order or "-", seconds
