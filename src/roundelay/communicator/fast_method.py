"""Methods that the native core looks at first: plain calls run no Python on their way.

See native/fast_method_py.cpp, and `calls.py` for the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar, cast

from roundelay import _core
from roundelay.reductions import OPS

__all__ = ["FUNCTIONS", "fast"]

MethodT = TypeVar("MethodT", bound=Callable[..., Any])
#: What takes calls that are not plain, by name.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


class _Method:
    """A method until its class is made, which then has one of the native core in its place."""

    def __init__(self, function: Callable[..., Any], how: dict[str, Any]) -> None:
        self._function, self._how = function, how

    def __set_name__(self, owner: type, name: str) -> None:
        FUNCTIONS[name] = self._function
        terms = signature(self._function)
        shown = [one.replace(annotation=one.empty) for one in terms.parameters.values()]
        form = str(terms.replace(parameters=shown, return_annotation=terms.empty))
        doc = f"{name}{form.replace('(self', '($self', 1)}\n--\n\n{self._function.__doc__}"
        setattr(owner, name, _core.fast_method(owner, self._function, doc, **self._how))


def fast(collective: int, *, op: int = OPS["sum"], **how: Any) -> Callable[[MethodT], MethodT]:
    """Have the native core look at a call first: what it takes never gets to the Python below.

    It knows parameters by their names; `how` says what goes in and what comes out.
    """

    def made(function: MethodT) -> MethodT:
        return cast("MethodT", _Method(function, {"collective": collective, "op": op, **how}))

    return made
