"""Methods in the native core mean what the Python functions mean that they stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from roundelay.communicator import Communicator
from roundelay.communicator.fast_method import FUNCTIONS
from roundelay.errors import CollectiveMismatch

METHODS = list(FUNCTIONS)
Call = tuple[tuple[Any, ...], dict[str, Any]]


def row(value: float = 1.0) -> Any:
    return np.full((1, 2), value)


def block(size: int) -> Any:
    return np.arange(2.0 * size).reshape(size, 1, 2)


def forms(name: str, size: int) -> list[Call]:
    """Return ways to call a method, right and wrong; everything in them is new."""

    def every() -> Any:
        return block(size)

    gathers: list[Call] = [
        ((row(),), {"out": every()}),
        ((), {"x": row(), "out": every(), "algorithm": None}),
        ((row(),), {"out": np.zeros((size, 2)), "axis": 0}),
        ((row(),), {"out": every(), "axis": None}),
        ((row(),), {"out": every(), "axis": 1}),
        ((row(),), {"out": every(), "counts": None}),
        ((row(),), {}),
    ]
    folds: list[Call] = [
        ((row(),), {}),
        ((row(), "max"), {}),
        ((row(),), {"op": "prod", "out": row()}),
        ((), {"out": row(), "op": "sum", "x": row(2.0)}),
        ((row(), None), {}),
        ((row(), "no such reduction"), {}),
        ((row(), "avg"), {}),
        ((row(), "lor"), {}),
    ]
    rooted: list[Call] = [
        (plain, {**named, "root": root})
        for plain, named in (gathers if name == "gather" else folds)[:3]
        for root in (0, size - 1, size, -1, np.int64(1), None, True, 2**70)
    ]
    shares: list[Call] = [
        ((every(),), {"out": row()}),
        ((every(),), {"out": every()}),
        ((np.ones((size, 2)),), {"axis": 0, "out": row()}),
        ((every(),), {}),
    ]
    own: dict[str, list[Call]] = {
        "all_reduce": folds,
        "scan": folds,
        "exscan": folds,
        "reduce": [*folds, *rooted, ((row(), "sum", size - 1), {}), ((row(), "sum", 0, row()), {})],
        "broadcast": [((row(), 1), {}), ((row(),), {"root": 0}), ((row(),), {"out": row()})],
        "all_gather": [*gathers, ((row(),), {"label": 3, "out": every()})],
        "gather": [*gathers, *rooted, ((row(), 1), {"out": every()})],
        "scatter": [*shares, ((None,), {"out": row()}), ((every(), 1), {"out": row()})],
        "reduce_scatter": [*shares, ((every(), "min"), {"out": row()})],
        "all_to_all": [*shares, *[((x := every(),), {"out": x}) for _ in range(2)]],
        "barrier": [((), {}), ((), {"algorithm": None}), ((1,), {})],
    }
    wrong: list[Call] = [
        ((), {}),
        ((row(), *[None] * 9), {}),
        ((row(),), {"x": row()}),
        ((row(),), {"no_such_name": 1}),
    ]
    return own[name] + wrong


def outcome(call: Callable[..., Any], given: Call) -> Any:
    """Return the result, what the arguments became, and who is whose; or what was raised."""
    plain, named = given
    arrays = [one for one in (*plain, *named.values()) if isinstance(one, np.ndarray)]
    try:
        found = call(*plain, **named)
    except Exception as error:  # noqa: BLE001 - which one is what the test asks
        broken = isinstance(error, CollectiveMismatch)  # where others are by now may change
        return type(error), str(error).splitlines()[0] if broken else str(error)
    same = [found is one for one in arrays]
    return None if found is None else found.tolist(), [one.tolist() for one in arrays], same


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_method_gives_what_its_function_gives(size: int, name: str, ranks: Any) -> None:
    def work(comm: Any) -> list[Any]:
        wrong = []
        for fast, slow in zip(forms(name, size), forms(name, size), strict=True):
            # A root may be a window ahead, and what it does next breaks what others are still at.
            outcome(comm.barrier, ((), {}))
            for _ in range(2):  # what is called the first time has no program yet
                got = outcome(getattr(comm, name), fast)
                wanted = outcome(partial(FUNCTIONS[name], comm), slow)
                if got != wanted:
                    wrong.append((fast, got, wanted))
        return wrong

    assert ranks(size, work) == [[]] * size


def test_it_is_seen_as_the_function() -> None:
    assert len(METHODS) == 11
    for name, function in FUNCTIONS.items():
        method = getattr(Communicator, name)
        terms = inspect.signature(function).parameters.values()
        plain = [one.replace(annotation=one.empty) for one in terms]
        seen = inspect.signature(method).parameters.values()
        assert [(one.name, one.default) for one in seen] == [
            (one.name, one.default) for one in plain
        ]
        assert (method.__name__, inspect.isroutine(method)) == (name, True)
        assert inspect.getdoc(method) == inspect.getdoc(function)


def test_what_is_no_communicator_is_told_so() -> None:
    method: Any = Communicator.all_reduce
    with pytest.raises(TypeError, match="ArrayCalls"):
        method(3, np.ones(2))
    with pytest.raises(TypeError, match="argument"):
        method()
