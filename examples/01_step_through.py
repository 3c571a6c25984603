"""Run a ring all-reduce on three ranks and look at every step.

Prints:

    start   [1] [1] [1]   [2] [2] [2]   [3] [3] [3]
    step 1  [1] [1] [4]   [3] [2] [2]   [3] [5] [3]
    step 2  [1] [6] [4]   [3] [2] [6]   [6] [5] [3]
    step 3  [6] [6] [4]   [3] [6] [6]   [6] [5] [6]
    step 4  [6] [6] [6]   [6] [6] [6]   [6] [6] [6]
"""

import numpy as np

from roundelay.algorithms import algorithms
from roundelay.engines.reference import Reference
from roundelay.schedule import Cell

ring = algorithms.load("all_reduce_ring").schedule(size=3)
inputs = [np.full(3, value) for value in (1, 2, 3)]

for step, cells in enumerate(Reference.trace(ring, inputs)):
    ranks = [
        " ".join(str(cells[Cell(rank, chunk)]) for chunk in range(ring.chunks))
        for rank in range(ring.size)
    ]
    label = f"step {step}" if step else "start"
    print(f"{label:<7}", "   ".join(ranks))
