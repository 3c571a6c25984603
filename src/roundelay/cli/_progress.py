"""How far a long command has come, on stderr and only where a person looks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from roundelay.cli._types import console_on_errors
from roundelay.signals import before_ending

__all__ = ["watched"]

SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"

Item = TypeVar("Item")


def watched(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Yield the items, and show a bar for as long as it takes."""
    if not sys.stderr.isatty():
        yield from items
        return
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = console_on_errors()
    with (
        before_ending(lambda: os.write(sys.stderr.fileno(), SHOW_CURSOR)),
        Progress(*columns, console=console, transient=True) as progress,
    ):
        yield from progress.track(items, description=label)
