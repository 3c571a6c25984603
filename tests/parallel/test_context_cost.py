"""What attention over ranks sends, holds and computes is what the formulas say."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest

import roundelay as rd
from roundelay.parallel.context.plan import RingPlan, spans_of, spans_so_long

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - only with torch

from roundelay.parallel.context import agreement, kernels  # noqa: E402

ITEM = 8  # bytes of float64
LAYOUTS = ["contiguous", "zigzag"]


class Counted:
    """The background calls of a communicator, with its exchanges counted."""

    def __init__(self, comm: rd.Communicator) -> None:
        self.start = comm.start
        self.sizes: list[int] = []
        vars(comm)["start"] = self

    def sendrecv(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self.sizes.append(x.numel())
        return self.start.sendrecv(x, *args, **kwargs)


def shards(comm: rd.Communicator, length: int, layout: str, kv_heads: int = 2) -> list[Any]:
    whole = [
        torch.ones(2, heads, length, 4, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)
    ]
    return [rd.shard_sequence(x, comm, -2, layout=layout).requires_grad_() for x in whole]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [24, 29])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_go_around_once_and_gradients_come_home(
    layout: str, length: int, size: int
) -> None:
    tokens = [
        sum(stop - start for start, stop in spans) for spans in spans_of(length, size, layout)
    ]
    token = 2 * 2 * (4 + 4)  # numbers of one token's keys and values

    def body(comm: rd.Communicator) -> None:
        q, k, v = shards(comm, length, layout)
        counted = Counted(comm)
        out = rd.attention(q, k, v, comm=comm, layout=layout, causal=True)
        passed = [token * tokens[(comm.rank - step) % size] for step in range(size)]
        assert counted.sizes == passed[:-1]
        counted.sizes.clear()
        torch.autograd.backward(out.sum())
        expected = sorted([*passed[:-1], *passed]) if size > 1 else []
        assert sorted(counted.sizes) == expected

    rd.run(body, size, "threads")


def traffic(comm: rd.Communicator) -> int:
    every = comm.traffic()
    assert every is not None
    return every[comm.rank].sent


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_bytes_are_those_of_the_formula(method: str, size: int) -> None:
    """Both per rank: the ring's grow with the keys and values, Ulysses' with an Nth of all."""
    kv, qkvo = 2 * 4 * 8, 4 * 4 * 8  # numbers of a token, of batch 2 and 4 heads of 4

    def body(comm: rd.Communicator) -> None:
        q, k, v = shards(comm, 24, "zigzag", kv_heads=4)
        before = traffic(comm)
        agreement.agree("attention", comm, dict.fromkeys("abcdefghijkl", 0), 0)
        header = traffic(comm) - before
        exchanges: list[int] = []
        plain = comm.all_to_all

        def counted(x: Any, **options: Any) -> Any:
            exchanges.append(x.nbytes)
            return plain(x, **options)

        comm.all_to_all = counted  # type: ignore[method-assign]
        before = traffic(comm)
        out = rd.attention(q, k, v, comm=comm, method=method, layout="zigzag", causal=True)
        forward = traffic(comm) - before - header
        before = traffic(comm)
        torch.autograd.backward(out.sum())
        backward = traffic(comm) - before
        tokens = 24 // size
        there, back = (tokens * qkvo * part * ITEM // 4 for part in (3, 1))
        assert exchanges == ([] if method == "ring" else [there, back, back, there])
        if method == "ring":
            assert forward == (size - 1) * tokens * kv * ITEM
            assert backward == (2 * size - 1) * tokens * kv * ITEM
        else:
            assert forward == backward == (size - 1) * tokens * qkvo * ITEM // size

    rd.run(body, size, "threads")


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Counts the bytes of the tensors that this thread makes, while they live, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.live = self.peak = 0
        self.seen: set[int] = set()
        self.lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage: Any) -> None:
        key = storage._cdata
        with self.lock:
            if key in self.seen:
                return
            self.seen.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.drop, key, storage.nbytes())

    def drop(self, key: int, nbytes: int) -> None:
        with self.lock:
            self.seen.discard(key)
            self.live -= nbytes


def peak_of(length: int, size: int, method: str) -> int:
    """Return the most bytes that a rank's attention held at once, forward and backward."""

    def body(comm: rd.Communicator) -> Any:
        q, k, v = shards(comm, length, "zigzag", kv_heads=4)
        grad = torch.ones_like(q)
        with Live() as live:
            out = rd.attention(q, k, v, comm=comm, method=method, layout="zigzag", causal=True)
            torch.autograd.backward(out, grad)
        return live.peak

    peaks: list[int] = rd.run(body, size, "threads")
    return max(peaks)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_memory_is_that_of_the_ranks_own_tokens(method: str) -> None:
    """As much for twice the tokens on twice the ranks; and never a square of scores."""
    share = 2 * 4 * 128 * 4 * ITEM  # bytes of one rank's queries, at 128 tokens
    sizes = (2, 4, 8) if method == "ring" else (2, 4)  # which divide the heads
    peaks = [peak_of(128 * size, size, method) for size in sizes]
    assert len(set(peaks)) == 1
    assert peaks[0] <= 18 * share
    assert peak_of(1024, 2, method) == 4 * peaks[0]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [64, 61, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_cover_what_is_seen_and_nothing_twice(layout: str, length: int, size: int) -> None:
    for causal in (False, True):
        plan = RingPlan.even(length, size, layout, causal=causal)
        places = [[p for start, stop in spans for p in range(start, stop)] for spans in plan.spans]
        assert sorted(p for mine in places for p in mine) == list(range(length))
        met = []
        for rank in range(size):
            for step in range(size):
                block = plan.block(rank, step)
                if block is None:
                    continue
                queries = places[rank][slice(*block.queries)]
                keys = places[plan.source(rank, step)][slice(*block.keys)]
                pairs = [(q, k) for at, q in enumerate(queries) for to, k in enumerate(keys)
                         if not block.causal or to <= at]  # fmt: skip
                assert len(pairs) == block.pairs
                met += pairs
        seen = [(q, k) for q in range(length) for k in range(length) if not causal or k <= q]
        assert sorted(met) == seen


def test_a_zigzag_has_less_for_the_slowest_rank_to_do() -> None:
    length = 4096
    plain, zigzag = (RingPlan.even(length, 4, layout, causal=True) for layout in LAYOUTS)
    assert max(map(plain.work, range(4))) >= 1.6 * max(map(zigzag.work, range(4)))
    assert plain.slowest() >= 1.6 * zigzag.slowest()
    assert sum(map(plain.work, range(4))) == sum(map(zigzag.work, range(4)))
    every = [zigzag.work(rank) for rank in range(4)]
    assert max(every) == min(every)


def test_what_runs_is_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the pairs that kernels are given, forward and backward, by rank."""
    pairs: dict[int, list[int]] = {}
    real = kernels.block_forward

    def counted(tile: kernels.Tile) -> Any:
        rows, columns = tile.q.size(-2), tile.k.size(-2)
        count = rows * (rows + 1) // 2 if tile.causal else rows * columns
        pairs.setdefault(threading.get_ident(), []).append(count)
        return real(tile)

    monkeypatch.setattr("roundelay.parallel.context.ring.block_forward", counted)

    def body(comm: rd.Communicator, layout: str) -> int:
        pairs.pop(threading.get_ident(), None)
        rd.attention(*shards(comm, 64, layout), comm=comm, layout=layout, causal=True)
        return sum(pairs[threading.get_ident()])

    for layout in LAYOUTS:
        plan = RingPlan.even(64, 4, layout, causal=True)
        work = rd.run(lambda comm, layout=layout: body(comm, layout), 4, "threads")
        assert work == [plan.work(rank) for rank in range(4)]


def test_spans_by_lengths() -> None:
    assert spans_so_long([4, 3], "contiguous") == spans_of(7, 2)
    assert spans_so_long([4, 4], "zigzag") == spans_of(8, 2, "zigzag")
    with pytest.raises(rd.RoundelayError, match="shard_sequence"):
        spans_so_long([5, 3], "zigzag")


def nodes(out: Any) -> list[str]:
    """Return what autograd goes through from an output back to the leaves, each node once."""
    seen, waiting = [], [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.append(node)
            waiting += [before for before, _ in node.next_functions]
    return sorted(node.name() for node in seen)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_one_rank_adds_nothing_to_torchs_own_attention(method: str, kv_heads: int) -> None:
    """What autograd goes through is the same: no view, no copy; and so is every bit."""

    def body(comm: rd.Communicator) -> None:
        q, k, v = shards(comm, 24, "contiguous", kv_heads)
        ours = rd.attention(q, k, v, comm=comm, method=method, causal=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=kv_heads != q.size(1)
        )
        assert nodes(ours) == nodes(theirs)
        assert torch.equal(ours, theirs)

    rd.run(body, 1, "threads")
