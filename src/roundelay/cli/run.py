"""`roundelay run`: a script on several ranks of this host, or by torchrun or mpirun on many."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from roundelay import _core
from roundelay.engines.mpi.mpirun import clean_environment
from roundelay.launch.ending import Ending
from roundelay.launch.environment import found_place, rank_environments
from roundelay.launch.exec_launcher import exec_launcher, mpirun_command, torchrun_command
from roundelay.launch.job import run_job
from roundelay.launch.local import MOST_RANKS, check_timeout
from roundelay.rendezvous.one_host import forget

__all__ = ["command"]

Command = TypeVar("Command", bound=Callable[..., Any])  # click's own way to type decorators


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


def _for_torchrun(name: str, metavar: str, text: str) -> Callable[[Command], Command]:
    """Declare an option that torchrun gets as it is, spelled with hyphens or underscores."""
    field = name.replace("-", "_").strip("_")
    return click.option(*dict.fromkeys([name, f"--{field}"]), field, metavar=metavar, help=text)


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
    help="How many ranks, on every host: a number, or auto or cpu for one per core.",
)
@click.option("-m", "--module", "as_module", is_flag=True, help="SCRIPT is a module: -m pkg.train")
@click.option(
    "--timeout",
    type=float,
    help="Seconds that any call may wait for another rank.  [default: 60]",
)
@_for_torchrun("--nnodes", "N", "Hosts: a number, or min:max. By torchrun.")
@_for_torchrun("--node-rank", "N", "Which host this is, from 0.")
@_for_torchrun("--master-addr", "HOST", "The host of rank 0.")
@_for_torchrun("--master-port", "PORT", "A free port there.")
@_for_torchrun("--rdzv-backend", "NAME", "The rendezvous of hosts: c10d.")
@_for_torchrun("--rdzv-endpoint", "HOST:PORT", "Where they do.")
@_for_torchrun("--rdzv-id", "NAME", "The name of the job.")
@_for_torchrun("--rdzv-conf", "K=V,…", "More about the rendezvous.")
@_for_torchrun("--max-restarts", "N", "How often to start again.")
@click.option("--mpi", "by_mpi", is_flag=True, help="Let mpirun start the ranks, -n in all.")
@click.option("--hostfile", metavar="FILE", help="The hosts for mpirun.")
@click.option("-H", "--host", metavar="HOST,…", help="The hosts for mpirun, by name.")
@click.option("--mpi-args", default="", metavar="TEXT", help="More words for mpirun.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    size: int,
    as_module: bool,
    timeout: float | None,
    by_mpi: bool,
    hostfile: str | None,
    host: str | None,
    mpi_args: str,
    script: str,
    args: tuple[str, ...],
    **for_torchrun: str | None,
) -> None:
    """Run SCRIPT on several ranks of this host, or of several.

    All that follows SCRIPT is handed to it. In it, rd.init() gives the communicator; scripts for
    torchrun run unchanged. Every line of output has its rank in front. When a rank fails, all
    end, and what the first one said comes last.

    With --nnodes or another of torchrun's options the work is torchrun's, to be started on every
    host; with --mpi it is mpirun's. Both print as they are used to.
    """
    if timeout is not None:
        check_timeout("--timeout", timeout)
    target = [*(_module(script) if as_module else _file(script)), *args]
    handed = {name: value for name, value in for_torchrun.items() if value is not None}
    words = _mpi_words(hostfile, host, mpi_args)
    if handed and (by_mpi or words):
        raise click.UsageError("either torchrun's options or mpirun's, not both.")
    if words and not by_mpi:
        raise click.UsageError("--hostfile, --host and --mpi-args are for mpirun: add --mpi.")
    if by_mpi:
        # mpirun may start even from within an MPI job.
        exec_launcher(mpirun_command(size, words, target), clean_environment(os.environ), timeout)
    if handed:
        exec_launcher(torchrun_command(size, handed, target, timeout), os.environ, timeout)
    job = secrets.token_hex(8)
    environments = rank_environments(os.environ, size, job=job, port=_free_port(), timeout=timeout)
    try:
        ending = run_job([sys.executable, *target], environments)
    finally:
        forget(found_place(environments[0]).job)
    _report(ending)
    raise click.exceptions.Exit(ending.code)


def _mpi_words(hostfile: str | None, host: str | None, more: str) -> list[str]:
    named = {"--hostfile": hostfile, "--host": host}
    words = [word for name, value in named.items() if value for word in (name, value)]
    try:
        return [*words, *shlex.split(more)]
    except ValueError as error:
        raise click.UsageError(f"--mpi-args {more!r} can't be read: {error}.") from None


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
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(outermost) if outermost else None
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    if spec is None:
        raise click.UsageError(f"there is no module '{name}' here or among what is installed.")
    return ["-m", name]


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
    for end in [ending.first] if ending.first is not None else ending.lost:
        if ending.signal is None and end.traceback:
            click.echo(end.traceback + b"\n", err=True, nl=False)
