"""Run the blocks of a page, and put what they print today in the place of what it shows.

In a ```console block every line after `$ ` is run in a shell (`> ` goes on with it), and what it
prints replaces the lines below. A ```python block is run too; if a ```text block follows, it takes
what was printed. Where times are printed, the block begins with ```console times (or ```text
times): then it stays as it is as long as nothing but numbers and their units differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["WIDTH", "with_outputs"]

ROOT = Path(__file__).parent.parent
WIDTH = "96"

BLOCK = re.compile(
    r"^```(?P<kind>console|python)(?P<times> times)?\n(?P<body>.*?)^```\n"
    r"(?:\n```text(?P<text_times> times)?\n(?P<shown>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"\d[\d.,]*(?:e[-+]?\d+)?(?: (?:ns|µs|ms|s))?")
FILLING = re.compile(r"[ ─]+")  # columns are as wide as their numbers


def with_outputs(page: str, *, new_times: bool = False) -> str:
    """Return a page with the outputs that hold today, and on request with today's times."""
    with tempfile.TemporaryDirectory() as made:
        folder = os.path.realpath(made)
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        return BLOCK.sub(lambda found: _refreshed(found, folder, new_times=new_times), page)


def _refreshed(found: re.Match[str], folder: str, *, new_times: bool) -> str:
    body, shown = found["body"], found["shown"]
    masked = not new_times and (found["times"] or found["text_times"])
    if found["kind"] == "console":
        lines = []
        for command in _commands(body):
            shell = "\n".join(line[2:] for line in command)
            lines += [*command, *_run(["bash", "-c", shell], folder)[0].splitlines()]
        fresh = "".join(f"{line}\n" for line in lines)
        if masked and _masked(fresh) == _masked(body):
            return found[0]
        return found[0].replace(f"\n{body}```", f"\n{fresh}```", 1)
    if body.startswith(">>>"):
        return found[0]  # the tests compare these line by line
    printed, code = _run([sys.executable, "-c", body], folder)
    if code:
        raise RuntimeError(f"This block fails:\n{body}\n{printed}")
    if shown is None or (masked and _masked(printed) == _masked(shown)):
        return found[0]
    return found[0].removesuffix(f"{shown}```\n") + f"{printed}```\n"


def _masked(text: str) -> str:
    return FILLING.sub(" ", NUMBER.sub("#", text))


def _commands(body: str) -> Iterator[list[str]]:
    """Yield the lines of every command of a console block, without its output."""
    command: list[str] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            if command:
                yield command
            command = [line]
        elif line.startswith("> ") or line == ">":
            command.append(line)
    yield command


def _run(command: list[str], folder: str) -> tuple[str, int]:
    """Run a command as a reader would, in a window of a fixed width."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    settings = {"PATH": path, "COLUMNS": WIDTH, "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
    unwanted = {"FORCE_COLOR", "TTY_COMPATIBLE", "PYTHONWARNINGS"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    done = subprocess.run(  # noqa: S603 - the commands are those of our own pages
        command,
        cwd=folder,
        env=kept | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    # A reader's paths are other ones: show them from where the reader stands.
    text = done.stdout.replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines()), done.returncode
