"""Traces: each rank writes down what it does, in a file of its own in one folder."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roundelay import _core
from roundelay.collectives import collectives
from roundelay.communicator import Communicator
from roundelay.communicator.selection import SHORT_NAMES
from roundelay.errors import InvalidArgumentError, RecordError, ranks_text
from roundelay.records import read_rank
from roundelay.reductions import DTYPES, REDUCTIONS

__all__ = ["found_trace", "is_traced_here", "start_trace"]

TOKEN = 16  # bytes that tell jobs apart


def found_trace(environ: Mapping[str, str]) -> Path | None:
    """Read RD_TRACE, the folder to write traces into, which `roundelay run --trace` sets.

    >>> found_trace({"RD_TRACE": "/tmp/traces"}), found_trace({})
    (PosixPath('/tmp/traces'), None)
    """
    text = environ.get("RD_TRACE", "")
    return Path(text).absolute() if text else None


def start_trace(comm: Communicator, folder: Path | None) -> None:
    """Have this rank write what it does into a file in `folder`, if there is to be one.

    Every rank calls it. All raise, with the reason, where one of them can't write there. The last
    that it does is a barrier: by the time at which ranks leave it, the clocks of several hosts are
    put side by side.
    """
    if folder is None:
        return
    token = np.frombuffer(secrets.token_bytes(TOKEN), np.uint8).copy()
    comm.broadcast(token)
    trace, problem = _made(comm, folder, token.tobytes())
    failed = np.flatnonzero(comm.all_gather(np.array([bool(problem)]))).tolist()
    if failed:
        why = f": {problem}" if problem else ""
        raise InvalidArgumentError(
            f"RD_TRACE={folder}: {ranks_text(failed)} can't write there{why}. Choose another "
            f"folder, or make room."
        )
    if trace is not None:
        comm.barrier()
        trace.align()
        comm.start_trace(trace)


def _made(comm: Communicator, folder: Path, job: bytes) -> tuple[_core.Trace | None, str]:
    """Make the file of this rank, or say why that can't be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"rank-{comm.rank}.rdtrace"
        trace = _core.Trace(str(path), comm.rank, comm.size, job)
    except OSError as error:
        return None, os.strerror(error.errno or 0)
    trace.describe(socket.gethostname(), sys.argv[0] if sys.argv else "")
    tables: dict[str, Sequence[Any]] = {
        "collective": collectives.names(),
        "algorithm": SHORT_NAMES,
        "dtype": tuple(DTYPES),
        "op": tuple(REDUCTIONS),
    }
    for table, names in tables.items():
        trace.set_table(table, [str(name) for name in names])
    return trace, ""


def is_traced_here(folder: Path, rank: int) -> bool:
    """Tell whether this process writes the file of a rank already, for another communicator."""
    try:
        return read_rank(folder / f"rank-{rank}.rdtrace").pid == os.getpid()
    except RecordError:
        return False
