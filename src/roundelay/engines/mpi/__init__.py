"""Ranks as processes of MPI, whoever started them."""

from roundelay.engines.mpi.engine import Mpi

__all__ = ["Mpi"]
