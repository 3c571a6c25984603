"""Parameters that are elsewhere at the moment: whoever computes with one is told so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from roundelay.errors import InvalidArgumentError

__all__ = ["Away", "bring_back", "send_away"]

#: What can be asked of a parameter that is not there: what it looks like, and its hooks.
ALLOWED = {
    "__delete__", "numel", "size", "dim", "ndimension", "nelement", "stride", "element_size",
    "is_contiguous", "is_floating_point", "is_complex", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "untyped_storage", "__hash__", "__repr__", "__format__",
}  # fmt: skip
#: Properties that would show, or replace, elements.
ELEMENTS = {"data", "T", "mT", "H", "mH", "real", "imag"}
MARK = "_roundelay_away"
DIVIDED = (
    "is divided between the ranks under zero3 and whole only while its module runs. Look at it and "
    "write into it inside `with rd.whole(module)`, or look at all by rd.full_state_dict(model), "
    "load it by rd.load, and name the module that computes with it in rd.Zero(stage=3, units=…)."
)


class Away(torch.nn.Parameter):
    """A parameter whose elements lie on several ranks; it keeps its shape, its name and its hooks.

    Without it, torch would compute with memory that is no longer there.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # Any: torch's functions have no public type
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no elements, and refuse the rest."""
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # of a property, which has a name itself
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            allowed = name not in ELEMENTS
        else:
            allowed = name in ALLOWED
        if allowed:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
                return func(*args, **(kwargs or {}))
        what = next(vars(one)[MARK] for one in tree_leaves((args, kwargs)) if type(one) is cls)
        raise InvalidArgumentError(
            f"{name or func} needs the parameter {what.name}, which {what.why}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Refuse: the copy would hold nothing."""
        what = vars(self)[MARK]
        raise InvalidArgumentError(
            f"A copy of the model needs the parameter {what.name}, which {what.why}"
        )

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes contents to be shown
        return (
            f"<parameter {vars(self)[MARK].name} {tuple(self.shape)}, which has no elements here>"
        )


@dataclass(frozen=True, slots=True)
class _Mark:
    kind: type  # that the parameter had
    name: str
    why: str  # ends the sentence "needs the parameter …, which …"


def send_away(parameter: torch.nn.Parameter, name: str, why: str = DIVIDED) -> None:
    """Have a parameter refuse to be computed with, and hold no memory of its own."""
    nothing = torch.full(
        (), torch.nan if parameter.is_floating_point() else 0,
        dtype=parameter.dtype, device=parameter.device,
    )  # fmt: skip
    _replace(parameter, nothing.expand(parameter.shape))
    if type(parameter) is not Away:
        vars(parameter)[MARK] = _Mark(type(parameter), name, why)
        parameter.__class__ = Away


def bring_back(parameter: torch.nn.Parameter, whole: torch.Tensor) -> None:
    """Give a parameter its elements again."""
    if type(parameter) is Away:
        parameter.__class__ = vars(parameter).pop(MARK).kind
    parameter.data = whole


def _replace(parameter: torch.nn.Parameter, data: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
        parameter.data = data
