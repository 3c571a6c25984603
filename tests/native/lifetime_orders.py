"""Random orders of beginning, waiting, dropping, closing, forking and ending, one process for each.

    python tests/native/lifetime_orders.py 0 1000

runs the orders with these seeds. A child is forked for each, and ends as an interpreter does. An
order is clean if nobody crashes or hangs, if whatever has a result has the right one, and if all
that is raised is an error of ours. The seed of one that is not is printed, with what it did.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import roundelay as rd
from roundelay.errors import CommunicationError, RankFailed, RoundelayError

LIMIT_S = 120  # for one order; a hang, as far as this machine can tell
TIMEOUT_S = 60.0
#: The address sanitizer's own allocator may be locked in a child for good.
FORKS = "libasan" not in os.environ.get("LD_PRELOAD", "")
GOOD_ENDS = ("return", "close", "close twice", "close elsewhere", "daemon", "cycle", "exit")
BAD_ENDS = ("raise", "_exit", "killed")
kept: list[Any] = []  # what outlives its rank, up to the end of the interpreter


class Rank:
    """One rank's part: what all do alike is drawn by `same`, what each does by itself by `own`."""

    def __init__(self, comm: Any, seed: int) -> None:
        self.comm, self.same = comm, random.Random(seed)
        self.own = random.Random(f"{seed}/{comm.rank}")
        self.groups = [comm]
        self.handles: list[tuple[Any, Callable[[Any], bool]]] = []

    def keep(self, handle: Any, right: Callable[[Any], bool]) -> None:
        if self.own.random() < 0.6:
            self.handles.append((handle, right))
            if self.own.random() < 0.2:
                kept.append(handle)

    def begin(self) -> None:
        group = self.same.choice(self.groups)
        numel = self.same.choice((1, 50, 9_000, 60_000))
        where = self.same.random()
        x = group.empty(numel) if where < 0.3 else np.empty(numel)
        x[:] = group.rank + 1.0
        due = group.size * (group.size + 1) / 2
        self.keep(group.start.all_reduce(x), lambda got: bool((got == due).all()))

    def mail(self) -> None:
        group = self.same.choice(self.groups)
        numel, tag = self.same.choice((1, 40_000)), self.same.randrange(3)
        # Everybody's messages are alike, so that it does not matter who takes which.
        right = lambda got: bool((got == numel).all())  # noqa: E731 - used once
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self.keep(group.start.send(np.full(numel, float(numel)), after, tag), right)
        source = before if self.same.random() < 0.7 or group.size > 2 else rd.ANY
        self.keep(group.start.recv(np.empty(numel), source, tag), right)

    def call(self) -> None:
        group = self.same.choice(self.groups)
        x = np.full(self.same.choice((1, 30_000)), 1.0)
        if not (group.all_reduce(x) == group.size).all():
            raise ArithmeticError("a call at once gave a wrong result")

    def split(self) -> None:
        color = self.same.choice((0, self.comm.rank % 2))
        self.groups.append(self.same.choice(self.groups).split(color))

    def let_go(self) -> None:
        """Close a group, or drop it; each rank does which it likes."""
        if len(self.groups) > 1:
            group = self.groups.pop()
            if self.own.random() < 0.5:
                group.close()

    def look(self) -> None:
        if self.handles:
            handle, right = self.handles.pop(self.own.randrange(len(self.handles)))
            handle.done()
            if self.own.random() < 0.5 and not right(handle.wait()):
                raise ArithmeticError("a call in the background gave a wrong result")

    def collect(self) -> None:
        gc.collect()

    def fork(self) -> None:
        if self.own.random() < 0.3 and FORKS:
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(CommunicationError):
                    self.comm.barrier()
                    os._exit(3)
                self.comm.close()
                self.groups.clear()
                self.handles.clear()
                gc.collect()
                os._exit(0)
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                raise ArithmeticError("a forked child was not refused, or crashed")

    def end(self, how: str) -> None:
        """End as told; handles must then have results, or errors of ours."""
        comm = self.comm
        if how == "raise":
            raise KeyError("on purpose")
        if how == "_exit":
            os._exit(7)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(0)
        if how == "daemon":
            threading.Thread(
                target=_quietly(lambda: comm.recv(np.empty(1), rd.ANY, 9)), daemon=True
            ).start()
        if how == "cycle":
            kept.append([comm, self.handles, kept])
        if how == "close elsewhere":
            closer = threading.Thread(target=_quietly(comm.close))
            closer.start()
            closer.join()
        if how.startswith("close"):
            comm.close()
        if how == "close twice":
            comm.close()


def _quietly(call: Callable[[], Any]) -> Callable[[], None]:
    def made() -> None:
        with contextlib.suppress(RoundelayError):
            call()

    return made


def work(comm: Any, seed: int, ends: list[str], steps: int) -> str:
    """Be one rank of an order."""
    rank = Rank(comm, seed)
    moves = [rank.begin, rank.begin, rank.mail, rank.call, rank.split, rank.let_go, rank.look]
    moves += [rank.collect, rank.fork]
    for _ in range(steps):
        rank.same.choice(moves)()
    rank.end(ends[comm.rank])
    kept.extend(rank.handles)
    return "ended"


def order(seed: int) -> None:
    """Run one order in this process, and leave behind what it left behind."""
    same = random.Random(-seed)
    engine = same.choice(("threads", "shared_memory"))
    size = same.choice((2, 2, 3, 4, 7))
    bad = same.random() < 0.3
    ends = [same.choice(GOOD_ENDS) for _ in range(size)]
    if bad:
        # A thread that ends its process ends all ranks; that is an order too, but not one to judge.
        ends[same.randrange(size)] = same.choice(
            BAD_ENDS if engine == "shared_memory" else ("raise",)
        )
    if engine == "threads" or bad:
        ends = ["return" if end == "exit" else end for end in ends]
    print(f"seed {seed}: {engine}, {size} ranks, {ends}", flush=True)  # noqa: T201
    try:
        found = rd.run(work, size, engine, (seed, ends, same.randrange(12)), timeout=TIMEOUT_S)
    except (KeyError, RankFailed, CommunicationError) as error:
        # A daemon's receive fails all if every other rank has left before its own rank ends.
        alone = "daemon" in ends and ": recv from any rank, tag 9" in str(error)
        if not bad and not alone and getattr(error, "kind", "") != "SystemExit":
            raise
        judge(lenient=True)
        return
    if found != ["ended"] * size or bad:
        raise ArithmeticError(f"ended as {found}")
    judge(lenient=False)


def judge(*, lenient: bool) -> None:
    """Ask the handles of ranks that are over; after a failure they may have errors."""
    for one in kept:
        if isinstance(one, tuple):
            handle, right = one
            try:
                if not right(handle.wait()):
                    raise ArithmeticError("a handle gave a wrong result")
            except RoundelayError:
                if not lenient:
                    raise


def main(first: int, last: int) -> int | None:
    """Fork a child for each order; None in the children, which then end as interpreters do."""
    wrong = []
    for seed in range(first, last):
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(LIMIT_S - 5, exit=True)
            order(seed)
            return None
        limit = time.monotonic() + LIMIT_S
        while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > limit:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        if code := os.waitstatus_to_exitcode(done[1]):
            wrong.append(seed)
            print(f"seed {seed}: ended with {code}", flush=True)  # noqa: T201
    print(f"{last - first - len(wrong)} of {last - first} orders are clean; not: {wrong}")  # noqa: T201
    return len(wrong)


if __name__ == "__main__":
    faulthandler.enable()
    failures = main(int(sys.argv[1]), int(sys.argv[2]))
    if failures is not None:
        sys.exit(min(failures, 100))
