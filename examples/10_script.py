"""A script that a launcher starts once for every rank; alone it is a job of one rank.

    roundelay run -n 4 10_script.py

`torchrun --nproc-per-node 4 10_script.py` starts it as well.

Prints:

    [0] rank 0 of 4 has rows 0 to 2: the sum of all is 45
    [1] rank 1 of 4 has rows 3 to 5: the sum of all is 45
    [2] rank 2 of 4 has rows 6 to 7: the sum of all is 45
    [3] rank 3 of 4 has rows 8 to 9: the sum of all is 45
"""

import numpy as np

import roundelay as rd

comm = rd.init()

mine = np.array_split(np.arange(10), comm.size)[comm.rank]
total = comm.all_reduce(np.array([mine.sum()]))
where = f"rank {comm.rank} of {comm.size} has rows {mine[0]} to {mine[-1]}"
print(f"{where}: the sum of all is {total[0]}")
