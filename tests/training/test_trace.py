"""A trace of training agrees with the ledger, and shows what lies beside what."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import roundelay as rd
from roundelay.algorithms import algorithms
from roundelay.communicator import Communicator
from roundelay.records import Event, RankRecord, read_run
from roundelay.schedule import price
from roundelay.training.ledger import Entry
from roundelay.view.run_lanes import windows
from roundelay.view.run_summary import summary
from roundelay.view.training_step import StepChoices, training_step

STEPS, WIDTH = 3, 64


class Slow(torch.autograd.Function):
    """Takes a while in backward, so that what is on its way then has time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        time.sleep(0.02)
        return grads[0]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slow: Any = Slow.apply  # which torch has not typed
        return torch.relu(self.inner(slow(x)))


def train(comm: Communicator, strategy: Any, folder: str) -> list[Entry]:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(Block() for _ in range(4)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = rd.prepare(model, optimizer, comm=comm, strategy=strategy)
    x = torch.randn(8, WIDTH)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x + comm.rank).square().mean().backward()
        optimizer.step()
    mark = comm.trace
    assert mark is not None
    mark.end(mark.begin(7, mark.string("after")))
    entries = rd.ledger(model).entries
    rd.save(Path(folder) / "checkpoint", model, optimizer)
    return list(entries)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, strategy: Any) -> Any:
    monkeypatch.setenv("RD_TRACE", str(tmp_path / "trace"))
    entries = rd.run(train, size, args=(strategy, str(tmp_path)), allow_pickle=True)[0]
    return entries, read_run(tmp_path / "trace")


def of_step(record: RankRecord, number: int) -> list[Event]:
    """Return the calls of a step: from the end of the one before to its own end."""
    ends = {event.call: event.ended or 0 for event in record.events if event.kind == "step"}
    start, end = ends[number - 1], ends[number]
    return [event for event in record.events
            if event.kind == "call" and start < event.asked < end]  # fmt: skip


STRATEGIES = ["ddp", rd.Ddp(bucket_bytes=WIDTH * WIDTH * 4), "zero1", "zero2", "zero3"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["ddp", "buckets", "zero1", "zero2", "zero3"])
def test_calls_and_bytes_are_the_ledger_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, strategy: Any
) -> None:
    entries, record = run(tmp_path, monkeypatch, size, strategy)
    told = summary(record, windows(record)[STEPS - 1])
    assert told.steps == 1
    for one, times in zip(record.ranks, told.ranks, strict=True):
        entry = entries[one.rank]
        assert times.calls == sum(entry.calls.values())
        calls = of_step(one, STEPS - 1)
        assert Counter(event.collective for event in calls) == entry.calls
        sent = received = 0.0
        for event in calls:
            name = f"{event.collective}_{event.algorithm}"
            item = {"float32": 4, "float64": 8}.get(event.dtype, 1)
            cost = price(algorithms.load(name).schedule(size), event.nbytes, itemsize=item)
            sent += cost.sent[one.rank]
            received += cost.received[one.rank]
        assert sent == pytest.approx(entry.sent_predicted, rel=0.01)
        assert received == pytest.approx(entry.received_predicted, rel=0.01)


def test_buckets_travel_while_backward_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, record = run(tmp_path, monkeypatch, 2, rd.Ddp(bucket_bytes=WIDTH * WIDTH * 4))
    for one in record.ranks:
        backward = [event for event in one.events if event.kind == "backward"][-1]
        buckets = [event for event in one.events if event.name.startswith("bucket ")
                   and backward.began < event.asked]  # fmt: skip
        assert len(buckets) > 2
        assert all(event.thread != backward.thread for event in buckets)
        assert backward.ended is not None
        # All but the last, whose gradients end backward, are over before it is.
        assert all(event.ended is not None and event.ended < backward.ended
                   for event in buckets[:2])  # fmt: skip
        assert all("inner" in event.name for event in buckets)


def test_units_are_gathered_while_others_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, record = run(tmp_path, monkeypatch, 2, "zero3")
    for one in record.ranks:
        backward = [event for event in one.events if event.kind == "backward"][-1]
        inside = [event for event in one.events if event.kind == "call"
                  and event.thread != backward.thread
                  and backward.began <= event.asked < (backward.ended or 0)]  # fmt: skip
        gathers = [event for event in inside if event.name.startswith("gather ")]
        buckets = [event for event in inside if event.collective == "reduce_scatter"]
        assert len(gathers) >= 3
        assert len(buckets) >= 3
        waits = [event for event in one.events if event.kind == "gather"]
        assert all(event.name.startswith("wait for ") for event in waits)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_phases_follow_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    _, record = run(tmp_path, monkeypatch, 2, strategy)
    for one in record.ranks:
        wanted = ("forward", "backward", "exchange", "step")
        found = [event for event in one.events if event.kind in wanted]
        assert [event.kind for event in found] == [*wanted] * STEPS
        assert [event.call for event in found] == [number for number in range(STEPS)
                                                   for _ in wanted]  # fmt: skip
        for before, after in pairwise(found):
            assert before.ended is not None
            assert before.ended <= after.began
        saved = [event.name for event in one.events if event.kind == "checkpoint"]
        assert saved == ["rd.save"]


def test_a_model_is_as_before_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RD_TRACE", raising=False)

    def hooks(comm: Communicator) -> tuple[int, int]:
        model: Any = torch.nn.Linear(2, 2)
        model, _ = rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
        return len(model._forward_pre_hooks), len(model._forward_hooks)

    assert rd.run(hooks, 1, "threads") == [(0, 0)]


@pytest.mark.parametrize("strategy", ["ps", "ps-async", "ps-ssp"])
def test_messages_to_servers_and_back_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Of every step, each worker's gradients and what it gets for them; and what the ledger says.

    On rank 0 a message to the server of the same rank is none over the wire.
    """
    entries, record = run(tmp_path, monkeypatch, 2, strategy)
    worker = record.ranks[1]
    sent = sum(event.nbytes for event in worker.events
               if event.name == "send to rank 0" and event.ended is not None)  # fmt: skip
    assert sent >= STEPS * entries[1].measured.gradients
    served = [event for event in record.ranks[0].events if event.name.startswith("recv from")
              and event.thread != record.ranks[0].main_thread]  # fmt: skip
    assert served


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_calls_come_in_the_order_of_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What the page shows of a step is what a rank asks for: collective by collective."""
    bucket = 2 * (WIDTH * WIDTH + WIDTH) * 4
    kinds = {"ddp": rd.Ddp(bucket_bytes=bucket), "zero1": rd.Zero(1, bucket_bytes=bucket),
             "zero2": rd.Zero(2, bucket_bytes=bucket), "zero3": rd.Zero(3)}  # fmt: skip
    _, record = run(tmp_path, monkeypatch, 2, kinds[name])
    drawn = training_step(StepChoices(name, ranks=2, layers=4, buckets=2, precision="fp32"))
    shown = [(movement.kind, len(movement.units)) for movement in drawn.movements]
    each = (WIDTH * WIDTH + WIDTH) * 4
    for one in record.ranks:
        calls = sorted(of_step(one, STEPS - 1), key=lambda event: event.asked)
        found = [(event.collective, round(event.nbytes / each)) for event in calls
                 if event.nbytes >= each]  # fmt: skip
        if name in ("zero1", "zero2"):  # parameters are gathered in the order in which they lie
            found, shown = sorted(found), sorted(shown)
        assert found == shown
