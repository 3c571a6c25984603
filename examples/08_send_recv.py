"""Messages between two ranks: around a ring, and from whoever is ready first.

Prints:

    rank 0 got the token from rank 3, after [3 2 1 0]
    3 answers, from ranks 1, 2, 3: 1, 4, 9
"""

import numpy as np

import roundelay as rd

ANSWER = 7  # a tag: what kind of message this is


def pass_on(comm: rd.Communicator) -> str:
    """Hand everybody's token one rank up, once around."""
    token, seen = np.array([comm.rank]), []
    for _ in range(comm.size):
        up, down = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.sendrecv(token.copy(), up, token, down)
        seen.append(token[0])
    return f"rank {comm.rank} got the token from rank {down}, after {np.array(seen)}"


def ask_around(comm: rd.Communicator) -> str:
    """Let every rank answer rank 0 when it is ready; the order is theirs."""
    if comm.rank > 0:
        comm.send(np.array([comm.rank, comm.rank**2]), dst=0, tag=ANSWER)
        return ""
    answers = sorted(
        tuple(comm.recv(np.empty(2, int), rd.ANY, tag=ANSWER).tolist()) for _ in range(3)
    )
    who = ", ".join(str(rank) for rank, _ in answers)
    what = ", ".join(str(answer) for _, answer in answers)
    return f"{len(answers)} answers, from ranks {who}: {what}"


for task in (pass_on, ask_around):
    print(rd.run(task, ranks=4)[0])
