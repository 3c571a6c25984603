"""What a view of the page is: a name, and the questions that it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roundelay.web.query import Query

__all__ = ["Document", "View"]

Document = dict[str, Any]  # JSON of any shape


@dataclass(frozen=True)
class View:
    """One view: `GET /api/<name>/<question>` calls the function of that question.

    `takes` are questions that come with a pasted text. Nothing of such a text is read in the
    server: it goes to a child with limits, which runs the module that is named.
    """

    name: str
    answers: Mapping[str, Callable[[Query], Document]]
    takes: Mapping[str, str] = field(default_factory=dict)
