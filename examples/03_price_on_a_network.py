"""Which all-reduce is the quickest? It depends on the message and on the network.

Prices every algorithm on two hosts of eight GPUs, and on one switch, for three sizes of message.

Prints:

    hosts  1 KiB: one_shot 9 µs, recursive_doubling 9 µs, two_shot 12 µs
    hosts  1 MiB: hierarchical 111 µs, tree 144 µs, double_binary_tree 144 µs
    hosts  1 GiB: hierarchical 74864 µs, ring 85744 µs, double_binary_tree 119034 µs
    switch 1 KiB: one_shot 3 µs, two_shot 4 µs, parameter_server 5 µs
    switch 1 MiB: two_shot 88 µs, halving_doubling 100 µs, hierarchical 100 µs
    switch 1 GiB: two_shot 85568 µs, halving_doubling 85580 µs, hierarchical 85580 µs
"""

from roundelay.algorithms import algorithms
from roundelay.networks import networks
from roundelay.schedule import price

SIZE = 16

found = {
    each.short_name: each.schedule(SIZE)
    for each in algorithms
    if each.collective.name == "all_reduce"
}
for name in ("hosts", "switch"):
    network = networks.load(name)(SIZE)
    for nbytes, label in ((1 << 10, "1 KiB"), (1 << 20, "1 MiB"), (1 << 30, "1 GiB")):
        seconds = {
            each: price(schedule, nbytes, network=network).seconds or 0.0
            for each, schedule in found.items()
        }
        best = sorted(seconds, key=lambda each: seconds[each])[:3]
        shown = ", ".join(f"{each} {seconds[each] * 1e6:.0f} µs" for each in best)
        print(f"{name:<6} {label}: {shown}")
