"""Lines of ranks stay whole, in order, and carry their rank; last words are kept for the end."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.launch import _output, _traceback_capture
from roundelay.launch._output import RankOutput, Screen
from roundelay.launch._traceback_capture import ErrorStream
from roundelay.launch.ending import Ending, RankEnd


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


LINE = st.binary(max_size=8).filter(lambda line: b"\n" not in line and b"\r" not in line)


@given(st.lists(st.lists(LINE, max_size=5), min_size=1, max_size=4), st.randoms())
def test_lines_are_whole_and_in_order_however_they_are_cut(
    said: list[list[bytes]], random: Any
) -> None:
    out = io.BytesIO()
    screen = Screen(out, size=len(said))
    streams = [RankOutput(rank, screen) for rank in range(len(said))]
    left = [b"".join(line + b"\n" for line in lines) for lines in said]
    while any(left):
        rank = random.choice([rank for rank, data in enumerate(left) if data])
        cut = random.randint(1, len(left[rank]))
        streams[rank].feed(left[rank][:cut])
        left[rank] = left[rank][cut:]
    for stream in streams:
        stream.close()
    shown = out.getvalue().split(b"\n")[:-1]
    for rank, lines in enumerate(said):
        prefix = b"[%d] " % rank
        assert [line[4:] for line in shown if line.startswith(prefix)] == lines
    assert len(shown) == sum(map(len, said))


def test_prefixes_are_as_wide_as_the_widest() -> None:
    screen = Screen(io.BytesIO(), size=11)
    assert (screen.prefix(3), screen.prefix(10)) == (b" [3] ", b"[10] ")


def test_colour_is_for_terminals_that_want_it(tty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Screen(io.BytesIO(), size=2).prefix(1) == b"[1] "
    coloured = [Screen(tty, size=2).prefix(rank) for rank in (0, 1)]
    assert all(b"\x1b[" in prefix for prefix in coloured)
    assert coloured[0][:5] != coloured[1][:5]
    monkeypatch.setenv("TERM", "dumb")
    assert Screen(tty, size=2).prefix(1) == b"[1] "
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert Screen(tty, size=2).prefix(1) == b"[1] "


def test_a_prompt_is_shown_though_its_line_has_no_end() -> None:
    out = io.BytesIO()
    screen = Screen(out, size=2)
    asks, other = RankOutput(0, screen), RankOutput(1, screen)
    asks.feed(b"name? ")
    due = asks.due()
    assert due is not None
    assert time.monotonic() < due <= time.monotonic() + _output.PATIENCE_S
    asks.show_rest()
    assert asks.due() is None
    assert out.getvalue() == b"[0] name? "
    other.feed(b"busy\n")
    asks.feed(b"more\n")
    assert out.getvalue() == b"[0] name? \n[1] busy\n[0] more\n"


def test_a_progress_bar_is_drawn_over_itself_on_a_terminal_only(tty: Any) -> None:
    for out, due in ((tty, b"\r\x1b[K"), (io.BytesIO(), b"\n")):
        screen = Screen(out, size=1)
        stream = RankOutput(0, screen)
        for percent in (b"10%", b"20%"):
            stream.feed(b"\r" + percent)
            stream.show_rest()
        stream.feed(b"\r30%\r\n")
        prefix = screen.prefix(0)
        assert out.getvalue() == due.join(prefix + p for p in (b"10%", b"20%", b"30%")) + b"\n"


def test_a_line_that_never_ends_does_not_fill_the_memory() -> None:
    out = io.BytesIO()
    stream = RankOutput(0, Screen(out, size=1))
    for _ in range(100):
        stream.feed(b"x" * 10_000)
    assert len(out.getvalue()) > 900_000
    assert len(stream._rest) <= _output.LONGEST


TRACE = (
    b"Traceback (most recent call last):\n  File x\nmy.errors.Boom: it broke\n  over two lines\n"
)


def errors() -> tuple[io.BytesIO, ErrorStream]:
    out = io.BytesIO()
    return out, ErrorStream(3, Screen(out, size=4))


def test_a_traceback_at_the_end_is_held_back() -> None:
    out, stream = errors()
    stream.feed(b"warning\n" + TRACE)
    stream.close()
    assert out.getvalue() == b"[3] warning\n"
    assert b"\n".join(stream.traceback) + b"\n" == TRACE
    assert stream.error_name() == "Boom"


def test_a_traceback_with_torchs_own_prefix_is_one_too() -> None:
    """Once a process group is up, torch writes `[rank3]: ` before every line of a traceback."""
    out, stream = errors()
    stream.feed(b"".join(b"[rank3]: " + line for line in TRACE.splitlines(keepends=True)))
    stream.close()
    assert out.getvalue() == b""
    assert b"\n".join(stream.traceback) + b"\n" == TRACE
    assert stream.error_name() == "Boom"


def test_a_traceback_that_a_rank_survives_is_shown_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_traceback_capture, "HELD_S", 0.0)
    out, stream = errors()
    stream.feed(TRACE)
    due = stream.due()
    assert due is not None
    assert due <= time.monotonic()
    stream.show_rest()
    assert out.getvalue().replace(b"[3] ", b"") == TRACE
    assert stream.error_name() == "Boom"  # it may still have been the last
    stream.feed(b"going on\n")
    assert stream.traceback == []
    assert stream.error_name() == ""


def test_who_speaks_on_after_a_traceback_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    out, stream = errors()
    stream.feed(TRACE)
    stream.feed(b"in one breath\n")
    assert out.getvalue() == b""
    monkeypatch.setattr(_traceback_capture, "ONE_BREATH_S", 0.0)
    stream.feed(b"going on\n")
    said = out.getvalue().replace(b"[3] ", b"")
    assert said == TRACE + b"in one breath\ngoing on\n"
    assert stream.traceback == []


def test_endless_tracebacks_are_not_held_back() -> None:
    out, stream = errors()
    stream.feed(TRACE.splitlines()[0] + b"\n" + b" line\n" * 20_000)
    assert out.getvalue().count(b"\n") > 19_000


CHAIN = b"""Traceback (most recent call last):
  File x
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File y
roundelay.errors.PeerLost: Rank 2 died.
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [(TRACE, "Boom"), (CHAIN, "PeerLost"), (b"Traceback (most recent call last):\n  x\n", ""),
     (b"Traceback (most recent call last):\n  x\nKeyboardInterrupt\n", "KeyboardInterrupt"),
     (b"plain\n", "")],
)  # fmt: skip
def test_the_error_is_the_last_of_its_chain(text: bytes, name: str) -> None:
    _, stream = errors()
    stream.feed(text)
    assert stream.error_name() == name


@pytest.mark.parametrize(
    ("ends", "code", "first"),
    [
        ([RankEnd(0, 0), RankEnd(1, 0)], 0, None),
        ([RankEnd(0, 0), RankEnd(1, 7)], 7, 1),
        ([RankEnd(0, 1, "PeerLost"), RankEnd(1, 3, "ValueError")], 3, 1),
        ([RankEnd(0, 1, "PeerLost"), RankEnd(1, -9)], 137, 1),
        ([RankEnd(0, -15, told=True), RankEnd(1, 4)], 4, 1),
        ([RankEnd(2, 1, "PeerLost"), RankEnd(1, 1, "PeerLost")], 1, 2),
        ([RankEnd(1, -11), RankEnd(0, 1, "ValueError")], 139, 1),
    ],
)
def test_the_first_rank_that_failed_by_itself_gives_the_exit_code(
    ends: list[RankEnd], code: int, first: int | None
) -> None:
    ending = Ending(ends)
    assert ending.code == code
    assert (ending.first.rank if ending.first else None) == first
    assert bool(ending.summary()) == bool(code)
    for end in ends:
        assert str(end.rank) in ending.summary() or not end.code


def test_who_is_blamed_by_those_who_raised_goes_before_who_ended_first() -> None:
    ends = [RankEnd(0, 9), RankEnd(1, 1, "ValueError")]
    told = "rank 1 raised ValueError. After that, rank 0 ended with exit code 9."
    assert Ending(ends, blamed=1).summary() == told
    assert Ending(ends, blamed=1).code == 1
    # Who ended well is not the one, whatever is said.
    assert Ending([RankEnd(1, 0), RankEnd(0, 9)], blamed=1).code == 9


def test_a_signal_to_the_launcher_comes_before_what_it_did_to_the_ranks() -> None:
    ending = Ending([RankEnd(0, -2, told=True)], signal=2)
    assert (ending.code, ending.summary()) == (130, "ended by SIGINT.")


def test_two_outputs_on_one_terminal_do_not_write_into_each_others_lines(tty: Any) -> None:
    out, err = _output.screens(tty, tty, size=2)
    asks, warns = RankOutput(0, out), RankOutput(1, err)
    asks.feed(b"name? ")
    asks.show_rest()
    warns.feed(b"careful\n")
    assert tty.getvalue() == out.prefix(0) + b"name? \n" + out.prefix(1) + b"careful\n"
