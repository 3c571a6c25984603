"""What a launcher tells a process by environment variables: its rank, its job, the rendezvous.

This is the one place that reads torchrun's names, which `roundelay run` sets too, and the MPIs'.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from roundelay import _core
from roundelay.errors import InvalidArgumentError
from roundelay.launch._variables import whole_variable
from roundelay.launch.local import MOST_RANKS, check_timeout
from roundelay.launch.pods import refuse_alone, refuse_pod_as_rank
from roundelay.rendezvous.one_host import Job
from roundelay.rendezvous.place import JobPlace

__all__ = [
    "StoreAt",
    "base_directory",
    "found_place",
    "found_store",
    "found_timeout",
    "rank_environments",
    "refuse_split",
]

#: Set for every process by launchers that are not understood here.
FOREIGN = {"SLURM_PROCID": "Slurm's srun"}
#: Rank, number of ranks, and number of them on this host, as the MPIs say it; in this order.
OF_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "", ""),
)
LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1|\[::1\]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoreAt:
    """Where torch's store of a job is, whether this process serves it, and our corner of it."""

    host: str
    port: int
    serves: bool
    corner: str
    server: str = "rank 0"  # who serves it, in words


def found_place(environ: Mapping[str, str]) -> JobPlace:
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
    for name, least in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        if name in environ:
            whole_variable(environ, name, least, MOST_RANKS)
    present = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if not present:
        by_mpi = _place_in_mpi(environ)
        if by_mpi is None:
            refuse_alone(environ)
            _warn_of_foreign(environ)
        return by_mpi or JobPlace(0, Job("alone", 1, base_directory(environ)))
    if len(present) == 1:
        missing = "WORLD_SIZE" if present == ["RANK"] else "RANK"
        raise InvalidArgumentError(
            f"{present[0]}={environ[present[0]]} is set, but {missing} is not. Start with "
            f"`roundelay run` or torchrun, which set both, or unset it to run alone."
        )
    size = whole_variable(environ, "WORLD_SIZE", 1, MOST_RANKS)
    rank = whole_variable(environ, "RANK", 0, MOST_RANKS)
    refuse_pod_as_rank(environ)
    if rank >= size:
        raise InvalidArgumentError(
            f"RANK={rank}, but WORLD_SIZE={size}: ranks go from 0 to {size - 1}."
        )
    by: Literal["host", "store"] = "store" if size > 1 and _spread(environ, size) else "host"
    return JobPlace(rank, Job(_job_id(environ, size), size, base_directory(environ)), by)


def refuse_split(environ: Mapping[str, str], size: int, mpi: str) -> None:
    """Raise if a launcher said that there are more ranks than the one that this MPI knows of."""
    names = [("RANK", "WORLD_SIZE", ""), *OF_MPI]
    said = next((one for one in names if one[0] in environ), None)
    if size > 1 or said is None:
        return
    for name, most in ((said[1], 1), (said[0], 0)):
        if name in environ and whole_variable(environ, name, 0, MOST_RANKS) > most:
            raise InvalidArgumentError(
                f"{name}={environ[name]} says that a launcher started several ranks, but the MPI "
                f"that mpi4py uses ({mpi}) knows of this process only: it would train alone, as "
                f"rank 0 of 1, and so would every other. Start it with the mpirun of that MPI, "
                f"install mpi4py for the MPI of your launcher, or use `roundelay run` or torchrun "
                f"without engine='mpi'; or unset {said[0]} to run alone."
            )


def found_store(environ: Mapping[str, str], place: JobPlace) -> StoreAt:
    """Read where torch's store is: torchrun serves one, else rank 0 does.

    >>> place = JobPlace(1, Job("", 2, Path()))
    >>> found_store({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, place)
    StoreAt(host='node0', port=29500, serves=False, corner='roundelay/0', server='rank 0')
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise InvalidArgumentError(
                f"{name} is not set, so the ranks can't find one another. Start with `roundelay "
                f"run` or torchrun, or set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a "
                f"port that is free there."
            )
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    port = whole_variable(environ, "MASTER_PORT", 1, 65535)
    serves, corner = place.rank == 0 and not agent, f"roundelay/{attempt}"
    server = "torchrun" if agent else "rank 0"
    return StoreAt(environ["MASTER_ADDR"], port, serves, corner, server)


def found_timeout(environ: Mapping[str, str]) -> float | None:
    """Read ROUNDELAY_TIMEOUT, which `roundelay run --timeout` sets; None if it is not there."""
    text = environ.get("ROUNDELAY_TIMEOUT")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise InvalidArgumentError(
            f"ROUNDELAY_TIMEOUT={text[:60]!r} is not a number of seconds. Set it to one, such as "
            f"60, or unset it."
        ) from None
    return check_timeout("ROUNDELAY_TIMEOUT", seconds)


def base_directory(environ: Mapping[str, str]) -> Path:
    """Return where ranks of this host look for one another: this user's, or everybody's."""
    own = environ.get("XDG_RUNTIME_DIR", "")
    # It is often set to a directory that is not there: in containers, after su.
    if own and os.access(own, os.W_OK | os.X_OK):
        return Path(own)
    if environ.get("TMPDIR"):
        return Path(environ["TMPDIR"])
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none can be written: who needs one says so
        return Path("/tmp")  # noqa: S108 - only the name of one


def rank_environments(
    environ: Mapping[str, str], size: int, *, job: str, port: int, timeout: float | None
) -> list[dict[str, str]]:
    """Return what `roundelay run` sets for every rank: all that torchrun would, and more."""
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
        "ROUNDELAY_SECRET": environ.get("ROUNDELAY_SECRET") or secrets.token_hex(32),
        "PYTHONUNBUFFERED": "1",
    }
    if timeout is not None:
        common["ROUNDELAY_TIMEOUT"] = repr(timeout)
    ranks = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    return [{**common, **dict.fromkeys(ranks, str(rank))} for rank in range(size)]


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


def _spread(environ: Mapping[str, str], size: int) -> bool:
    """Tell whether the ranks may be on several hosts."""
    if "LOCAL_WORLD_SIZE" in environ:
        local = whole_variable(environ, "LOCAL_WORLD_SIZE", 1, MOST_RANKS)
        if local > size:
            raise InvalidArgumentError(
                f"LOCAL_WORLD_SIZE={local}, but WORLD_SIZE={size}: no host has more than all ranks."
            )
        return local < size
    # Nobody can reach a loopback from elsewhere.
    address = environ.get("MASTER_ADDR", "")
    return bool(address) and not LOOPBACK.fullmatch(address)


def _place_in_mpi(environ: Mapping[str, str]) -> JobPlace | None:
    """Return the place that an MPI gave this process; None if none did."""
    for rank_name, size_name, local_name in OF_MPI:
        if rank_name not in environ:
            continue
        job, named = environ.get("PMIX_NAMESPACE", ""), environ.get(size_name)
        if job and named and named == environ.get(local_name):
            size = whole_variable(environ, size_name, 1, MOST_RANKS)
            rank = whole_variable(environ, rank_name, 0, size - 1)
            return JobPlace(rank, Job(f"mpi\n{job}", size, base_directory(environ)))
        return JobPlace(0, Job("mpi", 1, base_directory(environ)), "mpi")
    return None


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
