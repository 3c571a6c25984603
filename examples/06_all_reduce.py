"""Four processes add up their arrays: in place, into another array, and around a ring.

Prints:

    rank 0: [10. 10.] in place, mean [2.5 2.5], by a ring [10. 10.]
    rank 1: [10. 10.] in place, mean [2.5 2.5], by a ring [10. 10.]
    rank 2: [10. 10.] in place, mean [2.5 2.5], by a ring [10. 10.]
    rank 3: [10. 10.] in place, mean [2.5 2.5], by a ring [10. 10.]
"""

import numpy as np

import roundelay as rd


def work(comm: rd.Communicator) -> str:
    """Be one of the ranks; what is returned comes back to the program that started them."""
    x = np.full(2, comm.rank + 1.0)
    mean = comm.all_reduce(x, op="avg", out=np.empty(2))  # x stays as it was
    ringed = comm.all_reduce(x.copy(), algorithm="ring")
    comm.all_reduce(x)
    return f"rank {comm.rank}: {x} in place, mean {mean}, by a ring {ringed}"


for line in rd.run(work, ranks=4):
    print(line)
