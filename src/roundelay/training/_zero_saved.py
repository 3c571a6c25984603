"""What autograd keeps of a unit: where in its row a tensor lies, not the memory.

Autograd saves tensors while modules run and reads them in backward, whatever became of what the
module returned. Of those that lie in a unit's row only the place is kept. When one is asked for,
the unit is brought, so that no way into backward finds a row that is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._zero_flats import Flat

if TYPE_CHECKING:
    from roundelay.training._zero_flight import Traveller

__all__ = ["SavedTensors"]

_autograd = torch._C._autograd  # noqa: SLF001 - where torch's own saved_tensors_hooks finds them


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a saved tensor lay in its row, and how often the row's weights had changed."""

    unit: Traveller
    flat: Flat
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    version: int

    def tensor(self) -> torch.Tensor:
        """Return it, in the row as it is now."""
        storage = self.flat.whole.untyped_storage()
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, self.offset, self.size, self.stride)


class SavedTensors:
    """Packs and unpacks what autograd saves while modules of one model run."""

    def __init__(self, bring: Callable[[Traveller], None]) -> None:
        self._bring = bring
        self._rows: dict[int, tuple[Traveller, Flat]] = {}  # by address, of units that are here

    def here(self, unit: Traveller) -> None:
        """Know the rows of a unit that has come."""
        for flat in unit.flats:
            if flat.whole.numel():
                self._rows[flat.whole.data_ptr()] = unit, flat

    def gone(self, unit: Traveller) -> None:
        """Forget the rows of a unit that is about to be let go."""
        for flat in unit.flats:
            self._rows.pop(flat.whole.data_ptr(), None)

    def enter(self) -> bool:
        """Watch what is saved from here on; tell whether `leave` is due.

        Where somebody else watches already, gradient checkpointing for example, all but the tensors
        in rows is theirs.
        """
        if not torch.is_grad_enabled():
            return False
        top: Any = _autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003, SLF001
        if top is not None and getattr(top[0], "func", None) == self._pack:
            return False  # ourselves, in a module outside
        pack, unpack = top or (_keep, _give_back)
        hooks = partial(self._pack, pack), partial(self._unpack, unpack)
        _autograd._push_saved_tensors_default_hooks(*hooks)  # noqa: SLF001
        return True

    @staticmethod
    def leave() -> None:
        """Watch no more."""
        _autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001

    def _pack(self, others: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        found = self._row_of(tensor)
        if found is None:
            return others(tensor)
        unit, flat = found
        offset = int(tensor.storage_offset())
        return _Place(
            unit, flat, tensor.dtype, offset, tensor.size(), tensor.stride(), flat.version
        )

    def _row_of(self, tensor: torch.Tensor) -> tuple[Traveller, Flat] | None:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None  # lies elsewhere, or is more than a place
        try:
            return self._rows.get(tensor.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):  # a tensor without memory of its own
            return None

    def _unpack(self, others: Callable[[Any], torch.Tensor], saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Place):
            return others(saved)
        if saved.version != saved.flat.version:
            raise InvalidArgumentError(
                f"backward needs the weights of {saved.unit.name} as they were in forward, but "
                f"they have changed since, by optimizer.step() for example. Run forward again."
            )
        self._bring(saved.unit)
        # What backward saves in its turn, for a gradient of gradients, must be more than a place.
        return saved.tensor().clone() if torch.is_grad_enabled() else saved.tensor()


def _keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Keep a tensor as autograd does by itself, with the number of its changes."""
    # Detached: a result that its own graph holds would never be freed.
    return tensor.detach(), tensor._version  # noqa: SLF001 - as autograd itself does


def _give_back(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    if tensor._version != version:  # noqa: SLF001 - as autograd itself does
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: {tuple(tensor.shape)}, {tensor.dtype}, is at version "
            f"{tensor._version}; expected version {version} instead."  # noqa: SLF001
        )
    return tensor
