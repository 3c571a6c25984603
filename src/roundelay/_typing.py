"""Words for types: what callers pass, and what comes back of the same kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy.typing as npt

if TYPE_CHECKING:  # for the checker only: torch is optional, and the rest is not of Python 3.11
    import torch
    from typing_extensions import Buffer as SupportsBuffer
    from typing_extensions import TypeVar as TypeVarWithDefault

    from roundelay.reductions import Located


class SupportsDLPack(Protocol):
    """An array of a library that speaks DLPack."""

    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


#: What calls take. Some write it, and hand the same object back.
Buffer: TypeAlias = "npt.NDArray[Any] | torch.Tensor | Located | SupportsBuffer | SupportsDLPack"
BufferT = TypeVar("BufferT", bound="Buffer")

#: What calls take that return new memory of the same kind, in another shape.
ArrayT = TypeVar("ArrayT", "npt.NDArray[Any]", "torch.Tensor")

if TYPE_CHECKING:
    #: What a call gives once it is done.
    ResultT = TypeVarWithDefault("ResultT", default=Any)
else:
    ResultT = TypeVar("ResultT")

Shape: TypeAlias = tuple[int, ...]
