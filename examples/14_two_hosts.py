"""One script on one host, or on several: rd.init() finds out where its ranks are.

On one host, where all ranks share memory:

    roundelay run -n 4 14_two_hosts.py

On two, node0 and node1, where ranks share memory inside each and Gloo joins the two:

    roundelay run -n 2 --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 …
    roundelay run -n 2 --nnodes 2 --node-rank 1 --master-addr node0 --master-port 29500 …

Prints:

    [0] rank 0 of 4: the mean gradient is 2.5 everywhere, the largest loss is on rank 3
    [1] rank 1 of 4: the mean gradient is 2.5 everywhere, the largest loss is on rank 3
    [2] rank 2 of 4: the mean gradient is 2.5 everywhere, the largest loss is on rank 3
    [3] rank 3 of 4: the mean gradient is 2.5 everywhere, the largest loss is on rank 3
"""

import numpy as np

import roundelay as rd

comm = rd.init()

# Large: cut into shares, summed inside every host, then share by share between hosts.
gradient = np.full(1_000_000, comm.rank + 1.0, np.float32)
comm.all_reduce(gradient, "avg")

loss = comm.all_reduce(np.array([0.1 * comm.rank]), "maxloc")
print(
    f"rank {comm.rank} of {comm.size}: the mean gradient is {gradient[0]} everywhere, "
    f"the largest loss is on rank {loss.locations[0]}"
)
