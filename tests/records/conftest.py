from __future__ import annotations

import random
from collections.abc import Callable

import pytest


@pytest.fixture
def noise() -> Callable[[int, int], bytes]:
    """Return bytes that are the same for the same seed."""
    return lambda seed, count: random.Random(seed).randbytes(count)
