"""What the doctor says of one thing it has looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: fine, not there and not needed, to be known, or in the way."""

    mark: Literal["ok", "absent", "warning", "failed"]
    name: str
    said: str
    cure: str = ""
