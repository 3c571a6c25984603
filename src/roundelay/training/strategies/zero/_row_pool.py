"""Memory of rows that come and go: what nobody has any more is there for the next one.

Memory that is new costs a page fault for every page, which is more than to gather what goes there.
"""

from __future__ import annotations

import sys

import torch

_use_count = torch._C._storage_Use_Count  # noqa: SLF001 - torch has no other name


class RowPool:
    """Rows of one model on one rank that were let go, no more than were there at a time.

    A row that somebody still holds a tensor in is his; it is not taken again.
    """

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []
        self._alone = _holders(torch.empty(1, device="cpu"))  # of a row that nobody else has

    def take(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Return a row of so many elements; where none fits, all others go first."""
        for at, row in enumerate(self.rows):
            fits = row.numel() == numel and row.dtype is like.dtype
            if fits and _holders(row) == self._alone:
                return self.rows.pop(at)
        self.rows.clear()
        return like.new_empty(numel)

    def keep(self, row: torch.Tensor) -> None:
        """Have a row that is let go; devices have such a store of their own."""
        if row.device.type == "cpu" and row.numel() and not row.is_inference():
            self.rows.append(row)


def _holders(row: torch.Tensor) -> tuple[int, int]:
    """Count who has a tensor in a row, and who has its storage; some of torch's own are in it."""
    storage = row.untyped_storage()
    return _use_count(storage._cdata), sys.getrefcount(storage)  # noqa: SLF001 - likewise
