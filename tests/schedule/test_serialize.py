"""JSON both ways: what is written is read back, and what is not well formed is refused."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.algorithms import algorithms
from roundelay.collectives import Collective, collectives
from roundelay.errors import ScheduleError
from roundelay.schedule import (
    Schedule,
    Transfer,
    from_json,
    load,
    prove,
    save,
    serialize,
    strict_json,
    to_json,
)
from roundelay.schedule.schedule import ACTIONS

RING = algorithms.load("all_reduce_ring").schedule(3)
TRANSFER: dict[str, Any] = {"step": 0, "src": 0, "dst": 1, "chunk": 0, "op": "copy"}
GOOD: dict[str, Any] = {
    "roundelay": 1, "name": "mine", "collective": "broadcast", "size": 2, "root": 0, "parts": 1,
    "transfers": [TRANSFER],
}  # fmt: skip


def same(a: Schedule, b: Schedule) -> bool:
    fields = ("collective", "size", "root", "parts", "name", "transfers")
    return all(getattr(a, field) == getattr(b, field) for field in fields)


@pytest.mark.parametrize("name", algorithms.names())
def test_every_algorithm_is_read_back_as_it_was_written(name: str) -> None:
    algorithm = algorithms.load(name)
    for size in range(1, 10):
        for root in range(size if algorithm.collective.rooted else 1):
            schedule = algorithm.schedule(size, root)
            text = to_json(schedule)
            assert same(from_json(text), schedule)
            assert to_json(from_json(text.encode())) == text
            assert len(text.splitlines()) == len(schedule.transfers) + 9 + (
                algorithm.collective.rooted - (size == 1)
            )


@given(st.text(min_size=1, max_size=200).filter(str.isprintable), st.data())
def test_any_transfers_of_any_collective_are_read_back(name: str, data: st.DataObject) -> None:
    collective = collectives.load(data.draw(st.sampled_from(collectives.names())))
    size, parts = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    chunks = st.integers(0, collective.blocks(size) * parts - 1)
    op, root = st.sampled_from(ACTIONS), data.draw(st.integers(0, size - 1))
    ends = st.permutations(range(size))
    transfers = []
    for step in range(data.draw(st.integers(0, 4))):
        for _ in range(data.draw(st.integers(1, 3))):
            src, dst = data.draw(ends)[:2]
            transfers.append(Transfer(step, src, dst, data.draw(chunks), data.draw(op)))
    schedule = Schedule(
        collective, size, transfers, parts=parts, name=name, root=root if collective.rooted else 0
    )
    assert same(from_json(to_json(schedule)), schedule)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_windows_files_are_read_too(ending: str, mark: str, tmp_path: Path) -> None:
    text = mark + to_json(RING).replace("\n", ending)
    assert same(from_json(text), RING)
    (tmp_path / "ring.json").write_bytes(text.encode())
    assert same(load(tmp_path / "ring.json"), RING)


def test_files_are_written_and_read(tmp_path: Path) -> None:
    for path in (tmp_path / "a ring.json", str(tmp_path / "b.json")):
        save(RING, path)
        assert same(load(path), RING)
        assert Path(path).read_bytes().decode() == to_json(RING)


def test_what_may_be_left_out(tmp_path: Path) -> None:
    short = {key: GOOD[key] for key in ("roundelay", "collective", "size")}
    short["transfers"] = [{key: TRANSFER[key] for key in ("step", "src", "dst", "chunk")}]
    path = tmp_path / "my own.json"
    path.write_text(json.dumps(short))
    schedule = load(path)
    assert (schedule.name, schedule.root, schedule.parts) == ("my own", 0, 1)
    assert schedule.transfers == (Transfer(0, 0, 1, 0, "copy"),)
    prove(schedule)
    assert from_json(json.dumps(short)).name == "schedule"


def changed(**fields: Any) -> dict[str, Any]:
    return {**GOOD, **fields}


def transfer(**fields: Any) -> dict[str, Any]:
    return {**GOOD, "transfers": [TRANSFER, {**TRANSFER, **fields}]}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


MALFORMED: list[tuple[object, str, str]] = [
    ([], "mine.json", "must be an object, not a list"),
    (None, "mine.json", "must be an object, not null"),
    (without("roundelay"), "mine.json", "lacks 'roundelay'"),
    (without("size"), "mine.json", "lacks 'size'"),
    (without("transfers"), "mine.json", "lacks 'transfers'"),
    (changed(roundelay=2), "mine.json: roundelay", "must be 1, not 2"),
    (changed(roundelay=True), "mine.json: roundelay", "must be 1, not true"),
    (changed(roundelay=1.0), "mine.json: roundelay", "must be 1, not 1.0"),
    (changed(tranfers=[]), "mine.json", "no 'tranfers'. Did you mean 'transfers'?"),
    (changed(**{"\x1b[2J": 1}), "mine.json", r"no '\x1b[2J'"),
    (changed(name=""), "mine.json: name", "1 to 200 printable characters, not ''"),
    (changed(name="x" * 201), "mine.json: name", "1 to 200 printable"),
    (changed(name="a\nb"), "mine.json: name", r"not 'a\nb'"),
    (changed(name="\ud800"), "mine.json: name", r"not '\ud800'"),
    (changed(name=7), "mine.json: name", "not 7"),
    (changed(collective="broadcat"), "mine.json: collective", "Did you mean 'broadcast'?"),
    (changed(collective="../errors"), "mine.json: collective", "has no '../errors'"),
    (changed(collective=["broadcast"]), "mine.json: collective", "not a list"),
    (changed(size=0), "mine.json: size", "whole number from 1 to 1024, not 0"),
    (changed(size=1025), "mine.json: size", "not 1025"),
    (changed(size=10**17), "mine.json: size", "not 100000000000000000"),
    (changed(size="2"), "mine.json: size", "not '2'"),
    (changed(size=None), "mine.json: size", "not null"),
    (changed(root=2), "mine.json: root", "from 0 to 1, not 2"),
    (changed(root=False), "mine.json: root", "not false"),
    (changed(parts=0), "mine.json: parts", "from 1 to 65536, not 0"),
    (changed(parts=65_537), "mine.json: parts", "not 65537"),
    (changed(size=1024, parts=65_536), "mine.json: parts", "67,174,400 cells; at most 4,000,000"),
    (changed(transfers={}), "mine.json: transfers", "must be a list, not an object"),
    (changed(transfers=[7]), "mine.json: transfers[0]", "must be an object, not 7"),
    (transfer(dts=1), "mine.json: transfers[1]", "no 'dts'. Did you mean 'dst'?"),
    (changed(transfers=[{"step": 0}]), "mine.json: transfers[0]", "lacks 'src'"),
    (transfer(step=-1), "mine.json: transfers[1].step", "from 0 to 1, not -1"),
    (transfer(step=10**9), "mine.json: transfers[1].step", "from 0 to 1, not 1000000000"),
    (transfer(step=0.0), "mine.json: transfers[1].step", "not 0.0"),
    (transfer(src=2), "mine.json: transfers[1].src", "from 0 to 1, not 2"),
    (transfer(src=True), "mine.json: transfers[1].src", "not true"),
    (transfer(dst=-1), "mine.json: transfers[1].dst", "not -1"),
    (transfer(dst="1"), "mine.json: transfers[1].dst", "not '1'"),
    (transfer(dst=0), "mine.json: transfers[1].dst", "nobody sends to itself"),
    (transfer(chunk=1), "mine.json: transfers[1].chunk", "must be 0, not 1"),
    (transfer(chunk={}), "mine.json: transfers[1].chunk", "not an object"),
    (transfer(op="add"), "mine.json: transfers[1].op", "must be 'copy' or 'reduce'"),
    (transfer(op=[]), "mine.json: transfers[1].op", "must be 'copy' or 'reduce'"),
    (changed(transfers=[TRANSFER, {**TRANSFER, "step": 2}, TRANSFER]),
     "mine.json: transfers[1].step", "there is no step 1"),
    (changed(transfers=[{**TRANSFER, "step": 1}, {**TRANSFER, "step": 1}]),
     "mine.json: transfers[0].step", "there is no step 0"),
    ("", "mine.json: line 1, column 1", "is not JSON"),
    ('{\n "size": 2,\n}', "mine.json: line 3, column 1", "is not JSON"),
    ("{} {}", "mine.json: line 1, column 4", "is not JSON: Extra data"),
    ('{"size": NaN}', "mine.json", "has NaN"),
    ('{"size": -Infinity}', "mine.json", "has -Infinity"),
    ('{"size": 2, "size": 3}', "mine.json", "the key 'size' twice"),
    ('{"size": ' + "9" * 5000 + "}", "mine.json", "a number of 5000 digits"),
    ("[" * 100_000, "mine.json", "nested too deeply"),
    ('{"a":' * 100_000, "mine.json", "nested too deeply"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "place", "problem"), MALFORMED)
def test_a_malformed_file_is_refused_with_its_place(
    document: object, place: str, problem: str
) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(ScheduleError) as caught:
        from_json(text, place="mine.json")
    assert caught.value.place == place
    assert problem in caught.value.problem
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"\xff\xfe{}", "byte 0 is 0xff"), (b'{"name": "\xe9"}', "byte 10 is 0xe9"),
     (b"\x00", "is not JSON")],
)  # fmt: skip
def test_bytes_that_are_no_text_are_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ScheduleError, match=problem):
        load(path)


def test_what_is_no_ordinary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    refused: list[tuple[Path | str, str]] = [
        (tmp_path, "is a folder"),
        (tmp_path / "none.json", "No such file"),
        (tmp_path / "loop.json", "symbolic link"),
        (tmp_path / "pipe.json", "is not an ordinary file"),
        (tmp_path / ("x" * 300), "too long"),
        ("nul\x00.json", "null"),
    ]
    for path, problem in refused:
        with pytest.raises(ScheduleError, match=problem) as caught:
            load(path)
        assert caught.value.place == str(path)


def test_a_file_that_can_not_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no folder" / "mine.json"):
        with pytest.raises(ScheduleError, match="can't be written"):
            save(RING, path)


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(10**12)  # of holes: it takes no room
    with pytest.raises(ScheduleError, match="1,000,000,000,000 bytes; at most 67,108,864"):
        load(path)
    with pytest.raises(ScheduleError, match="longer than"):
        from_json(b" " * (strict_json.MAX_BYTES + 1))


@pytest.mark.parametrize("filler", ["[],", "{},", "0,", '"ab",', '{"a":0},'])
def test_a_text_of_too_many_values_is_refused_before_it_is_parsed(filler: str) -> None:
    text = "[" + filler * (strict_json.MAX_TOKENS // sum(map(filler.count, "[{:,")) + 1) + "0]"
    assert len(text) <= strict_json.MAX_BYTES
    begun = time.monotonic()
    with pytest.raises(ScheduleError, match="more than 12,000,000 values"):
        from_json(text)
    assert time.monotonic() - begun < 20


def test_the_limits_are_those_of_the_format() -> None:
    too_many = json.dumps(TRANSFER) + ","
    text = json.dumps(changed(transfers=[])).replace("[]", f"[{too_many * 1_000_001}")[:-2] + "]}"
    with pytest.raises(ScheduleError, match="1,000,001 items; at most 1,000,000 are read"):
        from_json(text.replace(" ", ""))
    for size, parts, fits in [(1024, 1, True), (1024, 2, False), (512, 7, True), (512, 8, False)]:
        text = json.dumps(changed(collective="all_to_all", size=size, parts=parts, transfers=[]))
        if fits:
            assert from_json(text).chunks == size * size * parts
        else:
            with pytest.raises(ScheduleError, match="cells; at most 4,000,000"):
                from_json(text)


def test_what_could_not_be_read_back_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast = collectives.load("broadcast")
    own = Collective("broadcast", broadcast.blocks, broadcast.before, broadcast.after, rooted=True)
    unknown = Collective("whisper", broadcast.blocks, broadcast.before, broadcast.after)
    for schedule, problem in [
        (Schedule(broadcast, 1025, []), "from 1 to 1024"),
        (Schedule(broadcast, 2, [], parts=65_537), "from 1 to 65536"),
        (Schedule(collectives.load("all_to_all"), 1024, [], parts=2), "cells"),
        (Schedule(broadcast, 2, [], name="a\nb"), "printable"),
        (Schedule(own, 2, []), "is not the contract of that name"),
        (Schedule(unknown, 2, []), "collectives has no 'whisper'"),
    ]:
        with pytest.raises(ScheduleError, match=problem):
            to_json(schedule)
    monkeypatch.setattr(serialize, "MAX_TRANSFERS", 3)
    with pytest.raises(ScheduleError, match="12 items; at most 3"):
        to_json(RING)
    monkeypatch.setattr(serialize, "MAX_TRANSFERS", 12)
    monkeypatch.setattr(serialize, "MAX_BYTES", 100)
    with pytest.raises(ScheduleError, match="at most 100 are read back"):
        to_json(RING)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from([*GOOD.values(), *TRANSFER.values()]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from([*GOOD, *TRANSFER]) | st.text(), inner, max_size=6),
)  # fmt: skip


def survives(text: str | bytes) -> None:
    """Reading gives a schedule or a `ScheduleError`, nothing else; a schedule is written back."""
    try:
        schedule = from_json(text)
    except ScheduleError as error:
        assert error.place.startswith("schedule")
        assert str(error).isprintable()
    else:
        assert same(from_json(to_json(schedule)), schedule)


@given(st.binary() | st.text() | values.map(json.dumps))
def test_nothing_but_a_schedule_error_comes_of_any_text(text: str | bytes) -> None:
    survives(text)


@settings(max_examples=300)
@given(values, st.sampled_from([*GOOD, *TRANSFER]))
def test_nothing_but_a_schedule_error_comes_of_any_value_anywhere(value: Any, key: str) -> None:
    survives(json.dumps(changed(**{key: value}) if key in GOOD else transfer(**{key: value})))


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 12), st.binary(max_size=8)),
                min_size=1, max_size=4))  # fmt: skip
def test_nothing_but_a_schedule_error_comes_of_any_edit(
    edits: list[tuple[int, int, bytes]],
) -> None:
    text = to_json(RING).encode()
    for place, length, put in edits:
        at = place % len(text) if text else 0
        text = text[:at] + put + text[at + length :]
    survives(text)
