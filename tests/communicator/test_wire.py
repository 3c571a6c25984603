"""`wire="bf16"`: float32 travels in half the bytes, rounded as often as is said, alike for all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

SIZES = (1, 2, 3, 4, 7)


def laws() -> Any:
    path = Path(__file__).parent.parent / "engines" / "wire_laws.py"
    spec = importlib.util.spec_from_file_location("wire_laws", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", SIZES)
def test_the_laws_hold(ranks: Any, size: int) -> None:
    assert ranks(size, laws().failures) == [[]] * size


@pytest.mark.parametrize("size", SIZES)
def test_half_the_bytes_are_moved(ranks: Any, size: int) -> None:
    def work(comm: Any) -> list[tuple[str, int, int]]:
        found = []
        calls: dict[str, Any] = {
            "all_reduce": lambda **wire: comm.all_reduce(np.ones(5003, np.float32), **wire),
            "all_gather": lambda **wire: comm.all_gather(np.ones(5003, np.float32), **wire),
            "reduce_scatter": lambda **wire: comm.reduce_scatter(
                np.ones((comm.size, 5003), np.float32), **wire
            ),
        }
        for name, call in calls.items():
            algorithm = {"algorithm": "two_shot"} if name == "all_reduce" else {}
            moved = [sum(map(sum, comm.traffic()))]
            for wire in ({}, {"wire": "bf16"}):
                call(**algorithm, **wire)
                moved.append(sum(map(sum, comm.traffic())))
            found.append((name, moved[1] - moved[0], moved[2] - moved[1]))
        return found

    for found in ranks(size, work):
        for name, plain, narrow in found:
            assert plain == 2 * narrow, name
            assert plain > 0 or size == 1, name


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("other", ["float32", "bfloat16"])
def test_ranks_that_differ_in_it_are_told(ranks: Any, collective: str, other: str) -> None:
    """Also where the same bytes would travel: one rounds, and the other has nothing to round."""

    def work(comm: Any) -> None:
        dtype: Any = ml_dtypes.bfloat16 if other == "bfloat16" else other
        x = np.ones((2, 4), dtype if comm.rank else np.float32)
        wire = {} if comm.rank else {"wire": "bf16"}
        getattr(comm, collective)(x, **wire)

    for one in ranks.outcomes(2, work):
        assert one.error == "CollectiveMismatch"
        assert f"rank 0: {collective} wire=bf16 #1, by {collective} bfloat16[" in one.message
        assert f"rank 1: {collective} #1 {other}[" in one.message
        assert "test_wire.py:" in one.message


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_an_algorithm_rounds_as_often_as_it_adds(ranks: Any, size: int) -> None:
    """A ring's sum is rounded at every hop, as the same call's on bfloat16."""

    def work(comm: Any) -> bool:
        x = np.random.default_rng(comm.rank).standard_normal(1001).astype(np.float32)
        narrow = comm.all_reduce(x.astype(ml_dtypes.bfloat16), algorithm="ring")
        found = comm.all_reduce(x, algorithm="ring", wire="bf16")
        return np.array_equal(found, narrow.astype(np.float32))

    assert ranks(size, work) == [True] * size


def test_memory_on_the_way_is_kept_and_never_shared(ranks: Any) -> None:
    """Many calls under way at once, dropped handles among them, each with its own memory."""

    def work(comm: Any) -> list[float]:
        begun = [comm.start.all_reduce(np.full(40_000, 2.0**n, np.float32), wire="bf16")
                 for n in range(8)]  # fmt: skip
        del begun[::2]
        again = comm.all_reduce(np.ones(40_000, np.float32), wire="bf16")
        return [*(float(handle.wait().mean()) for handle in begun), float(again.mean())]

    due = [3 * 2.0**n for n in (1, 3, 5, 7)] + [3.0]
    assert ranks(3, work) == [due] * 3


def test_arrays_of_every_form(ranks: Any) -> None:
    def work(comm: Any) -> list[bool]:
        strided = np.ones((6, 8), np.float32)[::2, ::3]
        scalar = np.ones((), np.float32)
        frozen = np.ones(3, np.float32)
        frozen.flags.writeable = False
        into = np.zeros(3, np.float32)
        comm.all_reduce(frozen, out=into, wire="bf16")
        return [
            bool(np.all(comm.all_reduce(strided, wire="bf16") == 2) and np.all(strided == 2)),
            bool(comm.all_reduce(scalar, wire="bf16") == 2),
            bool(np.all(into == 2)),
        ]

    assert ranks(2, work) == [[True] * 3] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_large_results_that_go_past_the_caches(ranks: Any, size: int) -> None:
    """In place and not, of many slices, what comes is that of the call on bfloat16."""
    count = 9_000_001  # more than 32 MiB

    def work(comm: Any) -> list[bool]:
        x = np.random.default_rng(comm.rank).standard_normal(count, np.float32)
        narrow = x.astype(ml_dtypes.bfloat16)
        rows = x[: count // size * size].reshape(size, -1)
        pairs = [
            (comm.all_gather(x, wire="bf16"), comm.all_gather(narrow)),
            (comm.reduce_scatter(rows, wire="bf16"),
             comm.reduce_scatter(rows.astype(ml_dtypes.bfloat16))),
            (comm.all_reduce(x, "avg", out=np.empty_like(x), wire="bf16"),
             comm.all_reduce(narrow.copy(), "avg")),
            (comm.all_reduce(x, wire="bf16"), comm.all_reduce(narrow)),
        ]  # fmt: skip
        return [np.array_equal(found, due.astype(np.float32)) for found, due in pairs]

    assert ranks(size, work) == [[True] * 4] * size
