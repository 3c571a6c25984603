"""A loss to be read: its gradients are computed, or it has none, and `backward()` says so."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, Self

import torch

from roundelay.errors import InvalidArgumentError

__all__ = ["ReadLoss"]


class ReadLoss(torch.Tensor):
    """A number as any tensor of one is; only `backward()` raises `why`.

    What is computed of it is an ordinary tensor, and so are its copies.
    """

    why: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def of(cls, loss: torch.Tensor, why: str) -> Self:
        """Return a loss that tells why it has no gradient."""
        made = loss.as_subclass(cls)
        made.why = why
        return made

    @property
    def _plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise."""
        raise InvalidArgumentError(self.why)

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes a private option
        return repr(self._plain)

    def __format__(self, spec: str) -> str:
        return format(self._plain, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self._plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
