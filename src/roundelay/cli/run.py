"""`roundelay run`: a script on several ranks of this host."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from roundelay import _core
from roundelay.engines._rendezvous import forget
from roundelay.launch.ending import Ending
from roundelay.launch.environment import found_place, rank_environments
from roundelay.launch.job import run_job
from roundelay.launch.local import MOST_RANKS, check_timeout

__all__ = ["command"]


class Ranks(click.ParamType[int]):
    """A number of ranks, or auto or cpu for one per core."""

    name = "ranks"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:  # click hands over strings and defaults alike
        """Read a number or a word."""
        if value in ("auto", "cpu"):
            return _core.available_cores()
        if not str(value).isascii() or not str(value).isdigit():
            self.fail(f"'{value}' is not a number of ranks; write 4, auto or cpu.", param, ctx)
        if not 1 <= int(str(value)[:9]) <= MOST_RANKS:
            self.fail(f"'{value}': a job has 1 to {MOST_RANKS} ranks.", param, ctx)
        return int(value)


@click.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[-n RANKS] [-m]",
)
@click.option(
    "-n",
    "-np",
    "--nproc-per-node",
    "--nproc_per_node",
    "size",
    type=Ranks(),
    default="auto",
    show_default=True,
    help="How many ranks: a number, or auto or cpu for one per core.",
)
@click.option("-m", "--module", "as_module", is_flag=True, help="SCRIPT is a module: -m pkg.train")
@click.option(
    "--timeout",
    type=float,
    help="Seconds that any call may wait for another rank.  [default: 60]",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    *, size: int, as_module: bool, timeout: float | None, script: str, args: tuple[str, ...]
) -> None:
    """Run SCRIPT on several ranks of this host.

    All that follows SCRIPT is handed to it. In it, rd.init() gives the communicator; scripts for
    torchrun run unchanged. Every line of output has its rank in front. When a rank fails, all
    end, and what the first one said comes last.
    """
    if timeout is not None:
        check_timeout("--timeout", timeout)
    target = _module(script) if as_module else _file(script)
    job = secrets.token_hex(8)
    environments = rank_environments(os.environ, size, job=job, port=_free_port(), timeout=timeout)
    try:
        ending = run_job([sys.executable, *target, *args], environments)
    finally:
        forget(found_place(environments[0]).job)
    _report(ending)
    raise click.exceptions.Exit(ending.code)


def _file(script: str) -> list[str]:
    path = Path(script)
    if path.is_dir():
        raise click.UsageError(f"'{script}' is a directory. For a package: -m {path.name}")
    if not path.exists():
        near = f" For a module: -m {script}" if "/" not in script and path.suffix != ".py" else ""
        raise click.UsageError(f"there is no file '{script}'.{near}")
    if not os.access(path, os.R_OK):
        raise click.UsageError(f"'{script}' can't be read. Look at its permissions: ls -l {script}")
    return [script]


def _module(name: str) -> list[str]:
    # Looking for the outermost package imports nothing.
    outermost = name.partition(".")[0]
    with _current_directory_importable():
        try:
            found = importlib.util.find_spec(outermost) if outermost else None
        except (ImportError, ValueError):
            found = None
    if found is None:
        raise click.UsageError(f"there is no module '{name}' here or among what is installed.")
    return ["-m", name]


@contextlib.contextmanager
def _current_directory_importable() -> Iterator[None]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop(0)


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


def _report(ending: Ending) -> None:
    """Say last, and alone, what the first failing rank said."""
    summary = ending.summary()
    if not summary:
        return
    click.echo(click.style(f"roundelay: {summary}", fg="red", bold=True), err=True)
    if ending.signal is None and ending.first is not None and ending.first.last_words:
        click.echo(ending.first.last_words + b"\n", err=True, nl=False)
