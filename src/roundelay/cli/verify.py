"""`roundelay verify`: train one device beside the ranks, and name the first difference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from roundelay.cli._script import function_at
from roundelay.cli._types import console_for
from roundelay.errors import InvalidArgumentError

__all__ = ["command"]

NEEDED = ("make_model", "make_optimizer", "batches")


EXAMPLE = """\b
Example, in train.py:
  def job():
      return {"make_model": Model, "make_optimizer": lambda p: torch.optim.Adam(p),
              "batches": [(x, y)], "loss": lambda model, x, y: ((model(x) - y) ** 2).mean()}
and then:
  roundelay verify train.py:job --strategy zero2 --ranks 4
"""


@click.command("verify", epilog=EXAMPLE)
@click.argument("place", metavar="SCRIPT.py:FUNCTION")
@click.option("--strategy", "-s", multiple=True, default=("ddp",), help="May be repeated.")
@click.option("--ranks", "-n", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option("--engine", default="threads", show_default=True, help="How ranks are started.")
@click.option("--precision", default="fp32", show_default=True)
@click.option("--tolerance", type=float, help="Relative; by default what rounding explains.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    place: str,
    *,
    strategy: tuple[str, ...],
    ranks: int,
    engine: str,
    precision: str,
    tolerance: float | None,
    as_json: bool,
) -> None:
    """Check that ranks under a strategy train as one device does.

    FUNCTION returns the arguments of rd.verify as a dict: make_model, make_optimizer, batches and,
    where the model's output is not the loss itself, loss.
    """
    from roundelay.launch.verify import verify  # noqa: PLC0415 - torch, only for this command

    job = _job(place)
    verdicts = [
        verify(
            **job,
            strategy=name,
            ranks=ranks,
            engine=engine,
            precision=precision,
            tolerance=tolerance,
        )
        for name in strategy
    ]
    if as_json:
        click.echo(json.dumps([_as_json(verdict) for verdict in verdicts], indent=1))
    else:
        for verdict in verdicts:
            style = "" if verdict.same else "red"
            console_for().print(str(verdict), style=style, highlight=False)
    if not all(verdict.same for verdict in verdicts):
        raise SystemExit(1)


def _as_json(verdict: Any) -> dict[str, Any]:  # Any: a Verdict, whose module imports torch
    fields = asdict(verdict)
    differences = {name: fields.pop(name) for name in ("first", "largest")}
    return {**fields, "same": verdict.same, **differences}


def _job(place: str) -> dict[str, Any]:
    make_job = function_at(place, "verify", "job")
    job = make_job()
    if not isinstance(job, Mapping) or any(word not in job for word in NEEDED):
        name, _, function = place.rpartition(":")
        raise InvalidArgumentError(
            f"{function}() in {name} must return a dict with {', '.join(NEEDED)}, as rd.verify "
            f"takes them, not {type(job).__name__}."
        )
    return dict(job)
