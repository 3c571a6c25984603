"""How far a long command has come, on stderr and only where a person looks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from roundelay.cli._types import console_on_errors
from roundelay.signals import before_ending

SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"

Item = TypeVar("Item")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Give a bar that is gone at the end; where nobody looks it shows nothing."""
    shown = sys.stderr.isatty()
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console_on_errors(), transient=True, disable=not shown)
    ending = before_ending(lambda: os.write(sys.stderr.fileno(), SHOW_CURSOR))
    with ending if shown else nullcontext(), bar:
        yield bar


def watched(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Yield the items, and show a bar for as long as it takes."""
    with progress_bar() as bar:
        yield from bar.track(items, description=label)
