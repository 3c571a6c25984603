"""How far a long command has come, on stderr and only where a person looks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["watched"]

Item = TypeVar("Item")


def watched(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Yield the items, and show a bar for as long as it takes."""
    if not sys.stderr.isatty():
        yield from items
        return
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(items, description=label)
