"""What tells calls apart that move the same bytes: one number, which ranks compare with the rest.

It stands where a root does: a flag for `axis=`, the call that the user made where this one is but a
part of it, and below them the root, a label, or a hash of the user's own reduction.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from roundelay.collectives import collectives
from roundelay.engines import AXIS, WIRED, WIRES, CollectiveCall, wire_name

#: Calls that are made of others; a list that all ranks have in the same order.
CALLS = (
    "", *collectives.names(), "all_gather_object", "broadcast_object", "close", "gather_object",
    "group", "scatter_object", "split", "traffic",
    *(wire_name(collective, wire) for wire in WIRES for collective in WIRED),
)  # fmt: skip
NUMBERS = {call: number for number, call in enumerate(CALLS)}
CALL = 25  # bits below the number of the call, which has 5
ROOT = 10  # of them for the root, where there is one


class Word(NamedTuple):
    """What a number says."""

    call: str  # of the user; nothing where that is the collective itself
    axis: bool
    root: int
    rest: int  # a label, or the hash of a reduction


def word_of(call: CollectiveCall) -> int:
    """Return the number of a call.

    >>> from roundelay.communicator.call_builder import CallBuilder
    >>> call = CallBuilder(0, 2).barrier()
    >>> call.part_of, call.label = "close", 7
    >>> read_word(word_of(call), rooted=False)
    Word(call='close', axis=False, root=0, rest=7)
    """
    rest = _hash(call.custom_op) if call.custom_op else call.label
    if rest:
        rest = label_bits(rest, rooted=collectives.load(call.collective).rooted)
    return call.root | rest | NUMBERS[call.part_of] << CALL | AXIS * call.axis


def label_bits(label: int, *, rooted: bool) -> int:
    """Return a label where it lies in the number of a call."""
    return label % (1 << CALL - ROOT) << ROOT if rooted else label % (1 << CALL)


def read_word(word: int, *, rooted: bool) -> Word:
    """Return what a number says, of a collective with a root or without."""
    rest = word & (1 << CALL) - 1
    root = rest & (1 << ROOT) - 1 if rooted else 0
    call = CALLS[(word & AXIS - 1) >> CALL]
    return Word(call, bool(word & AXIS), root, rest >> ROOT if rooted else rest)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
