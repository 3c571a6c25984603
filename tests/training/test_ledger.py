"""The ledger: what was predicted is measured, and closed forms hold where splits are even."""

from __future__ import annotations

import json
from itertools import product
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


class Odd(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Odd sizes, running means, a frozen matrix, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.blocks = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Linear(7, 3))
        self.norm = torch.nn.BatchNorm1d(7)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(13))

    def forward(self, x: Any) -> Any:
        return self.frozen(self.blocks(self.norm(self.first(x))))


def trained(model: Any) -> list[Any]:
    return [one for one in model.parameters() if one.requires_grad]


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda model: torch.optim.Adam(trained(model), amsgrad=True),
    "two": lambda model: (
        torch.optim.Adafactor([one for one in trained(model) if one.dim() == 2]),
        torch.optim.SGD([one for one in trained(model) if one.dim() != 2], momentum=0.9, lr=0.1),
    ),
}
EVERY = {**STRATEGIES, "server": rd.ParameterServer(update="server", servers=2)}
PRECISIONS: list[Any] = ["fp32", "bf16", rd.Precision(torch.bfloat16, reduce=torch.float32)]


def steps(model: Any, listed: Any) -> None:
    """Four of them, of which the last two count and the last is not forgotten."""
    run = listed[0].run
    for step in range(4):
        for one in listed:
            one.zero_grad()
        model(torch.ones(4, 5)).float().square().mean().backward()
        for one in listed:
            one.step()
        if step == 1:
            run.counted_from = run.steps, run.state.traffic()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", [*EVERY])
def test_held_is_predicted_to_the_byte(name: str, size: int) -> None:
    """In every precision and with one optimizer or two; buckets are small, so there are several."""
    if name == "server" and size == 1:
        pytest.skip("has two servers")
    strategy = rd.Ddp(bucket_bytes=200) if name == "ddp" else EVERY[name]
    if name in ("zero1", "zero2"):
        strategy = rd.Zero(int(name[-1]), bucket_bytes=200)

    def be_rank(comm: Any) -> None:
        for precision, optimizers in product(PRECISIONS, OPTIMIZERS.values()):
            model = Odd()
            model, own = rd.prepare(
                model, optimizers(model), strategy=strategy, comm=comm, precision=precision
            )
            listed = own if isinstance(own, tuple) else (own,)
            steps(model, listed)
            for entry in rd.ledger(model).entries:
                assert entry.predicted == entry.measured, (precision, len(listed))
                if strategy.synchronous:
                    assert entry.sent == pytest.approx(entry.sent_predicted, rel=0.02)
            comm.barrier()
            rd.unprepare(model)

    rd.run(be_rank, size, "threads")


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


def test_a_notebook_shows_the_same_table() -> None:
    def body(comm: rd.Communicator) -> Any:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = rd.prepare(model, optimizer, strategy="zero2", comm=comm)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return rd.ledger(model)

    book = rd.run(body, 2, "threads")[0]
    page = book._repr_html_()
    assert page.count("<tr>") == 1 + 2
    for line in str(book).splitlines()[1:-1]:
        for word in line.split("  "):
            assert not word.strip() or f">{word.strip()}</t" in page
    assert "predicted / measured" in page
    assert "<script" not in page
