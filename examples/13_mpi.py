"""The same communicator on MPI's ranks, with MPI's own collectives where it has them.

    mpirun -n 4 python 13_mpi.py

A script that says `rd.init()` runs under mpirun as well: then ranks of one host share memory, and
MPI connects the hosts. With `engine="mpi"` everything goes through MPI. On four ranks it ends with
`the mean of all is 1.5, the largest is 3.0 on rank 3`.

Alone it is a job of one rank. Prints:

    rank 0 of 1 got 0 from rank 0
    the mean of all is 0.0, the largest is 0.0 on rank 0
"""

import numpy as np

import roundelay as rd

comm = rd.init(engine="mpi")
right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

got = comm.sendrecv(np.array([comm.rank]), right, np.zeros(1, int), left)
print(f"rank {comm.rank} of {comm.size} got {got[0]} from rank {left}", flush=True)

# MPI adds, and we divide; it has no place of the largest beyond 2**31: that is our schedule.
mean = comm.start.all_reduce(np.array([float(comm.rank)]), op="avg")
largest = comm.reduce(np.array([float(comm.rank)]), op="maxloc")
mean = mean.wait()
if largest is not None:
    value, place = largest.values[0], largest.locations[0]
    print(f"the mean of all is {mean[0]}, the largest is {value} on rank {place}")
