"""`roundelay prove`: every algorithm keeps its contract, as a schedule and as programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import get_args

import click
from click.core import ParameterSource
from rich.text import Text

from roundelay.algorithms import Algorithm, algorithms
from roundelay.cli import _choose as choose
from roundelay.cli._over_hosts import hosts_from, hosts_option, over_hosts_called
from roundelay.cli._progress import watched
from roundelay.cli._tables import empty_table, print_table
from roundelay.cli._types import SIZES, console_for, glyphs_option, json_option
from roundelay.collectives import collectives
from roundelay.errors import (
    InvalidArgumentError,
    ProofError,
    RoundelayError,
    UnknownNameError,
    UnsupportedSizeError,
    rank_count,
)
from roundelay.schedule import Order, Schedule, compile_schedule, load, prove, prove_program
from roundelay.view.terminal_text import Glyphs, safe

__all__ = ["command"]

ORDERS: tuple[Order, ...] = get_args(Order)
SMALL, LARGE = 1 << 10, 1 << 20  # bytes that go over hosts by one lane, and by all


@dataclass(slots=True)
class ProofResult:
    """What became of one algorithm, or of one schedule from a file."""

    name: str
    collective: str
    proved: int = 0  # schedules, each with its programs
    orders: set[Order] = field(default_factory=set)
    skipped: list[int] = field(default_factory=list)  # sizes it does not take
    failures: list[str] = field(default_factory=list)

    @property
    def order(self) -> Order | None:
        """The weakest promise over all sizes and roots."""
        return max(self.orders, key=ORDERS.index, default=None)

    def take(self, schedule: Schedule) -> None:
        """Prove a schedule and what it compiles to."""
        try:
            order = prove(schedule).order
            prove_program(compile_schedule(schedule))
        except ProofError as error:
            where = f"{rank_count(schedule.size)}, root {schedule.root}"
            self.failures.append(f"{self.name} on {where}: {error}")
        else:
            self.proved += 1
            if choose.adds_up(schedule.collective):
                self.orders.add(order)


@click.command("prove")
@click.argument("names", nargs=-1)
@click.option("--schedule", type=click.Path(path_type=Path), help="Prove your own, from JSON.")
@click.option("--sizes", type=SIZES, default="1-16", show_default=True, help="Numbers of ranks.")
@hosts_option
@glyphs_option
@json_option
def command(
    *,
    names: tuple[str, ...],
    schedule: Path | None,
    sizes: list[int],
    hosts: str | None,
    glyphs: Glyphs,
    as_json: bool,
) -> None:
    """Prove that algorithms keep their contracts, for every size and root.

    NAMES are algorithms (all_reduce_ring) or collectives (all_reduce); all, when none is named.
    What is proved is the schedule and the program that every rank really runs. With --hosts it is
    what collectives do over hosts, large ones and small ones.
    """
    if schedule is not None:
        if names:
            raise InvalidArgumentError("prove takes NAMES or --schedule FILE, not both.")
        if hosts is not None:
            raise InvalidArgumentError(f"--schedule {schedule} says all itself. Leave out --hosts.")
        own = load(schedule)
        results = [ProofResult(own.name, own.collective.name)]
        results[0].take(own)
    elif hosts is not None:
        results = _prove_over_hosts(names, hosts, sizes)
    else:
        results = _prove_all(_chosen(names), sizes)
    if as_json:
        click.echo(json.dumps([_as_json(result) for result in results], indent=1))
    else:
        _print(results, glyphs)
    _report(results)


def _chosen(names: Sequence[str]) -> list[Algorithm]:
    """Find algorithms by their names, or all of a collective."""
    if not names:
        return list(algorithms)
    algorithms_by_name: dict[str, Algorithm] = {}
    for name in names:
        try:
            collective, named = choose.collective_or_algorithm(name)
        except UnknownNameError as error:
            near = get_close_matches(name[:60], [*algorithms.names(), *error.known], n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise InvalidArgumentError(
                f"No algorithm or collective is called {name[:60]!r}.{hint} "
                f"`roundelay list` shows all."
            ) from None
        chosen = [algorithms.load(named)] if named else choose.algorithms_of(collective)
        algorithms_by_name.update({each.name: each for each in chosen})
    return list(algorithms_by_name.values())


def _prove_all(chosen: Sequence[Algorithm], sizes: Sequence[int]) -> list[ProofResult]:
    results = {each.name: ProofResult(each.name, each.collective.name) for each in chosen}
    work = [(each, size) for each in chosen for size in sizes]
    for algorithm, size in watched(work, "Proving"):
        result = results[algorithm.name]
        try:
            for schedule in _schedules(algorithm, size):
                result.take(schedule)
        except UnsupportedSizeError:
            result.skipped.append(size)
        except RoundelayError as error:
            result.failures.append(f"{algorithm.name} on {rank_count(size)}: {error}")
    return list(results.values())


def _schedules(algorithm: Algorithm, size: int) -> Iterator[Schedule]:
    for root in range(size) if algorithm.collective.rooted else (0,):
        yield choose.schedule_of(algorithm, size, root)


def _prove_over_hosts(names: Sequence[str], hosts: str, sizes: Sequence[int]) -> list[ProofResult]:
    chosen = [choose.collective_called(name) for name in names] or list(collectives)
    results = {each.name: ProofResult(f"{each.name}_hierarchical", each.name) for each in chosen}
    told = "," in hosts
    source = click.get_current_context().get_parameter_source("sizes")
    if told and source is not ParameterSource.DEFAULT:
        raise InvalidArgumentError(f"--hosts {hosts} says how many ranks. Leave out --sizes.")
    work = [(each, size) for each in chosen for size in ([None] if told else sizes)]
    for collective, size in watched(work, "Proving"):
        result = results[collective.name]
        try:
            there = hosts_from(hosts, size)
        except UnsupportedSizeError:
            result.skipped.append(size or 0)
            continue
        for root in range(sum(map(len, there))) if collective.rooted else (0,):
            for nbytes in (SMALL, LARGE):
                result.take(over_hosts_called(collective, there, root, nbytes).schedule)
    return list(results.values())


def _as_json(result: ProofResult) -> dict[str, object]:
    return {
        "name": result.name,
        "collective": result.collective,
        "proved": result.proved,
        "order": result.order,
        "skipped_sizes": result.skipped,
        "failures": result.failures,
    }


def _print(results: Sequence[ProofResult], glyphs: Glyphs) -> None:
    table = empty_table(glyphs)
    for name in ("", "name", "collective"):
        table.add_column(name, no_wrap=True)
    table.add_column("proved", justify="right")
    table.add_column("order", no_wrap=True)
    table.add_column("remarks")
    for result in results:
        failed = len(result.failures)
        remarks = [f"{failed} failed"] if failed else []
        if result.skipped:
            remarks.append(f"not for sizes {', '.join(map(str, result.skipped))}")
        mark = (glyphs.failed, "bold red") if failed else (glyphs.done, "green")
        table.add_row(
            Text(*mark),
            safe(result.name, glyphs),
            result.collective,
            str(result.proved),
            result.order or "-",
            "; ".join(remarks),
        )
    print_table(console_for(fit=table), table, glyphs)


def _report(results: Sequence[ProofResult]) -> None:
    """Say how it went on stderr, and end with 1 if anything failed."""
    failures = [failure for result in results for failure in result.failures]
    proved = sum(result.proved for result in results)
    for failure in failures[:10]:
        for line in failure.splitlines():
            click.echo(safe(line), err=True)
    if failures:
        click.echo(f"{proved} proved, {len(failures)} failed.", err=True)
        raise click.exceptions.Exit(1)
    click.echo(f"{proved} proved, each with the programs it compiles to.", err=True)
