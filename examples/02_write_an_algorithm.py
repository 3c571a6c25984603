"""Write an all-reduce of your own in a script, prove it, price it and draw it.

The sum walks up a line of ranks and the result walks back. In a file of its own in the algorithms
folder, the same function would be listed, proved and drawn by the command line too.

Prints:

    proved: rank_order, 3 folds deep
    6 steps, 6 messages, a rank sends at most 8192 bytes
    GPU2 after step 3: a0+a1+a2
    an SVG that starts with <svg
"""

from collections.abc import Iterator

from roundelay.algorithms import implements
from roundelay.collectives.all_reduce import all_reduce
from roundelay.schedule import Cell, Transfer, price, prove
from roundelay.view import picture
from roundelay.view.svg import svg


@implements(all_reduce)
def all_reduce_line(size: int) -> Iterator[Transfer]:
    """Add up from rank to rank, then hand the result back down."""
    for rank in range(1, size):
        yield Transfer(rank - 1, src=rank - 1, dst=rank, chunk=0, op="reduce")
        yield Transfer(2 * size - 2 - rank, src=rank, dst=rank - 1, chunk=0)


line = all_reduce_line.schedule(size=4)

proof = prove(line)
print(f"proved: {proof.order}, {proof.folds} folds deep")

cost = price(line, nbytes=4096)
print(f"{len(cost.steps)} steps, {cost.messages} messages, ", end="")
print(f"a rank sends at most {max(cost.sent)} bytes")

drawn = picture(line, price=cost)
print("GPU2 after step 3:", drawn.frames[3].cells[Cell(2, 0)].text)
print("an SVG that starts with", svg([drawn])[:4])
