"""What a launcher tells a process by environment variables: its rank, its job, where to meet.

The names are torchrun's, which `roundelay run` sets too. This is the one place that reads them.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roundelay import _core
from roundelay.engines._rendezvous import Job
from roundelay.errors import InvalidArgumentError
from roundelay.launch.local import MOST_RANKS, check_timeout

__all__ = ["Place", "base_directory", "found_place", "found_timeout", "rank_environments"]

#: Set for every process by launchers that are not understood here.
FOREIGN = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's mpiexec",
    "PMIX_RANK": "a PMIx launcher",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "SLURM_PROCID": "Slurm's srun",
}
LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1|\[::1\]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this process among the ranks of a job."""

    rank: int
    job: Job


def found_place(environ: Mapping[str, str]) -> Place:
    """Read which rank this process is, of how many; without a launcher it is the only one.

    >>> place = found_place({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    ...                      "MASTER_PORT": "29500"})
    >>> place.rank, place.job.size
    (1, 2)
    >>> found_place({"RANK": "2", "WORLD_SIZE": "2"})
    Traceback (most recent call last):
        ...
    roundelay.errors.InvalidArgumentError: RANK=2, but WORLD_SIZE=2: ranks go from 0 to 1.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if not given:
        _warn_of_foreign(environ)
        return Place(0, Job("alone", 1, base_directory(environ)))
    if len(given) == 1:
        missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise InvalidArgumentError(
            f"{given[0]}={environ[given[0]]} is set, but {missing} is not. Start with "
            f"`roundelay run` or torchrun, which set both, or unset it to run alone."
        )
    size = _whole(environ, "WORLD_SIZE", 1, MOST_RANKS)
    rank = _whole(environ, "RANK", 0, MOST_RANKS)
    if rank >= size:
        raise InvalidArgumentError(
            f"RANK={rank}, but WORLD_SIZE={size}: ranks go from 0 to {size - 1}."
        )
    if size > 1:
        _check_one_host(environ, size)
    return Place(rank, Job(_job_id(environ, size), size, base_directory(environ)))


def found_timeout(environ: Mapping[str, str]) -> float | None:
    """Read ROUNDELAY_TIMEOUT, which `roundelay run --timeout` sets; None if it is not there."""
    text = environ.get("ROUNDELAY_TIMEOUT")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise InvalidArgumentError(
            f"ROUNDELAY_TIMEOUT={text!r} is not a number of seconds."
        ) from None
    return check_timeout("ROUNDELAY_TIMEOUT", seconds)


def base_directory(environ: Mapping[str, str]) -> Path:
    """Return where ranks of this host look for one another: this user's, or everybody's."""
    own = environ.get("XDG_RUNTIME_DIR", "")
    # It is often set to a directory that is not there: in containers, after su.
    if own and os.access(own, os.W_OK | os.X_OK):
        return Path(own)
    return Path(environ.get("TMPDIR") or tempfile.gettempdir())


def rank_environments(
    environ: Mapping[str, str], size: int, *, job: str, port: int, timeout: float | None
) -> list[dict[str, str]]:
    """Return what `roundelay run` sets for every rank: all that torchrun would, and a little more.

    Scripts for either run under both.
    """
    threads = max(1, _core.available_cores() // size)
    common = {
        "OMP_NUM_THREADS": str(threads),  # unless the user has set it
        **environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves torch's store, not we
        "ROUNDELAY_JOB": job,
        "PYTHONUNBUFFERED": "1",
    }
    if timeout is not None:
        common["ROUNDELAY_TIMEOUT"] = repr(timeout)
    ranks = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    return [{**common, **dict.fromkeys(ranks, str(rank))} for rank in range(size)]


def _whole(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise InvalidArgumentError(
            f"{name}={text[:60]!r} is not a whole number from {least} to {most}."
        )
    return int(text)


def _job_id(environ: Mapping[str, str], size: int) -> str:
    """Return what only the processes of one job have in common."""
    named = [environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "ROUNDELAY_JOB")]
    run = environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if size > 1 and not named[2] and not (named[0] and named[1]):
        missing = "MASTER_ADDR" if not named[0] else "MASTER_PORT"
        raise InvalidArgumentError(
            f"WORLD_SIZE={size}, but {missing} is not set, so the ranks can't find one another. "
            f"Start with `roundelay run` or torchrun, or set MASTER_ADDR=127.0.0.1 and a "
            f"MASTER_PORT that no other job has."
        )
    return "\n".join((*named, *run))


def _check_one_host(environ: Mapping[str, str], size: int) -> None:
    """Refuse a job whose ranks are not all on this host."""
    way_out = "This engine is for the ranks of one host; start all of them here."
    if "LOCAL_RANK" in environ:
        _whole(environ, "LOCAL_RANK", 0, MOST_RANKS)
    if "LOCAL_WORLD_SIZE" in environ:
        local = _whole(environ, "LOCAL_WORLD_SIZE", 1, MOST_RANKS)
        if local != size:
            raise InvalidArgumentError(
                f"LOCAL_WORLD_SIZE={local}, but WORLD_SIZE={size}: this job has several hosts. "
                f"{way_out}"
            )
        return
    address = environ.get("MASTER_ADDR", "")
    if address and not _is_this_host(address):
        raise InvalidArgumentError(f"MASTER_ADDR={address} is not this host. {way_out}")


def _is_this_host(address: str) -> bool:
    if LOOPBACK.fullmatch(address) or address in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, where in found:
        # Only an address of this host can be bound to.
        with socket.socket(family, kind) as trial:
            try:
                trial.bind((where[0], 0, *where[2:]))
            except OSError:
                continue
            return True
    return False


def _warn_of_foreign(environ: Mapping[str, str]) -> None:
    seen = [name for name in FOREIGN if name in environ]
    if seen:
        warnings.warn(
            f"{seen[0]}={environ[seen[0]]} is set, as {FOREIGN[seen[0]]} does, but RANK is not: "
            f"this process runs alone, as rank 0 of 1. Start it with `roundelay run -n N` or "
            f"torchrun.",
            RuntimeWarning,
            stacklevel=4,
        )
