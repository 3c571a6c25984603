"""`roundelay run`: a script on several ranks of this host, or by torchrun or mpirun on many."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from roundelay.engines.mpi.mpirun import clean_environment
from roundelay.errors import InvalidArgumentError
from roundelay.launch.ending import Ending
from roundelay.launch.environment import found_place, rank_environments
from roundelay.launch.exec_launcher import (
    exec_launcher,
    mpirun_command,
    torchrun_command,
    with_timeout,
)
from roundelay.launch.host_list import HostSlots, all_here, read_hostfile, read_hosts, slots
from roundelay.launch.job import SHUTDOWN_S, run_job
from roundelay.launch.local import check_timeout
from roundelay.launch.pods import ranks_of_pod, torchrun_options, without_others
from roundelay.launch.ranks_here import ranks_here
from roundelay.rendezvous.one_host import forget

__all__ = ["command"]

PYTHON = re.compile(r"python[0-9.]*")  # as it stands in front of scripts, for horovodrun and mpirun

Command = TypeVar("Command", bound=Callable[..., Any])  # click's own way to type decorators


class Ranks(click.ParamType[int]):
    """A number of ranks, or a word for one per core or GPU."""

    name = "ranks"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:  # click hands over strings and defaults alike
        """Read a number or a word."""
        try:
            return ranks_here(str(value))
        except InvalidArgumentError as error:
            self.fail(str(error), param, ctx)


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
    help="How many ranks, on every host: a number, cpu for one per core, gpu for one per GPU, or "
    "auto for gpu where there is one, else cpu.  [default: cpu]",
)
@click.option("-m", "--module", "as_module", is_flag=True, help="SCRIPT is a module: -m pkg.train")
@click.option(
    "--timeout",
    type=float,
    help="Seconds that any call may wait for another rank.  [default: 60]",
)
@click.option(
    "--shutdown-timeout",
    "--shutdown_timeout",
    type=float,
    help="Seconds that ranks have to end when the job is asked to, by SIGTERM say.  [default: 10]",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write down what every rank does, and when, into DIR: see `roundelay view DIR`.",
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
@click.option("--hostfile", metavar="FILE", help="The hosts, in a file; by mpirun, -n in all.")
@click.option(
    "-H",
    "--host",
    "--hosts",
    metavar="HOST:RANKS,…",
    help="The hosts, by name, -n in all; by mpirun, unless all are this one.",
)
@click.option("--mpi-args", default="", metavar="TEXT", help="More words for mpirun.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    size: int | None,
    as_module: bool,
    timeout: float | None,
    shutdown_timeout: float | None,
    trace: Path | None,
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
    host; with --mpi, --hostfile or other hosts it is mpirun's. Both print as they are used to. In
    a pod, what is not said here is taken from PET_*, which Kubeflow's operators set.
    """
    if timeout is not None:
        check_timeout("--timeout", timeout)
    if shutdown_timeout is not None:
        check_timeout("--shutdown-timeout", shutdown_timeout)
    target = [*(_module(script) if as_module else _file(script)), *args]
    given = {name: value for name, value in for_torchrun.items() if value is not None}
    hosts = [] if host is None else read_hosts(host)
    by_mpi = by_mpi or hostfile is not None or not all_here(hosts)
    if given and (by_mpi or hosts):
        raise click.UsageError("either torchrun's options or hosts by name and mpirun's, not both.")
    if mpi_args and not by_mpi:
        raise click.UsageError("--mpi-args is for mpirun: add --mpi.")
    if shutdown_timeout is not None and by_mpi:
        raise click.UsageError("mpirun ends its ranks as it is used to: no --shutdown-timeout.")
    environ = with_timeout(os.environ, timeout)
    if trace is not None:
        if not by_mpi:  # whose ranks may all be on other hosts
            _check_trace(trace)
        environ["RD_TRACE"] = str(trace.absolute())
    if by_mpi:
        # mpirun may start even from within an MPI job.
        environ = clean_environment(environ, elsewhere=True)
        words = _mpi_words(hostfile, host, mpi_args)
        ranks = _ranks_in_all(size, hosts, hostfile)
        exec_launcher(mpirun_command(ranks, words, target, environ), environ)
    handed = {} if hosts else torchrun_options(given, environ)
    ranks = _ranks_in_all(size, hosts) if hosts else size or ranks_of_pod(environ)
    if handed:
        command = torchrun_command(ranks, handed, target, timeout, shutdown_timeout)
        exec_launcher(command, without_others(environ, handed))
    job = secrets.token_hex(8)
    with _held_port() as port:
        environments = rank_environments(environ, ranks, job=job, port=port, timeout=timeout)
        try:
            ending = run_job(
                [sys.executable, *target], environments, shutdown_timeout or SHUTDOWN_S
            )
        finally:
            forget(found_place(environments[0]).job)
    _report(ending)
    raise click.exceptions.Exit(ending.code)


def _ranks_in_all(size: int | None, hosts: list[HostSlots], hostfile: str | None = None) -> int:
    """Return how many ranks there are on hosts that were named; as many as they take, or fewer."""
    if hostfile is not None:
        _refuse_more(size, read_hostfile(hostfile), "--hostfile")
    _refuse_more(size, hosts, "-H")
    return size or slots(hosts) or ranks_here("cpu")


def _refuse_more(size: int | None, hosts: list[HostSlots], option: str) -> None:
    """Refuse more ranks than hosts take, if all of them say how many."""
    most = slots(hosts)
    if size is not None and size > most and hosts and all(host.slots for host in hosts):
        example = f"{hosts[0].name}{':' if option == '-H' else ' slots='}{size}"
        other = "leave out -n" if option == "-H" else f"take -n {most}"
        raise click.UsageError(
            f"-n {size} is more than the {most} ranks that {option} has room for. Say so for more "
            f"of them, as in {example}, or {other}."
        )


def _mpi_words(hostfile: str | None, host: str | None, more: str) -> list[str]:
    named = {"--hostfile": hostfile, "--host": host}
    words = [word for name, value in named.items() if value for word in (name, value)]
    try:
        return [*words, *shlex.split(more)]
    except ValueError as error:
        raise click.UsageError(f"--mpi-args {more!r} can't be read: {error}.") from None


def _check_trace(folder: Path) -> None:
    """Refuse a folder that can't be written into, before ranks start; make it if need be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror or error
        raise click.UsageError(
            f"--trace {folder}: ranks can't write there ({why}). Choose another folder, or make "
            f"room."
        ) from None


def _file(script: str) -> list[str]:
    path = Path(script)
    if path.is_dir():
        raise click.UsageError(f"'{script}' is a directory. For a package: -m {path.name}")
    if not path.exists() and PYTHON.fullmatch(path.name):
        raise click.UsageError(
            f"there is no file '{script}', and ranks run Python by themselves. Leave out "
            f"'{script}': roundelay run train.py, or -m for a module."
        )
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


@contextmanager
def _held_port() -> Iterator[int]:
    """Yield a port at which rank 0 may listen and that nobody is given meanwhile.

    The kernel gives a port that is bound to nobody who asks for any, nor to a connection. With
    SO_REUSEADDR on both sides, who asks for it by number still gets it while this one does not
    listen; stores of torch and most servers set that.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _report(ending: Ending) -> None:
    """Say last, and alone, what the first failing rank said."""
    summary = ending.summary()
    if not summary:
        return
    click.echo(click.style(f"roundelay: {summary}", fg="red", bold=True), err=True)
    for end in [ending.first] if ending.first is not None else ending.lost:
        if ending.signal is None and end.traceback:
            click.echo(end.traceback + b"\n", err=True, nl=False)
