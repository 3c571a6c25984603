"""Four ranks as a grid of two by two: reduce along the rows, then along the columns.

Prints:

    rank 0: row 1, column 2, all 6
    rank 1: row 1, column 4, all 6
    rank 2: row 5, column 2, all 6
    rank 3: row 5, column 4, all 6
"""

import numpy as np

import roundelay as rd


def work(comm: rd.Communicator) -> str:
    """Make both groups of this rank; ranks with the same color are one group."""
    row = comm.split(color=comm.rank // 2)
    column = comm.split(color=comm.rank % 2)
    in_row = row.all_reduce(np.array([comm.rank]))[0]
    in_column = column.all_reduce(np.array([comm.rank]))[0]
    everyone = column.all_reduce(np.array([in_row]))[0]
    return f"rank {comm.rank}: row {in_row}, column {in_column}, all {everyone}"


for line in rd.run(work, ranks=4):
    print(line)
