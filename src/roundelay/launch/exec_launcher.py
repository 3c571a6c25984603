"""Ranks on several hosts are started by those who can: torchrun, or mpirun."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from typing import NoReturn

from roundelay.engines.mpi.mpirun import HOSTFILES, find_mpirun, is_open_mpi
from roundelay.errors import InvalidArgumentError, MissingPackageError

__all__ = ["exec_launcher", "mpirun_command", "torchrun_command", "with_timeout"]

#: By these mpirun is told of hosts, whichever it is.
NAMES_HOSTS = ("H", "f", "host", "hosts", "hostfile", "machinefile", "machine", "default-hostfile")
#: What ranks of mpirun on other hosts should know too.
HANDED = (
    *("ROUNDELAY_TIMEOUT", "ROUNDELAY_SECRET", "ROUNDELAY_SECRET_FILE", "ROUNDELAY_MAX_ISA"),
    "ROUNDELAY_PEER_MEMORY",
    "RD_TRACE",
)

SHUTDOWN_SINCE = (2, 15)  # of torch: since then torchrun can be told how long ranks have to end
#: By what hosts find one another: what torchrun has itself; packages may add others.
MEETINGS = ("static", "c10d", "etcd", "etcd-v2")
#: What torchrun calls the time for hosts to find one another: without, and with a backend.
WAITS = ("timeout", "join_timeout", "read_timeout")


def torchrun_command(
    size: int,
    options: Mapping[str, str],
    target: Sequence[str],
    timeout: float | None = None,
    shutdown_timeout: float | None = None,
) -> list[str]:
    """Return the words by which torchrun starts `size` ranks on this host, as one of several.

    >>> torchrun_command(2, {"nnodes": "2", "node_rank": "1"}, ["train.py", "--lr", "1"])[3:]
    ['--nproc-per-node', '2', '--nnodes', '2', '--node-rank', '1', 'train.py', '--lr', '1']
    >>> torchrun_command(2, {"rdzv_conf": "read_timeout=9"}, ["train.py"], timeout=1.5)[5:]
    ['--rdzv-conf', 'timeout=2,join_timeout=2,read_timeout=9', 'train.py']
    """
    if find_spec("torch") is None:
        raise MissingPackageError("To start several hosts", "torch")
    _check_backend(options.get("rdzv_backend", "static"))
    words = ["--nproc-per-node", str(size)]
    if shutdown_timeout is not None:
        words += ["--shutdown-timeout", _whole_seconds(shutdown_timeout)]
    for name, value in _waiting(options, timeout).items():
        words += [f"--{name.replace('_', '-')}", value]
    return [sys.executable, "-m", "roundelay.launch._torchrun", *words, *target]


def _check_backend(name: str) -> None:
    """Raise if torchrun knows no way by that name in which hosts meet."""
    known = [*MEETINGS, *entry_points(group="torchrun.handlers").names]
    if name not in known:
        raise InvalidArgumentError(
            f"Hosts can't meet by {name[:60]!r}, as --rdzv-backend or PET_RDZV_BACKEND says. "
            f"torchrun knows {', '.join(known)}: take c10d, with the host of rank 0 as "
            f"--rdzv-endpoint, or leave it out and number the hosts by --node-rank."
        )


def _whole_seconds(shutdown_timeout: float) -> str:
    found = version("torch")
    if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < SHUTDOWN_SINCE:
        raise InvalidArgumentError(
            f"--shutdown-timeout {shutdown_timeout:g}: over several hosts ranks are ended by "
            f"torchrun, which gives them 30 s in torch {found}; since torch 2.15 it can be said. "
            f"Leave it out, or install a newer torch."
        )
    return str(math.ceil(shutdown_timeout))


def _waiting(options: Mapping[str, str], timeout: float | None) -> dict[str, str]:
    """Return options by which hosts wait so long for one another, where nothing else was said."""
    if timeout is None:
        return dict(options)
    conf = options.get("rdzv_conf", "")
    named = {word.partition("=")[0].strip() for word in conf.split(",")}
    limits = [f"{name}={math.ceil(timeout)}" for name in WAITS if name not in named]
    return {**options, "rdzv_conf": ",".join([*limits, *([conf] if conf else [])])}


def mpirun_command(
    size: int, words: Sequence[str], target: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """Return the words by which mpirun starts `size` ranks in all, on the hosts that it is told.

    Without any in `words` those of the hostfile that an operator for Kubernetes has put there:
    Open MPI 5 does not read the variable that names it, and would start all ranks on this host.
    """
    path = find_mpirun()
    named = any(word.startswith("-") and word.lstrip("-") in NAMES_HOSTS for word in words)
    files = [environ[name] for name in HOSTFILES if environ.get(name) and not named]
    hosts = ["--hostfile", files[0]] if files else []
    # Hydra's ranks inherit all variables; Open MPI's, on other hosts, only those that are named.
    handed = [name for name in HANDED if name in environ] if is_open_mpi(path) else []
    exported = [word for name in handed for word in ("-x", name)]
    return [path, "-n", str(size), *hosts, *exported, *words, sys.executable, *target]


def with_timeout(environ: Mapping[str, str], timeout: float | None) -> dict[str, str]:
    """Return an environment that tells every rank how long to wait for the others."""
    wait = {} if timeout is None else {"ROUNDELAY_TIMEOUT": repr(timeout)}
    return {**environ, **wait}


def exec_launcher(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become another program: its signals, its output and its exit code are then ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), dict(environ))  # noqa: S606 - the user's launcher
