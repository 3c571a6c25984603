"""Schedules as JSON, both ways: the one format that people, the command line and pages share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from roundelay.collectives import Collective, collectives
from roundelay.errors import ScheduleError, UnknownNameError
from roundelay.schedule.schedule import ACTIONS, Schedule, Transfer
from roundelay.schedule.strict_json import MAX_BYTES, DocumentPath, is_name, parse, read

__all__ = ["from_json", "load", "save", "to_json"]

VERSION = 1
MAX_RANKS = 1024
MAX_TRANSFERS = 1_000_000
MAX_PARTS = 65_536
#: The most cells that a contract may name, before and after together.
MAX_CELLS = 4_000_000

FIELDS = ("roundelay", "name", "collective", "size", "root", "parts", "transfers")
REQUIRED = ("roundelay", "collective", "size", "transfers")
KNOWN = frozenset(Transfer._fields)
NEEDED = KNOWN - Transfer._field_defaults.keys()


def to_json(schedule: Schedule) -> str:
    """Write a schedule as JSON, one transfer per line; what could not be read back is refused.

    >>> from roundelay.algorithms import algorithms
    >>> print(to_json(algorithms.load("broadcast_binomial").schedule(2)), end="")
    {
     "roundelay": 1,
     "name": "broadcast_binomial",
     "collective": "broadcast",
     "size": 2,
     "root": 0,
     "parts": 1,
     "transfers": [
      {"step": 0, "src": 0, "dst": 1, "chunk": 0, "op": "copy"}
     ]
    }
    """
    place = DocumentPath(schedule.name if is_name(schedule.name) else "schedule")
    place.inside("name").name(schedule.name)
    collective = _collective(schedule.collective.name, place)
    if collective is not schedule.collective:
        place.inside("collective").fail(
            f"{collective.name!r} is not the contract of that name; only those of "
            "roundelay.collectives can be written"
        )
    _check_limits(collective, schedule.size, schedule.root, schedule.parts, place)
    place.inside("transfers").list(list(schedule.transfers), MAX_TRANSFERS)

    head = {
        "roundelay": VERSION,
        "name": schedule.name,
        "collective": collective.name,
        "size": schedule.size,
        **({"root": schedule.root} if collective.rooted else {}),
        "parts": schedule.parts,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    transfers = ",\n".join(
        f'  {{"step": {step}, "src": {src}, "dst": {dst}, "chunk": {chunk}, "op": "{op}"}}'
        for step, src, dst, chunk, op in schedule.transfers
    )
    body = f' "transfers": [\n{transfers}\n ]' if transfers else ' "transfers": []'
    text = "\n".join(["{", *lines, body, "}", ""])
    if len(text) > MAX_BYTES:
        place.fail(f"takes {len(text):,} bytes as JSON; at most {MAX_BYTES:,} are read back")
    return text


def from_json(text: str | bytes, *, place: str = "schedule") -> Schedule:
    """Read a schedule; whatever is wrong with it raises `ScheduleError` that says where.

    `place` is what to call the text in errors, its file's name as a rule. The form is checked, and
    the limits of this module; the meaning is for `prove`.

    >>> from_json('{"roundelay": 1, "collective": "broadcast", "size": 2.0, "transfers": []}')
    Traceback (most recent call last):
        ...
    roundelay.errors.ScheduleError: schedule: size: must be a whole number from 1 to 1024, not 2.0
    """
    top = DocumentPath(place)
    value = parse(text, top)
    top.keys(value, known=FIELDS, required=REQUIRED)
    document = cast("dict[str, object]", value)
    top.inside("roundelay").whole(document["roundelay"], VERSION, VERSION)
    stem = Path(place).stem
    name = top.inside("name").name(document.get("name", stem if is_name(stem) else "schedule"))
    collective = _collective(document["collective"], top)
    size = top.inside("size").whole(document["size"], 1, MAX_RANKS)
    root = top.inside("root").whole(document.get("root", 0), 0, size - 1)
    parts = top.inside("parts").whole(document.get("parts", 1), 1, MAX_PARTS)
    _check_limits(collective, size, root, parts, top)
    transfers = _transfers(
        document["transfers"], top.inside("transfers"), size, collective.blocks(size) * parts
    )
    return Schedule(collective, size, transfers, root=root, parts=parts, name=name)


def save(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a schedule to a file."""
    text = to_json(schedule)
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ScheduleError(
            os.fspath(path), f"can't be written: {error.strerror or error}"
        ) from error


def load(path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule from a file; it is called after the file if it has no name of its own."""
    place = os.fspath(path)
    return from_json(read(path, DocumentPath(place)), place=place)


def _collective(name: object, top: DocumentPath) -> Collective:
    place = top.inside("collective")
    try:
        return collectives.load(place.name(name))
    except UnknownNameError as error:
        place.fail(str(error))


def _check_limits(
    collective: Collective, size: int, root: int, parts: int, top: DocumentPath
) -> None:
    """Refuse what would be too large, by arithmetic, before any of it is built."""
    top.inside("size").whole(size, 1, MAX_RANKS)
    top.inside("parts").whole(parts, 1, MAX_PARTS)
    blocks = sum(
        sum(1 for _ in collective.before(size, root, rank))
        + len(collective.after(size, root, rank))
        for rank in range(size)
    )
    if blocks * parts > MAX_CELLS:
        top.inside("parts").fail(
            f"{parts:,} parts of {blocks:,} blocks before and after make {blocks * parts:,} cells; "
            f"at most {MAX_CELLS:,} are read"
        )


def _transfers(value: object, place: DocumentPath, size: int, chunks: int) -> list[Transfer]:
    items = place.list(value, MAX_TRANSFERS)
    # Steps count from 0 and none is empty, so there are at most as many as transfers.
    within = {"step": len(items), "src": size, "dst": size, "chunk": chunks}
    transfers = [_transfer(item, index, place, within) for index, item in enumerate(items)]
    steps = {transfer.step for transfer in transfers}
    for index, transfer in enumerate(transfers):
        if transfer.step and transfer.step - 1 not in steps:
            place.item(index).field("step").fail(
                f"is {transfer.step}, but there is no step {transfer.step - 1}: steps count from 0 "
                "and none may be empty"
            )
    return transfers


def _transfer(item: object, index: int, place: DocumentPath, within: Mapping[str, int]) -> Transfer:
    # A place is only built for what is wrong: there may be a million transfers.
    if not isinstance(item, dict) or not NEEDED <= item.keys() <= KNOWN:
        place.item(index).keys(item, known=Transfer._fields, required=tuple(within))
    fields = cast("dict[str, Any]", item)  # what is in it is checked here, field by field
    for name, end in within.items():
        number = fields[name]
        if type(number) is not int or not 0 <= number < end:
            place.item(index).field(name).whole(number, 0, end - 1)
    if fields["src"] == fields["dst"]:
        place.item(index).field("dst").fail("is the same rank as src; nobody sends to itself")
    if fields.get("op", "copy") not in ACTIONS:
        place.item(index).field("op").fail(f"must be {' or '.join(map(repr, ACTIONS))}")
    return Transfer(**fields)
