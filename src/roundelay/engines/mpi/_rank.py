"""A rank that mpirun started: runs schedules over MPI for a program that is not one itself.

Started as `python -m roundelay.engines.mpi._rank ADDRESS`. Requests and answers go through the
socket there; data between ranks goes through MPI.
"""

from __future__ import annotations

import sys
import traceback

from roundelay.engines._serving import TIMEOUT_S, ToldSchedules, serve
from roundelay.engines.mpi.engine import Mpi


def main(address: str) -> None:
    """Be a rank until there are no more requests."""
    schedules = ToldSchedules()
    engine = Mpi.of_world(schedules, TIMEOUT_S)
    try:
        serve(engine, schedules, address)
    except Exception:  # noqa: BLE001 - mpirun tells the program
        traceback.print_exc()
        sys.stderr.flush()
        engine.abort()


if __name__ == "__main__":
    main(sys.argv[1])
