"""One rank makes another call than the others: everybody is told who called what, and where.

Prints:

    The ranks made different calls:
      ranks 0, 1, 3: all_reduce #1 float32[1000] op=sum (one_shot) at 09_find_the_rank.py:27
      rank 2: broadcast #1 float32[1000] root=0 (direct) at 09_find_the_rank.py:25
    The group is broken: every later call fails at once, too.
"""

from pathlib import Path

import numpy as np

import roundelay as rd
from roundelay.errors import CollectiveMismatch

HASTY = 2


def train(comm: rd.Communicator) -> str:
    """Sum gradients, or on one rank wait for the next weights: that can't end well."""
    try:
        if comm.rank == HASTY:
            comm.broadcast(np.ones(1000, np.float32))
        else:
            comm.all_reduce(np.ones(1000, np.float32))
    except CollectiveMismatch as error:
        told = str(error).replace(f"{Path(__file__).parent}/", "")
    try:
        comm.barrier()
    except CollectiveMismatch:
        told += "\nThe group is broken: every later call fails at once, too."
    return told


messages = rd.run(train, ranks=4)
print(messages[0])
