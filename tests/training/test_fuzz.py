"""A sample of the fuzzer's programs: right under every strategy, or refused by name."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from fuzz import fuzz


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(20))
def test_a_random_program(seed: int) -> None:
    outcome = fuzz(seed)
    assert outcome is None or outcome.bad == {}, outcome
