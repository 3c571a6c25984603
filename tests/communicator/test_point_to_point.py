"""Messages between two ranks: order, tags, any source, any size, and no deadlock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roundelay.communicator import ANY
from roundelay.errors import CollectiveMismatch

RING = 64 * 1024  # no larger message fits into the ring between two ranks at once


def test_tags_out_of_order_and_order_within_a_tag(ranks: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank == 0:
            for turn in range(50):
                comm.send(np.array([turn]), 1, tag=turn % 3)
        elif comm.rank == 1:
            for tag in (2, 0, 1):
                turns = range(tag, 50, 3)
                got = [int(comm.recv(np.zeros(1, int), 0, tag)[0]) for _ in turns]
                assert got == list(turns)

    ranks(3, work)


@pytest.mark.parametrize("numel", [0, 1, 1000, RING, 1_000_003])
def test_all_exchange_with_all_and_nobody_waits_for_ever(numel: int, ranks: Any) -> None:
    """Everybody sends first and receives afterwards, whatever the size."""

    def work(comm: Any) -> None:
        for dst in range(comm.size):
            comm.send(np.full(numel, comm.rank * 10 + dst, np.int8), dst)
        for src in range(comm.size):
            got = comm.recv(np.zeros(numel, np.int8), src)
            assert (got == src * 10 + comm.rank).all()

    ranks(3, work)


@pytest.mark.parametrize("numel", [1, 100_000])
def test_any_source_and_any_tag(numel: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank:
            for tag in range(5):
                comm.send(np.full(numel, comm.rank * 100 + tag), 0, tag)
            return
        seen: dict[int, list[int]] = {}
        for _ in range(5 * (comm.size - 1)):
            message = comm.start.recv(np.zeros(numel, int), ANY, ANY)
            value = int(message.wait()[-1])
            assert (message.source, message.tag) == divmod(value, 100)
            seen.setdefault(message.source, []).append(message.tag)
        assert seen == {rank: [0, 1, 2, 3, 4] for rank in range(1, comm.size)}

    ranks(4, work)


def test_many_small_ones(ranks: Any) -> None:
    def work(comm: Any) -> None:
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        handles = []
        for turn in range(500):
            handles += [comm.start.send(np.array([turn, comm.rank]), dst) for dst in others]
        for turn in range(500):
            for src in others:
                assert comm.recv(np.zeros(2, int), src).tolist() == [turn, src]
        for handle in handles:
            handle.wait()

    ranks(3, work)


def test_sendrecv_around_the_ring(ranks: Any) -> None:
    def work(comm: Any) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for numel in (0, 1, 300_000):
            into = np.zeros(numel)
            got = comm.sendrecv(np.full(numel, comm.rank), right, np.zeros(numel, int), left)
            assert (got == left).all()
            assert comm.sendrecv(np.full(numel, 0.5), right, into, ANY, tag=3, recv_tag=3) is into

    for size in (1, 2, 5):
        ranks(size, work)


def test_sendrecv_in_the_background(ranks: Any) -> None:
    """Any message may be taken meanwhile, but not an inner one."""

    def work(comm: Any) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        anything = comm.start.recv(np.zeros(1), ANY, ANY)
        inner = comm.start.sendrecv(
            np.array([0.5 + comm.rank]), right, np.zeros(1), left, tag=2, inner=True
        )
        assert inner.wait().tolist() == [0.5 + left]
        assert inner.done()
        comm.send(np.array([7.0 + comm.rank]), right)
        assert anything.wait().tolist() == [7.0 + left]
        for numel in (0, 300_000):
            into = np.zeros(numel)
            under_way = comm.start.sendrecv(
                np.full(numel, 1.0 + comm.rank), right, into, ANY, tag=3, recv_tag=ANY
            )
            assert under_way.wait() is into
            assert (into == 1 + left).all()
            comm.barrier()

    for size in (1, 2, 5):
        ranks(size, work)


#: Where `x` and `into` lie in a row of three parts: all ways to overlap, and none.
PLACES = {
    "one buffer": (slice(0, 2), slice(0, 2)),
    "shifted up": (slice(0, 2), slice(1, 3)),
    "shifted down": (slice(1, 3), slice(0, 2)),
    "apart": (slice(0, 1), slice(1, 2)),
}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_a_sendrecv_sends_what_was_there_before(
    places: tuple[slice, slice], ranks: Any, *, background: bool
) -> None:
    """Whichever memory the two buffers share, however large, and in whichever order they lie."""

    def work(comm: Any) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for numel, step in ((1, 1), (1000, 1), (400_000, 1), (400_000, -1), (1000, 2)):
            for turn in range(3):
                mine = np.arange(3.0 * numel).reshape(3, numel) + turn
                row = np.zeros((3, numel * abs(step)))[:, ::step]
                row[...] = mine + comm.rank
                x, into = row[places[0]], row[places[1]]
                if background:
                    got = comm.start.sendrecv(x, right, into, left).wait()
                else:
                    got = comm.sendrecv(x, right, into, left)
                assert got is into
                assert (into == mine[places[0]] + left).all(), (numel, step, turn)

    for size in (1, 2, 3):
        ranks(size, work)


def test_noncontiguous_buffers_and_background_receives(ranks: Any) -> None:
    def work(comm: Any) -> None:
        other = 1 - comm.rank
        into = np.zeros((40, 300))
        message = comm.start.recv(into[:, ::3], other)
        comm.send((np.arange(4000.0).reshape(100, 40) + comm.rank).T, other)
        message.wait()
        due = (np.arange(4000.0).reshape(100, 40) + other).T
        assert (into[:, ::3] == due).all()
        assert (into[:, 1::3] == 0).all()

    ranks(2, work)


def test_a_message_of_another_kind_is_told_and_breaks_nothing(ranks: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank == 0:
            comm.send(np.ones(4, np.float32), 1)
            comm.send(np.ones(3), 1)
            comm.send(np.ones(70_000), 1)
            comm.send(np.ones(3), 1)
        else:
            for into, shown in (
                (np.zeros(4), r"float64\[4\], but the message is float32\[4\]"),
                (np.zeros(2), r"float64\[2\], but the message is float64\[3\]"),
                (np.zeros(2), r"float64\[2\], but the message is float64\[70000\]"),
            ):
                with pytest.raises(CollectiveMismatch, match=shown):
                    comm.recv(into, 0)
                assert (into == 0).all()
            assert (comm.recv(np.zeros(3), 0) == 1).all()
        assert comm.all_reduce(np.ones(1)) == 2

    ranks(2, work)


def test_groups_keep_their_mail_apart(ranks: Any) -> None:
    def work(comm: Any) -> None:
        other = comm.split(0, -comm.rank)
        assert other.rank == comm.size - 1 - comm.rank
        comm.send(np.array([1]), 1 - comm.rank)
        other.send(np.array([2]), 1 - other.rank)
        assert other.recv(np.zeros(1, int), ANY, ANY) == 2
        assert comm.recv(np.zeros(1, int), ANY, ANY) == 1

    ranks(2, work)


def test_mail_and_collectives_mix(ranks: Any) -> None:
    def work(comm: Any) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for turn in range(30):
            sent = comm.start.send(np.full(20_000, turn), right)
            got = comm.start.recv(np.zeros(20_000, int), left)
            assert comm.all_reduce(np.ones(1)) == comm.size
            assert (got.wait() == turn).all()
            sent.wait()

    ranks(3, work)
