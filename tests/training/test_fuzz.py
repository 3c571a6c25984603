"""A sample of the fuzzer's programs: right under every strategy, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from fuzz import fuzz


@pytest.mark.filterwarnings("ignore")
def test_random_programs(sample: Any) -> None:
    for seed in sample.some(range(20), 3):
        outcome = fuzz(seed)
        assert outcome is None or outcome.bad == {}, (seed, outcome)
