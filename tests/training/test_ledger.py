"""The ledger: what was predicted is measured, and closed forms hold where splits are even."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.training.prepare import known_strategies  # noqa: E402

STRATEGIES = known_strategies()
EVEN = 6 * 1024  # elements of every matrix: divides by every size below, in whole cache lines


def model_of_even_size() -> Any:
    return torch.nn.Sequential(
        *(torch.nn.Linear(96, 64, bias=False) if n % 2 == 0 else torch.nn.Linear(64, 96, bias=False)
          for n in range(4))
    )  # fmt: skip


def book(name: str, size: int, kind: Any, steps: int = 3, **options: Any) -> list[Any]:
    model = model_of_even_size()

    def be_rank(comm: Any) -> Any:
        mine = model_of_even_size()
        mine.load_state_dict(model.state_dict())
        mine, optimizer = rd.prepare(
            mine, kind(mine.parameters(), lr=1e-3), strategy=name, comm=comm, **options
        )
        for step in range(steps):
            mine(torch.ones(2, 96)).square().mean().backward()
            optimizer.step()
            if step < steps - 1:
                optimizer.zero_grad()
        return json.loads(rd.ledger(mine).to_json()), str(rd.ledger(mine))

    return [one for one in rd.run(be_rank, size, "threads") if one is not None]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [name for name, one in STRATEGIES.items() if one.synchronous])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
def test_predicted_is_measured(name: str, size: int, kind: Any) -> None:
    for made, _ in book(name, size, kind):
        for entry in made["entries"]:
            for word in ("parameters", "gradients", "optimizer"):
                assert entry["measured"][word] == pytest.approx(entry["predicted"][word], rel=0.02)
            assert entry["sent"] == pytest.approx(entry["sent_predicted"], rel=0.02)
            assert entry["received"] == pytest.approx(entry["received_predicted"], rel=0.02)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ddp_sends_what_the_closed_form_says(size: int) -> None:
    whole = 4 * EVEN * 4
    flags = 8 * (2 * 4 + 5) * (size - 1)  # in one shot, everything to everybody
    for made, _ in book("ddp", size, torch.optim.SGD):
        for entry in made["entries"]:
            # Once, after the first of three steps, rank 0 tells in which order gradients came.
            order = 8 * 4 * (size - 1) / 3 + 1e-6
            assert 0 <= entry["sent"] - (2 * whole * (size - 1) / size + flags) <= order
            assert entry["predicted"]["gradients"] == entry["measured"]["gradients"] == whole
            assert entry["measured"]["optimizer"] == 0


def test_it_can_be_read() -> None:
    _, text = book("ddp", 2, torch.optim.Adam)[0]
    assert text.splitlines()[0] == "ddp, 3 steps: predicted / measured, in bytes"
    assert "96.00K / 96.00K" in text
    assert text.splitlines()[-1] == "collectives per step: 2 all_reduce"
