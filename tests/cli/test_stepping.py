"""Stepping with keys in a real terminal, and what happens where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import Any

import pytest

from roundelay.cli._screen import split_keys
from roundelay.cli._stage import KEYS

RIGHT, LEFT, HOME, END = "\x1b[C", "\x1b[D", "\x1b[H", "\x1b[F"
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
Start = Callable[..., Any]  # the Terminal of conftest.py, which tests can't import

MAIN = "from roundelay.cli import main; main()"


def test_keys_step_forward_back_and_to_both_ends(terminal: Start) -> None:
    screen = terminal("explain", "all_reduce")
    screen.wait_for("q quit")
    assert ENTER_SCREEN in screen.text
    for key, shown in [
        (RIGHT, "Step 1 of 6"),
        ("l", "Step 2 of 6"),
        (" ", "Step 3 of 6"),
        (LEFT, "Step 2 of 6"),
        ("h", "Step 1 of 6"),
        (END, "Step 6 of 6"),
        (RIGHT, "Step 6 of 6"),  # stays at the end
        (HOME, "Start, before"),
        (LEFT, "Start, before"),
        ("\x1bOC\x1bOC\x1bOC", "Step 3 of 6"),  # typed at once, in the other mode of arrow keys
        ("x", "Step 3 of 6"),  # no such key
    ]:
        screen.send(key)
        screen.wait_for(shown)
        screen.wait_for("q quit")
    screen.send("q")
    assert screen.exit_code() == 0
    assert LEAVE_SCREEN in screen.text
    # What was looked at last stays in view.
    assert "Step 3 of 6" in screen.text[screen.text.index(LEAVE_SCREEN) :]


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("\x1b", 0), ("\x04", 0), ("\x03", 130)])
def test_every_way_out_gives_the_screen_back(terminal: Start, key: str, code: int) -> None:
    screen = terminal("explain", "all_reduce")
    screen.wait_for("q quit")
    screen.send(key)

    assert screen.exit_code() == code
    assert LEAVE_SCREEN in screen.text
    assert "\x1b[?25h" in screen.text  # the cursor is back
    assert "Traceback" not in screen.text


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_every_signal_gives_the_screen_back_and_still_ends_it(terminal: Start, name: str) -> None:
    number = getattr(signal, name)
    screen = terminal("explain", "all_reduce")
    screen.wait_for("q quit")
    screen.text = ""
    if name == "SIGQUIT":
        screen.send("\x1c")  # Ctrl-\\
    else:
        os.kill(screen.pid, number)
    assert screen.exit_code() == -number
    assert LEAVE_SCREEN in screen.text
    assert "\x1b[?25h" in screen.text
    assert "Traceback" not in screen.text
    assert termios.tcgetattr(screen.master)[3] & termios.ECHO


@pytest.mark.parametrize(("columns", "lines"), [(20, 5), (40, 12), (80, 24), (200, 60)])
def test_resizing_redraws_in_the_new_size(terminal: Start, columns: int, lines: int) -> None:
    screen = terminal("explain", "all_reduce", "-n", "8", columns=100, lines=30)
    screen.wait_for("q quit")
    screen.send(RIGHT)
    screen.wait_for("\x1b[30;1H")
    screen.text = ""
    screen.resize(columns, lines)
    screen.wait_for(f"\x1b[{lines};1H")

    assert f"\x1b[{lines + 1};1H" not in screen.text
    screen.send("q")
    assert screen.exit_code() == 0


def test_tall_pictures_scroll(terminal: Start) -> None:
    screen = terminal("explain", "all_reduce", "-n", "16")
    screen.wait_for("q quit")
    assert "all_reduce_ring on 16 ranks" in screen.text
    screen.wait_for("more lines")
    screen.send("\x1b[B" * 30)
    screen.wait_for("(0 more lines)")
    screen.send("q")
    assert screen.exit_code() == 0


def test_dumb_terminals_get_all_steps_at_once(terminal: Start) -> None:
    screen = terminal("explain", "all_reduce", term="dumb")

    assert screen.exit_code() == 0
    assert "Step 6 of 6" in screen.text
    assert "\x1b" not in screen.text


def test_progress_bar_goes_away(terminal: Start) -> None:
    screen = terminal("prove", "all_reduce", "--sizes", "2-4", columns=120)

    assert screen.exit_code() == 0
    assert "27 proved" in screen.text


@pytest.mark.parametrize(
    "environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "xterm-256color"}]
)
def test_piped_text_has_no_control_codes(environment: dict[str, str]) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "explain", "all_reduce"],
        env={**kept, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        check=True,
    )

    assert b"\x1b" not in done.stdout
    assert "✓" in done.stdout.decode()
    assert b"Step 6 of 6" in done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("command", [["explain", "all_reduce"], ["list"], ["prove", "barrier"]])
def test_encodings_without_unicode_get_ascii(encoding: str, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *command],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    )

    assert done.stdout.isascii()
    assert done.stdout


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_found_among_others(key: str) -> None:
    if key != "\x1b":  # a lone Escape comes alone
        assert split_keys(f"x{key}{key}y") == ["x", key, key, "y"]
