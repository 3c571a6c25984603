"""Proofs agree with a literal run of the schedule that shares no code with them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.errors import ProofError, ScheduleError
from roundelay.schedule import Schedule, Transfer, find_failures, prove
from roundelay.schedule.schedule import Action

Place = tuple[int, int]
OPS: tuple[Action, ...] = ("copy", "reduce")


class Held(NamedTuple):
    """What a cell holds in the literal run: how often each rank counts, the sum, its depth."""

    counts: Counter[int]
    text: str  # '((0+1)+2)'
    depth: int


def added(parts: Sequence[Held]) -> Held:
    """Fold from left to right, by lowest rank first; one part alone stays as it is."""
    first, *rest = sorted(parts, key=lambda part: min(part.counts))
    total = first
    for part in rest:
        total = Held(total.counts + part.counts, f"({total.text}+{part.text})", 0)
    return total._replace(depth=1 + max(part.depth for part in parts)) if rest else first


def literal_run(schedule: Schedule) -> dict[Place, Held] | None:
    """Return what every cell holds at the end, or None if a step can't be carried out."""
    contract = schedule.collective
    held = {
        (rank, block * schedule.parts + part): Held(Counter([rank]), str(rank), 0)
        for rank in range(schedule.size)
        for block in contract.before(schedule.size, schedule.root, rank)
        for part in range(schedule.parts)
    }
    for step in range(max((t.step for t in schedule.transfers), default=-1) + 1):
        before = dict(held)
        now = [t for t in schedule.transfers if t.step == step]
        if any((t.src, t.chunk) not in before for t in now):
            return None  # sends what it does not hold
        for cell in {(t.dst, t.chunk) for t in now}:
            arriving = [t for t in now if (t.dst, t.chunk) == cell]
            parts = [before[t.src, t.chunk] for t in arriving]
            copied = any(t.op == "copy" for t in arriving)
            if copied and len(arriving) > 1:
                return None  # who comes last?
            parts += [before[cell]] if cell in before and not copied else []
            held[cell] = added(parts)
            if max(held[cell].counts.values()) > 1 and not contract.idempotent:
                return None  # a contribution counts twice
    return held


def kept(schedule: Schedule, held: dict[Place, Held] | None) -> list[Held] | None:
    """Return what the contract names if it is all as due, else None."""
    if held is None:
        return None
    finals = []
    for rank in range(schedule.size):
        due = schedule.collective.after(schedule.size, schedule.root, rank)
        for block, sources in due.items():
            for part in range(schedule.parts):
                final = held.get((rank, block * schedule.parts + part))
                if final is None or set(final.counts) != set(sources):
                    return None
                finals.append(final)
    return finals


def order_of(final: Held) -> int:
    """0: a left fold in rank order; 1: in rank order, however parenthesised; 2: anything else."""
    ranks = final.text.replace("(", "").replace(")", "").split("+")
    if [int(rank) for rank in ranks] != sorted(final.counts):
        return 2
    left = "(" * (len(ranks) - 1) + ranks[0] + "".join(f"+{rank})" for rank in ranks[1:])
    return 0 if final.text == left else 1


def agree(schedule: Schedule) -> bool:
    """Hold prove against the literal run; return whether the schedule is sound."""
    finals = kept(schedule, literal_run(schedule))
    failures = find_failures(schedule)
    assert bool(failures) == (finals is None), failures
    if finals is None:
        with pytest.raises(ProofError) as caught:
            prove(schedule)
        assert caught.value.failures == tuple(failures)
        for failure in failures:
            assert 0 <= failure.rank < schedule.size
            assert 0 <= failure.chunk < schedule.chunks
            assert failure.step is None or 0 <= failure.step < len(schedule.steps)
        return False
    proof = prove(schedule)
    assert ("rank_order", "contiguous", "any").index(proof.order) == max(
        map(order_of, finals), default=0
    )
    assert proof.folds == max((final.depth for final in finals), default=0)
    return True


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("name", algorithms.names())
def test_algorithms_add_up_in_the_order_that_the_proof_says(name: str, size: int) -> None:
    assert agree(algorithms.load(name).schedule(size, root=size // 2))


MUTATIONS = ["drop", "duplicate", "retarget", "rechunk", "change op", "move", "swap steps", "add"]


def mutated(  # noqa: PLR0911  # one for every kind of change
    data: st.DataObject, sound: Schedule, transfers: list[Transfer]
) -> list[Transfer]:
    """Return the transfers with one change; the ranks, chunks and steps may leave their range."""
    size, draw = sound.size, data.draw
    one = draw(st.sampled_from(transfers))
    rest = transfers.copy()
    rest.remove(one)
    match draw(st.sampled_from(MUTATIONS)):
        case "drop":
            return rest
        case "duplicate":
            return [*transfers, one]
        case "retarget":
            if draw(st.booleans()):
                return [*rest, one._replace(src=draw(st.integers(-1, size)))]
            return [*rest, one._replace(dst=draw(st.integers(-1, size)))]
        case "rechunk":
            return [*rest, one._replace(chunk=draw(st.integers(-1, sound.chunks)))]
        case "change op":
            return [*rest, one._replace(op="copy" if one.op == "reduce" else "reduce")]
        case "move":
            return [*rest, one._replace(step=draw(st.integers(-1, len(sound.steps) + 1)))]
        case "swap steps":
            other = draw(st.sampled_from(transfers))
            swapped = {one.step: other.step, other.step: one.step}
            return [t._replace(step=swapped.get(t.step, t.step)) for t in transfers]
        case _:
            src, dst = draw(st.permutations(range(size)))[:2]
            chunk, op = draw(st.integers(0, sound.chunks - 1)), draw(st.sampled_from(OPS))
            return [*transfers, Transfer(one.step, src, dst, chunk, op)]


def well_formed(transfers: Sequence[Transfer], size: int, chunks: int) -> bool:
    ends = all(t.src in range(size) and t.dst in range(size) and t.src != t.dst for t in transfers)
    steps = sorted({t.step for t in transfers})
    return (
        ends and all(t.chunk in range(chunks) for t in transfers) and steps == [*range(len(steps))]
    )


def close_gaps(transfers: list[Transfer]) -> list[Transfer]:
    number = {step: new for new, step in enumerate(sorted({t.step for t in transfers}))}
    return [t._replace(step=number[t.step]) for t in transfers]


@settings(max_examples=400)
@given(st.data())
def test_proofs_reject_every_broken_mutant_and_no_other(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(algorithms.names()))
    size = data.draw(st.integers(2, 6))
    sound = algorithms.load(name).schedule(size, data.draw(st.integers(0, size - 1)))
    transfers = list(sound.transfers)
    for _ in range(data.draw(st.integers(1, 3))):
        transfers = mutated(data, sound, transfers) if transfers else []
    if data.draw(st.booleans()):
        transfers = close_gaps(transfers)

    def mutant() -> Schedule:
        return Schedule(sound.collective, size, transfers, root=sound.root, parts=sound.parts)

    if not well_formed(transfers, size, sound.chunks):
        event("malformed")
        with pytest.raises(ScheduleError):
            mutant()
    else:
        event("harmless" if agree(mutant()) else "broken")


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("name", collectives.names())
def test_proofs_agree_on_every_schedule_of_a_few_transfers(name: str, root: int) -> None:
    collective = collectives.load(name)
    blocks = collective.blocks(2)
    moves = [(src, 1 - src, chunk, op) for src in range(2) for chunk in range(blocks) for op in OPS]
    sound = 0
    for length in range(4 if blocks < 3 else 3):
        # Whether each transfer begins a new step; the first always does.
        for begins in product((0, 1), repeat=max(length - 1, 0)):
            steps = list(accumulate(begins, initial=0))
            for chosen in product(moves, repeat=length):
                transfers = [Transfer(s, *move) for s, move in zip(steps, chosen, strict=False)]
                sound += agree(Schedule(collective, 2, transfers, root=root))
    assert sound > 0


T = Transfer
FAULTY: dict[str, tuple[str, int, list[Transfer], tuple[str, int, int, int | None]]] = {
    "nobody sends to rank 2": (
        "broadcast", 3, [T(0, 0, 1, 0)], ("missing", 2, 0, None)),
    "rank 1 has nothing to send yet": (
        "broadcast", 3, [T(0, 0, 1, 0), T(0, 1, 2, 0), T(1, 0, 2, 0)], ("missing", 1, 0, 0)),
    "rank 1's part never reaches the root": (
        "reduce", 3, [T(0, 2, 0, 0, "reduce")], ("missing", 0, 0, None)),
    "rank 0 comes again": (
        "all_reduce", 2,
        [T(0, 0, 1, 0, "reduce"), T(0, 1, 0, 0, "reduce"), T(1, 0, 1, 0, "reduce")],
        ("doubled", 1, 0, 1)),
    "rank 0 passes on before rank 2 has come in": (
        "all_reduce", 3,
        [T(0, 1, 0, 0, "reduce"), T(1, 2, 0, 0, "reduce"), T(1, 0, 1, 0), T(2, 0, 2, 0)],
        ("stale", 1, 0, 1)),
    "the sum is replaced": (
        "reduce", 3, [T(0, 1, 0, 0, "reduce"), T(1, 2, 0, 0)], ("overwritten", 0, 0, 1)),
    "the root's own part is replaced": (
        "reduce", 3, [T(0, 1, 0, 0), T(1, 2, 0, 0, "reduce")], ("overwritten", 0, 0, 0)),
    "two copies meet": (
        "broadcast", 4,
        [T(0, 0, 1, 0), T(0, 0, 2, 0), T(1, 1, 3, 0), T(1, 2, 3, 0)],
        ("overwritten", 3, 0, 1)),
    "rank 1 is no part of rank 0's scan": (
        "scan", 2, [T(0, 0, 1, 0, "reduce"), T(1, 1, 0, 0)], ("unexpected contribution", 0, 0, 1)),
    "rank 0 never gets rank 1's block": (
        "all_gather", 2, [T(0, 0, 1, 0)], ("missing", 0, 1, None)),
}  # fmt: skip


@pytest.mark.parametrize("story", FAULTY)
def test_a_fault_is_named_with_rank_chunk_and_step(story: str) -> None:
    collective, size, transfers, expected = FAULTY[story]
    schedule = Schedule(collectives.load(collective), size, transfers, name="mine")
    with pytest.raises(ProofError) as caught:
        prove(schedule)
    found = [(f.kind, f.rank, f.chunk, f.step) for f in caught.value.failures]
    assert found == [expected]
    kind, rank, chunk, step = expected
    when = "at the end" if step is None else f"step {step + 1}"
    assert f"{when}, rank {rank}, chunk {chunk} ({'ab'[chunk]}): {kind}: " in str(caught.value)


@pytest.mark.parametrize("collective", ["barrier", "all_reduce"])
def test_counting_twice_again_and_again_takes_no_longer(collective: str) -> None:
    """Ranks 0 and 1 swap sums 400 times: 2**400 contributions, none of them rank 2's."""
    swaps = [T(s, a, 1 - a, 0, "reduce") for s in range(400) for a in range(2)]
    begun = time.monotonic()
    failures = find_failures(Schedule(collectives.load(collective), 3, swaps))
    assert time.monotonic() - begun < 20
    lacking = {(f.kind, f.rank) for f in failures if f.step is None}
    assert lacking == {("missing", rank) for rank in range(3)}


@pytest.mark.parametrize("count", [0, 1, 5, 6, 50])
def test_long_lists_of_failures_are_cut(count: int) -> None:
    schedule = Schedule(collectives.load("broadcast"), count + 1, [], name="silence")
    if not count:
        prove(schedule)
        return
    with pytest.raises(ProofError) as caught:
        prove(schedule)
    error: Any = caught.value
    assert len(error.failures) == count
    assert len(str(error).splitlines()) == 1 + min(count, 6)
    assert (f"… and {count - 5} more" in str(error)) == (count > 5)
