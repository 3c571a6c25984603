"""Ranks that are threads: nothing of them is left when a run has ended."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import roundelay as rd


def breaks_backward() -> None:
    """Have torch keep what a backward pass that raised has left, until the kernel's thread ends."""
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(4, 6)
    before = layer(torch.ones(2, 4))  # keeps the shape for which gradients were expected
    layer.weight.data = layer.weight.data[:3].clone()
    layer.bias.data = layer.bias.data[:3].clone()
    with pytest.raises(RuntimeError):
        layer(torch.ones(2, 4)).sum().backward()
    del before


@pytest.mark.parametrize("work", [lambda: None, breaks_backward])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_no_thread_is_left(ranks: int, work: Any) -> None:
    def body(_: rd.Communicator) -> int:
        work()
        return threading.get_native_id()

    for _ in range(20):
        numbers = rd.run(body, ranks, "threads")
        left = {int(task.name) for task in Path("/proc/self/task").iterdir()}
        assert left.isdisjoint(numbers)
