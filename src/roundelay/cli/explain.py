"""`roundelay explain`: who sends what to whom, step by step, and what each rank then holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import RenderableType

from roundelay import values as numbers
from roundelay.cli import _choose as choose
from roundelay.cli import _tables as tables
from roundelay.cli._over_hosts import OverHosts, hosts_from, hosts_option, over_hosts_called
from roundelay.cli._stage import Stage, show
from roundelay.cli._types import bytes_option, language_option, network_option, wants_ascii
from roundelay.cli._write import check_out, write
from roundelay.collectives import Collective
from roundelay.errors import InvalidArgumentError, ProofError, rank_count
from roundelay.networks import Graph
from roundelay.schedule import (
    Network,
    Schedule,
    compile_schedule,
    format_program,
    load,
    prove,
    prove_program,
)
from roundelay.view import Picture, picture
from roundelay.view.languages import Language
from roundelay.view.nested_phases import nested_phases
from roundelay.view.picture import title_of

__all__ = ["command"]

DEFAULT_SIZE = 4
#: Cells times frames: beyond this a picture is neither drawn in reasonable time nor of any use.
MOST_CELLS = 2_000_000

EXAMPLES = """\b
Examples:
  roundelay explain all_reduce                            ring, 4 ranks
  roundelay explain all-reduce --algorithm tree -n 8
  roundelay explain all_reduce --values "1,1 2,2 3,3 4,4" --op avg
  roundelay explain broadcast -O segments=2 --algorithm chain --root 1
  roundelay explain reduce_scatter --values "1,1 2,2 3,3 4,4" --counts 1,1,0,0
  roundelay explain all_reduce --diff ring,tree --network hosts:per_host=4 -n 8
  roundelay explain all_gather --hosts 2 -n 8             inside hosts, between
  roundelay explain all_reduce --out ring.html --out ring.svg
  roundelay explain --schedule mine.json
  roundelay explain matmul --split batch,columns -n 2,3   a product that is cut
  roundelay explain attention --layout zigzag             attention over ranks
  roundelay explain pipeline --schedule 1f1b              which micro-batch when
"""

#: What is no collective, and has options of its own: the module that has its command.
SUBJECTS = {
    "attention": "roundelay.cli._explain_attention",
    "matmul": "roundelay.cli._explain_matmul",
    "pipeline": "roundelay.cli._explain_pipeline",
}


class Explain(click.Command):
    """Hands over where the first word is a subject of its own."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # what click hands over
    ) -> click.Context:
        """Read the words as the subject's own command does, if there is one."""
        if not args or args[0] not in SUBJECTS:
            return super().make_context(info_name, args, parent, **extra)
        subject: click.Command = import_module(SUBJECTS[args[0]]).command
        return subject.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """What was asked for, as it stood on the command line."""

    collective: str | None
    algorithm: str | None
    size: int | None
    root: int | None
    options: tuple[str, ...]
    values: numbers.Values | None
    op: str
    counts: list[int] | None
    nbytes: int
    network: str
    rank_name: str
    schedule: Path | None
    diff: str | None
    hosts: str | None
    language: Language


@click.command("explain", cls=Explain, epilog=EXAMPLES)
@click.argument("collective", required=False)
@click.option("-a", "--algorithm", metavar="NAME", help="Which algorithm; `roundelay list` knows.")
@click.option("-n", "--size", type=int, help=f"How many ranks.  [default: {DEFAULT_SIZE}]")
@click.option("--root", type=int, help="The root, where there is one.  [default: 0]")
@click.option("-O", "options", multiple=True, metavar="NAME=VALUE", help="An algorithm's option.")
@click.option("--values", metavar="NUMBERS", help='Real numbers: "1,1 2,2 3,3 4,4".')
@click.option("--op", default="sum", show_default=True, help="The reduction of --values.")
@click.option("--counts", metavar="COUNTS", help="Elements of every block of --values: 1,1,0,0.")
@bytes_option
@hosts_option
@network_option
@language_option
@click.option("--rank-name", default="GPU", show_default=True, help="What to call a rank.")
@click.option("--ascii", "ascii_only", is_flag=True, help="Plain ASCII only.")
@click.option(
    "-o",
    "--out",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Write FILE.html, .svg or .json instead; may be given several times.",
)
@click.option(
    "--schedule", type=click.Path(path_type=Path), help="Prove and draw your own, from JSON."
)
@click.option("--diff", metavar="A,B", help="Two algorithms side by side.")
@click.option("--program", type=int, metavar="RANK", help="Print the program that RANK runs.")
def command(
    *,
    values: str | None,
    counts: str | None,
    ascii_only: bool,
    out: tuple[Path, ...],
    program: int | None,
    **asked: Any,  # the fields of ExplainOptions, as click read them
) -> None:
    """Show, step by step, who sends what to whom and what each rank then holds.

    In a terminal, step with the arrow keys; piped, all steps are printed.
    """
    source = click.get_current_context().get_parameter_source("network")
    if asked["hosts"] is not None and source is ParameterSource.DEFAULT:
        asked["network"] = ""
    if counts is not None and values is None:
        raise InvalidArgumentError("--counts says how --values split into blocks. Give both.")
    request = ExplainOptions(
        values=numbers.values_from(values) if values is not None else None,
        counts=numbers.counts_from(counts) if counts is not None else None,
        **asked,
    )
    for path in out:
        check_out(path, several=request.diff is not None)
    over = _over_hosts(request)
    schedules = _schedules(request) if over is None else [over.schedule]
    if program is not None:
        if out or request.diff is not None or values is not None:
            raise InvalidArgumentError(
                "--program prints one program. Leave out --out, --diff and --values."
            )
        if request.hosts is not None:
            raise InvalidArgumentError(
                "Over hosts a rank runs a program for every phase inside its host. Leave out "
                "--hosts, and name the collective of that phase."
            )
        _print_program(schedules[0], program, ascii_only=wants_ascii(asked=ascii_only))
        return
    _present(request, schedules, over, out, ascii_only=wants_ascii(asked=ascii_only))


def _present(
    request: ExplainOptions,
    schedules: list[Schedule],
    over: OverHosts | None,
    out: tuple[Path, ...],
    *,
    ascii_only: bool,
) -> None:
    """Draw or write; a schedule that fails its proof is shown all the same, and then refused."""
    runs = [_numbers(request, schedule) for schedule in schedules]
    pictures = [
        _picture(request, schedule, over, run)
        for schedule, run in zip(schedules, runs, strict=True)
    ]
    if out:
        for path in out:
            write(path, pictures)
    else:
        ending = _ending(request, pictures, runs[0], ascii_only=ascii_only)
        remark = "\n".join(map(_remark, pictures))
        show(Stage(pictures, ending=ending, remark=remark, ascii_only=ascii_only))
    for drawn in pictures:
        if drawn.failures:
            name = f"{drawn.schedule.name} ({drawn.schedule.collective.name})"
            raise ProofError(name, drawn.failures)


def _schedules(request: ExplainOptions) -> list[Schedule]:
    if request.schedule is not None:
        return [_own_schedule(request)]
    if request.collective is None:
        raise InvalidArgumentError(
            "explain needs a collective, such as all_reduce, or --schedule FILE. "
            "`roundelay list` shows all."
        )
    collective, named = choose.collective_or_algorithm(request.collective)
    size = _size(request, collective)
    names = [request.algorithm or named]
    if request.diff is not None:
        names = [name.strip() for name in request.diff.split(",")]
        if len(names) != 2 or request.algorithm is not None:  # noqa: PLR2004 - side by side
            raise InvalidArgumentError(
                f"--diff takes two algorithms, as in --diff ring,tree (without --algorithm), "
                f"not '{request.diff}'."
            )
    options = choose.options_from(list(request.options), where="-O")
    found = [
        choose.algorithm_of(collective, name) if name else choose.default_algorithm(collective)
        for name in names
    ]
    return [
        choose.schedule_of(each, size, request.root or 0, choose.shared(each, found, options))
        for each in found
    ]


def _size(request: ExplainOptions, collective: Collective) -> int:
    size = request.size
    if request.values is not None:
        size = numbers.size_for(collective, request.values, size)
    return DEFAULT_SIZE if size is None else size


def _over_hosts(request: ExplainOptions) -> OverHosts | None:
    """Return the collective over hosts, if that is wanted; its phases have their own algorithms."""
    if request.hosts is None or request.schedule is not None or request.collective is None:
        return None  # and is refused where schedules are read
    collective, named = choose.collective_or_algorithm(request.collective)
    algorithm = (request.algorithm or named or "hierarchical").removeprefix(f"{collective.name}_")
    if request.diff is not None or algorithm != "hierarchical":
        raise InvalidArgumentError(
            "--hosts goes in phases, with an algorithm for each. Leave out --algorithm and --diff; "
            "-O inside=NAME and -O between=NAME choose them."
        )
    told = "," in request.hosts and request.size is None and request.values is None
    hosts = hosts_from(request.hosts, None if told else _size(request, collective))
    options = choose.options_from(list(request.options), where="-O")
    return over_hosts_called(collective, hosts, request.root or 0, request.nbytes, options)


def _own_schedule(request: ExplainOptions) -> Schedule:
    """Load a user's schedule; what it says itself can't be said again."""
    given = {
        "--algorithm": request.algorithm,
        "-n": request.size,
        "--root": request.root,
        "-O": request.options or None,
        "--diff": request.diff,
        "--hosts": request.hosts,
    }
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise InvalidArgumentError(
            f"--schedule {request.schedule} says all that itself. Leave out {', '.join(extra)}."
        )
    schedule = load(request.schedule or "")
    if request.collective is not None:
        collective = choose.collective_called(request.collective)
        if collective is not schedule.collective:
            raise InvalidArgumentError(
                f"{request.schedule} is a schedule of {schedule.collective.name}, not of "
                f"{collective.name}. Leave the name out."
            )
    return schedule


def _numbers(request: ExplainOptions, schedule: Schedule) -> numbers.Numbers | None:
    cells = {*schedule.held_before(), *((t.dst, t.chunk) for t in schedule.transfers)}
    frames = len(schedule.steps) + 1
    if len(cells) * frames > MOST_CELLS:
        raise InvalidArgumentError(
            f"{schedule.name} on {rank_count(schedule.size)} has {len(cells)} cells in {frames} "
            f"frames: too much to draw. Use fewer ranks; `roundelay list -n {schedule.size}` "
            f"shows its cost."
        )
    if request.values is None:
        if request.op != "sum":
            raise InvalidArgumentError("--op says how --values are reduced. Give both.")
        return None
    from roundelay.values.run import run  # noqa: PLC0415 - numpy, for real numbers only

    return run(schedule, request.values, op=request.op, counts=request.counts)


def _picture(
    request: ExplainOptions, schedule: Schedule, over: OverHosts | None, run: numbers.Numbers | None
) -> Picture:
    if over is not None and not request.network:
        network: Network = over.network()
    else:
        network = choose.network_called(request.network, schedule.size)
    hosts: Mapping[str, Sequence[int]] = network.hosts() if isinstance(network, Graph) else {}
    phases = []
    if over is not None:
        hosts = over.named_hosts()
        phases = nested_phases(over.nested, over.steps)
    op = request.op if run is not None else ""
    known = 0 if over is None else len(hosts)
    return picture(
        schedule,
        values=run.frames if run is not None else None,
        price=choose.priced(schedule, request.nbytes, network),
        rank_name=request.rank_name,
        title=title_of(schedule, request.language, op=op, hosts=known),
        hosts=hosts,
        phases=phases,
        language=request.language,
    )


def _remark(drawn: Picture) -> str:
    """Say what the proof says."""
    name, collective = drawn.schedule.name, drawn.schedule.collective
    if drawn.failures:
        return f"{name} does NOT keep the contract of {collective.name}."
    order = choose.ORDERS[prove(drawn.schedule).order]
    adds = f", and adds in {order}" if choose.adds_up(collective) else ""
    return f"{name} is proved to keep the contract of {collective.name}{adds}."


def _ending(
    request: ExplainOptions,
    pictures: list[Picture],
    run: numbers.Numbers | None,
    *,
    ascii_only: bool,
) -> RenderableType | None:
    if request.diff is not None:
        shown = choose.adds_up(pictures[0].schedule.collective)
        orders = [
            prove(each.schedule).order if shown and not each.failures else "-" for each in pictures
        ]
        return tables.compare(pictures, orders, ascii_only=ascii_only)
    if run is not None:
        return tables.outputs(
            pictures[0].ranks, run.outputs, rank_name=request.rank_name, ascii_only=ascii_only
        )
    return None


def _print_program(schedule: Schedule, rank: int, *, ascii_only: bool) -> None:
    """Compile, prove, and print the program of one rank."""
    if not 0 <= rank < schedule.size:
        raise InvalidArgumentError(
            f"--program {rank}: {schedule.name} has ranks 0 to {schedule.size - 1}."
        )
    programs = compile_schedule(schedule)
    prove_program(programs)
    text = format_program(programs.ranks[rank])
    click.echo(text.replace("←", "<-") if ascii_only else text)
