"""Reduce one layer's gradients while the next layer is still being computed.

What is started runs in a native thread, in the order of the calls, while Python goes on.

Prints:

    3 layers reduced while they were made, last one first
    layer 0: 3.0  layer 1: 6.0  layer 2: 9.0
"""

import numpy as np

import roundelay as rd

LAYERS = 3


def gradient(layer: int, rank: int) -> np.ndarray:
    """Pretend to compute: rank r has (r + 1) (layer + 1) everywhere."""
    return np.full(100_000, (rank + 1.0) * (layer + 1))


def backward(comm: rd.Communicator) -> list[float]:
    """Start an all-reduce as soon as a gradient is there; wait for all of them at the end."""
    handles = {}
    for layer in reversed(range(LAYERS)):
        handles[layer] = comm.start.all_reduce(gradient(layer, comm.rank))
    return [float(handles[layer].wait()[0]) for layer in range(LAYERS)]


results = rd.run(backward, ranks=2)
print(f"{LAYERS} layers reduced while they were made, last one first")
print("  ".join(f"layer {layer}: {value}" for layer, value in enumerate(results[0])))
