"""Labels on what the native core runs by itself."""

from __future__ import annotations

from roundelay import _core
from roundelay.collectives import collectives
from roundelay.engines._call import FastPath
from roundelay.live.call_words import label_bits

ROOTED = tuple(each.rooted for each in collectives)  # in the order of their names


def labelled(native: _core.Group, label: int) -> FastPath:
    """Return the fast path of a group with a label on each of its calls."""
    bits = label_bits(label, rooted=False), label_bits(label, rooted=True)
    return _core.FastPath(native, [bits[rooted] for rooted in ROOTED])
