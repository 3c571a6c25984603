"""What autograd keeps of a unit: where in its row a tensor lies, not the memory.

Autograd saves tensors while modules run and reads them in backward, whatever became of what the
module returned. Of those that lie in a unit's row only the place is kept. When one is asked for,
the unit is brought, so that no way into backward finds a row that is absent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training.strategies.zero._flat_parameter import FlatParameter

if TYPE_CHECKING:
    from roundelay.training.strategies.zero._sharded_unit import ShardedUnit

_Row = tuple[
    int, int, int, FlatParameter
]  # its first byte, that after its last, and the unit's number
_autograd: Any = torch._C._autograd  # noqa: SLF001 - where torch's own saved_tensors_hooks finds them


class _SavedView(NamedTuple):
    """Where a saved tensor lay in its row, and how often the row's weights had changed.

    It must not lead to the model: Python's collector does not see through autograd's graphs.
    """

    number: int  # of the unit
    flat: FlatParameter
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    version: int

    def tensor(self) -> torch.Tensor:
        """Return it, in the row as it is now."""
        row = self.flat.whole
        if row.dtype is self.dtype:
            return row.as_strided(self.size, self.stride, self.offset)
        storage = row.untyped_storage()
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, self.offset, self.size, self.stride)


class SavedTensors:
    """Packs and unpacks what autograd saves while modules of one model run."""

    def __init__(self, units: Sequence[ShardedUnit], bring: Callable[[ShardedUnit], None]) -> None:
        self._units, self._unshard = units, bring
        self._rows: list[_Row] = []  # of units that are here
        self._own = self._hooks(_keep, _give_back)  # where nobody else watches

    def here(self, unit: ShardedUnit) -> None:
        """Know the rows of a unit that has come."""
        self.gone(unit)  # it may have been parked
        number = self._units.index(unit)
        for flat in unit.flats:
            begin = flat.whole.data_ptr()
            self._rows.append((begin, begin + flat.whole.nbytes, number, flat))

    def gone(self, unit: ShardedUnit) -> None:
        """Forget the rows of a unit that is about to be let go."""
        self._rows[:] = [row for row in self._rows if row[3] not in unit.flats]

    def enter(self) -> bool:
        """Watch what is saved from here on; tell whether `leave` is due.

        Where somebody else watches already, gradient checkpointing for example, all but the tensors
        in rows is theirs.
        """
        if not torch.is_grad_enabled():
            return False
        top: Any = _autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003, SLF001
        if top is not None and getattr(top[0], "rows", None) is self._rows:
            return False  # ourselves, in a module outside
        hooks = self._own if top is None else self._hooks(*top)
        _autograd._push_saved_tensors_default_hooks(*hooks)  # noqa: SLF001
        return True

    def _hooks(
        self, others_pack: Callable[[torch.Tensor], Any], others_unpack: Callable[[Any], Any]
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]:
        """Return what autograd calls for every tensor: so it is quick where none is ours."""
        rows, weak = self._rows, weakref.ref(self)  # which stay in the graph

        def pack(tensor: torch.Tensor) -> Any:
            try:
                at = tensor.data_ptr()
            except (NotImplementedError, RuntimeError):  # a tensor without memory of its own
                return others_pack(tensor)
            for begin, end, number, flat in rows:
                if begin <= at < end and not (tensor.is_conj() or tensor.is_neg()):
                    return _place(tensor, number, flat)
            return others_pack(tensor)

        def unpack(saved: Any) -> Any:
            return _unshard(weak, saved) if type(saved) is _SavedView else others_unpack(saved)

        vars(pack)["rows"] = rows
        return pack, unpack

    @staticmethod
    def leave() -> None:
        """Watch no more."""
        _autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001

    def bring(self, place: _SavedView) -> torch.Tensor:
        """Return the tensor of a place, with its unit brought."""
        unit = self._units[place.number]
        if place.version != place.flat.version:
            raise InvalidArgumentError(
                f"backward needs the weights of {unit.name} as they were in forward, but they have "
                f"changed since, by optimizer.step() for example. Run forward again."
            )
        self._unshard(unit)
        # What backward saves in its turn, for a gradient of gradients, must be more than a place.
        return place.tensor().clone() if torch.is_grad_enabled() else place.tensor()


def _place(tensor: torch.Tensor, number: int, flat: FlatParameter) -> _SavedView:
    offset = int(tensor.storage_offset())
    return _SavedView(
        number, flat, tensor.dtype, offset, tensor.size(), tensor.stride(), flat.version
    )


def _unshard(watch: weakref.ref[SavedTensors], place: _SavedView) -> torch.Tensor:
    alive = watch()
    if alive is None:
        raise InvalidArgumentError(
            "backward needs the weights of a model that is gone. Under zero3 they are gathered in "
            "backward, so keep the model until that is over."
        )
    return alive.bring(place)


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
