"""What tests of the axes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Forks can't use the threads that torch has here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outcome_of(model: Any, out: Any, loss: Any) -> list[Any]:
    """Go backward; return the output and all gradients, whole. Every rank calls it."""
    loss.backward()
    return [out.detach(), *(sharded_whole(each) for each in model.parameters())]


def sharded_whole(parameter: Any) -> Any:
    """Return the gradient of a parameter, put together from the parts of all ranks."""
    from roundelay.parallel.sharding import sharding_of  # noqa: PLC0415 - only with torch

    cut = sharding_of(parameter)
    return parameter.grad if cut is None else cut.whole(parameter.grad)
