"""How long a dim that is cut is: here, and on all ranks together.

A number that a program writes down is meant for one device, where nothing is cut. One that it reads
off a tensor is this rank's. Only the latter becomes another one when a call is tried on the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add, floordiv, mul, sub
from typing import Any, Self

__all__ = ["Length"]


class Length(int):
    """How long a dim is on this rank, or what is computed of it, and what that is of the whole.

    >>> half = Length(4, 8) // 2
    >>> half, half.whole
    (2, 4)
    """

    whole: int

    def __new__(cls, here: int, whole: int) -> Self:
        """Be an ordinary number, that of this rank."""
        made = super().__new__(cls, here)
        made.whole = whole
        return made

    def __reduce__(self) -> tuple[type, tuple[int]]:
        """Become a plain number in copies and pickles."""
        return int, (int(self),)

    def _with(self, other: Any, operate: Callable[[Any, Any], Any]) -> Any:
        """Do it here and on the whole."""
        if not isinstance(other, int):
            return NotImplemented
        whole = other.whole if isinstance(other, Length) else other
        return Length(operate(int(self), int(other)), operate(self.whole, int(whole)))

    def __add__(self, other: int, /) -> int:
        return self._with(other, add)  # type: ignore[no-any-return]

    def __radd__(self, other: int, /) -> int:
        return self._with(other, add)  # type: ignore[no-any-return]

    def __sub__(self, other: int, /) -> int:
        return self._with(other, sub)  # type: ignore[no-any-return]

    def __rsub__(self, other: int, /) -> int:
        return self._with(other, lambda mine, theirs: theirs - mine)  # type: ignore[no-any-return]

    def __mul__(self, other: int, /) -> int:
        return self._with(other, mul)  # type: ignore[no-any-return]

    def __rmul__(self, other: int, /) -> int:
        return self._with(other, mul)  # type: ignore[no-any-return]

    def __floordiv__(self, other: int, /) -> int:
        return self._with(other, floordiv)  # type: ignore[no-any-return]

    def __neg__(self) -> int:
        return Length(-int(self), -self.whole)
