"""What Python and the native core know by the same numbers, compared when the core is first used.

Where Python can't do without the core, it takes names and numbers from there. Dtypes, reductions,
endings and the window have a meaning without it, so they stand in Python as well.
"""

from __future__ import annotations

from typing import Any

from roundelay.engines._call import ENDINGS, INNER_TAGS
from roundelay.errors import NoEngineError
from roundelay.reductions import DTYPES, REDUCTIONS
from roundelay.schedule import WINDOW

TABLES: dict[str, Any] = {  # Any: of names, and numbers
    "DTYPES": tuple(DTYPES),
    "REDUCTIONS": tuple(REDUCTIONS),
    "ENDINGS": ENDINGS,
    "INNER_TAGS": INNER_TAGS,
    "WINDOW": WINDOW,
}


def check_tables(core: object) -> None:
    """Refuse a core that was built from other sources: it would take one thing for another."""
    for name, table in TABLES.items():
        if getattr(core, name, None) != table:
            raise NoEngineError(differs=name)
