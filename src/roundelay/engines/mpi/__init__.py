"""Ranks as processes of MPI, whoever started them."""

from roundelay.engines.mpi._runner import Mpi

__all__ = ["Mpi"]
