"""Build an all-reduce for two hosts out of parts: inside each, between them, inside again.

Prints:

    proved: contiguous
    between the hosts 8192 bytes cross; with a flat ring 12288
"""

from roundelay.algorithms import algorithms
from roundelay.collectives.all_reduce import all_reduce
from roundelay.networks import networks
from roundelay.schedule import Schedule, nest, price, prove, sequence

HOSTS = [[0, 1], [2, 3]]
ACROSS = [[0, 2], [1, 3]]
NBYTES = 4096

scatter = algorithms.load("reduce_scatter_direct")
gather = algorithms.load("all_gather_direct")
exchange = algorithms.load("all_reduce_one_shot")

# Inside a host, local rank l gets half l of the data; only that half goes to the other host.
transfers = sequence(
    nest(HOSTS, scatter),
    nest(ACROSS, exchange, chunks=lambda local, _: local),
    nest(HOSTS, gather),
)
mine = Schedule(all_reduce, 4, transfers, parts=2, name="two hosts")
print("proved:", prove(mine).order)


def crossing(schedule: Schedule) -> int:
    """Count the bytes on the two links between host and network that lead out."""
    links = price(schedule, NBYTES, network=networks.load("hosts")(4, per_host=2)).links
    return sum(nbytes for link, nbytes in links.items() if link.dst == "network")


ring = algorithms.load("all_reduce_ring").schedule(4)
print(f"between the hosts {crossing(mine)} bytes cross; with a flat ring {crossing(ring)}")
