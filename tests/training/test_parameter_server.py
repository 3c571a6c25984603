"""The parameter server: synchronous it is DDP, asynchronous it applies every gradient once."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import (  # noqa: E402
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgumentError,
    NotFiniteError,
    PeerLost,
    RankFailed,
    UnknownNameError,
)
from roundelay.planning.clock import staleness_bound  # noqa: E402
from roundelay.training._buckets import divide  # noqa: E402

PS = rd.ParameterServer
State = dict[str, Any]


# ---- who keeps what


@given(st.lists(st.integers(0, 1000)), st.integers(1, 6))
def test_parameters_are_divided_whole_and_evenly(nbytes: list[int], parts: int) -> None:
    given_out = divide(nbytes, parts)
    assert sorted(item for items in given_out for item in items) == list(range(len(nbytes)))
    filled = [sum(nbytes[item] for item in items) for items in given_out]
    assert max(filled) - min(filled) <= max(nbytes, default=0)


@pytest.mark.parametrize(
    ("options", "size", "servers", "workers"),
    [
        (PS(), 3, [0], [0, 1, 2]),
        (PS(servers=2), 3, [0, 1], [0, 1, 2]),
        (PS(servers=[2, 0]), 3, [2, 0], [0, 1, 2]),
        (PS(dedicated=True), 3, [2], [0, 1]),
        (PS(dedicated=True, servers=2), 5, [3, 4], [0, 1, 2]),
        (PS(dedicated=True, servers=[0]), 3, [0], [1, 2]),
    ],
)
def test_ranks_have_their_roles(options: Any, size: int, servers: Any, workers: Any) -> None:
    assert options.places(size) == (servers, workers)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (PS(servers=0), 2),
        (PS(servers=3), 2),
        (PS(servers=[0, 0]), 2),
        (PS(servers=[2]), 2),
        (PS(servers=[]), 2),
        (PS(dedicated=True), 1),
        (PS(dedicated=True, servers=2), 2),
    ],
)
def test_roles_that_can_not_be_are_named(options: Any, size: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"servers= is a number or a list"):
        options.places(size)


@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        ({"mode": "asynch"}, UnknownNameError, "Did you mean 'async'"),
        ({"update": "servers"}, UnknownNameError, "Did you mean 'server'"),
        ({"aggregate": "median"}, UnknownNameError, "mean, sum"),
        ({"mode": "async", "update": "worker"}, InvalidArgumentError, "mode='sync'"),
        ({"staleness": 3}, InvalidArgumentError, "mode='ssp'"),
        ({"mode": "ssp", "staleness": -1}, InvalidArgumentError, "from 0"),
        ({"mode": "ssp", "staleness": 1.5}, InvalidArgumentError, "from 0"),
    ],
)
def test_wrong_options_are_named(options: Any, kind: Any, word: str) -> None:
    with pytest.raises(kind, match=word):
        PS(**options)


# ---- synchronous


def train(hand: Any, strategy: Any, size: int, *, engine: str = "threads", steps: int = 6,
          dtype: Any = torch.float32, make: Callable[[Any], Any] | None = None,
          schedule: Callable[[Any], Any] | None = None, weighed: bool = False,
          clip: float | None = None, accumulate: bool = False,
          precision: str = "fp32") -> list[State]:  # fmt: skip
    """Train, and return every worker's state; servers that do nothing else give none."""
    model, batches = hand.model(dtype), hand.batches(steps)

    def be_rank(comm: Any) -> State:
        mine = hand.copy(model)
        optimizer = (make or hand.adam)(mine.parameters())
        mine, optimizer = rd.prepare(
            mine, optimizer, strategy=strategy, comm=comm, precision=precision
        )
        scheduler = schedule(optimizer) if schedule else None
        comm = optimizer.run.comm
        for tokens, targets in batches:
            x, y = (one.tensor_split(comm.size)[comm.rank] for one in (tokens, targets))
            if accumulate:
                with rd.accumulate(mine):
                    hand.loss(mine, x, y).backward()
            loss = hand.loss(mine, x, y)
            if weighed:
                rd.backward(loss * len(x), weight=len(x), model=mine)
            else:
                loss.backward()
            if clip is not None:
                optimizer.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
        return {key: one.detach().float().numpy().copy() if one.dtype == torch.bfloat16
                else one.detach().numpy().copy()
                for key, one in rd.full_state_dict(mine).items()}  # fmt: skip

    return [one for one in rd.run(be_rank, size, engine) if one is not None]


def assert_same(found: list[State], expected: list[State]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for key in other:
            assert one[key].tobytes() == other[key].tobytes(), key


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)


@pytest.mark.parametrize("how", [{}, {"weighed": True}, {"accumulate": True}], ids=str)
@pytest.mark.parametrize(
    "make", [None, momentum, torch.optim.Adagrad], ids=["adam", "momentum", "adagrad"]
)
@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize(
    ("size", "servers", "dedicated"),
    [(2, 1, False), (3, 3, False), (3, [2, 1], False), (3, 1, True), (5, 2, True)],
)
def test_synchronous_is_ddp_bit_for_bit(
    awkward: Any, size: int, servers: Any, dedicated: Any, update: str, make: Any, how: Any
) -> None:
    strategy = PS(servers=servers, dedicated=dedicated, update=update)
    workers = len(strategy.places(size)[1])
    found = train(awkward, strategy, size, make=make, **how)
    assert_same(found, train(awkward, "ddp", workers, make=make, **how))


@pytest.mark.parametrize("update", ["worker", "server"])
def test_processes_give_the_same_bits(awkward: Any, update: str) -> None:
    found = train(awkward, PS(servers=2, update=update), 3, engine="shared_memory")
    assert_same(found, train(awkward, "ddp", 3))
    alone = train(awkward, PS(dedicated=True, update=update), 3, engine="shared_memory")
    assert_same(alone, train(awkward, "ddp", 2))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda one: torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.3),
        # It changes the betas too.
        lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.05, total_steps=7),
    ],
    ids=["StepLR", "OneCycleLR"],
)
def test_schedules_reach_the_server(awkward: Any, schedule: Any) -> None:
    found = train(awkward, PS(update="server", servers=2), 2, schedule=schedule)
    assert_same(found, train(awkward, "ddp", 2, schedule=schedule))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_clipping_has_the_norm_of_one_device(awkward: Any, servers: int) -> None:
    how = {"clip": 0.05, "dtype": torch.float64, "weighed": True}
    expected = train(awkward, "ddp", 3, **how)
    found = train(awkward, PS(update="server", servers=servers), 3, **how)
    for one, other in zip(found, expected, strict=True):
        for key in other:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-12, atol=1e-14)


def test_state_that_an_optimizer_has_goes_to_the_server(awkward: Any) -> None:
    def warmed(parameters: Any) -> Any:
        optimizer = awkward.adam(list(parameters))
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = torch.ones_like(one)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    found = train(awkward, PS(update="server"), 2, make=warmed)
    assert_same(found, train(awkward, "ddp", 2, make=warmed))


def test_torchs_own_clipping_is_refused_where_no_worker_has_the_gradient(awkward: Any) -> None:
    model = awkward.model()

    def be_rank(comm: Any, update: str) -> str:
        mine = awkward.copy(model)
        mine, optimizer = rd.prepare(
            mine, awkward.adam(mine.parameters()), strategy=PS(update=update), comm=comm
        )
        tokens, targets = awkward.batches(1)[0]
        awkward.loss(mine, tokens, targets).backward()
        expected = optimizer.clip_grad_norm_(1e9)
        try:
            found = torch.nn.utils.clip_grad_norm_(mine.parameters(), 1e9)
        except InvalidArgumentError as error:
            return str(error)
        return "the same" if float(found) == expected else f"{found} is not {expected}"

    assert rd.run(be_rank, 2, "threads", args=("worker",)) == ["the same"] * 2
    for told in rd.run(be_rank, 2, "threads", args=("server",)):
        assert re.match(r"The gradient of \S+ is on the parameter server", told)
        assert "optimizer.clip_grad_norm_" in told


def test_the_state_of_an_optimizer_on_servers_is_not_silently_empty() -> None:
    """Neither read nor written where it is not; what all workers do together is."""
    uses: dict[str, Callable[[Any, Any], Any]] = {
        "clear": lambda _, own: own.state.clear(),
        "read": lambda model, own: own.state[model.weight],
        "get": lambda model, own: own.state.get(model.weight),
        "in": lambda model, own: model.weight in own.state,
        "set": lambda model, own: own.state.update({model.weight: {}}),
        "pop": lambda model, own: own.state.pop(model.weight),
        "loop": lambda _, own: list(own.state.values()),
        "length": lambda _, own: len(own.state),
        "replace": lambda _, own: setattr(own, "state", {}),
    }

    def be_rank(comm: Any, strategy: Any) -> list[Any]:
        model = Plane()
        own = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        backward(model)
        own.step()
        told = []
        for use in uses.values():
            with pytest.raises(InvalidArgumentError, match=r"optimizer\.state_dict\(\)") as error:
                use(model, own)
            told.append("of weight" in str(error.value))
        state = own.state_dict()
        state["state"].clear()
        own.load_state_dict(state)
        own.zero_grad()
        before = model.weight.detach().clone()
        backward(model)
        own.step()
        return [told, (before - model.weight.detach()).tolist()]

    named = [name in ("read", "get", "in", "set", "pop") for name in uses]
    assert rd.run(be_rank, 2, "threads", args=(PS(update="server"),)) == [[named, [1.0] * 3]] * 2
    assert rd.run(be_rank, 1, "threads", args=("ps-async",)) == [[named, [1.0] * 3]]
    kept = rd.run(worker_state, 2, "threads")
    assert kept == [1, 1]


def worker_state(comm: Any) -> int:
    model = Plane()
    own = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model, own = rd.prepare(model, own, strategy="ps", comm=comm)
    backward(model)
    own.step()
    return len(own.state)


def test_a_timeout_tells_the_time_that_was_waited_for() -> None:
    """Whoever explains it: a server's own group has another limit."""

    def be_rank(comm: Any) -> str:
        model = Plane()
        own = torch.optim.SGD(model.parameters(), lr=1.0)
        model, own = rd.prepare(model, own, strategy=PS(update="server"), comm=comm)
        served = own.run.state.client.server
        if comm.rank == 1:
            done.wait(60)
            return ""
        with pytest.raises(CollectiveTimeout) as error:
            backward(model)
        done.set()
        with pytest.raises(CollectiveTimeout) as through:
            served._channels.asks.barrier()
        return str(error.value) + str(through.value)

    done = threading.Event()
    told = rd.run(be_rank, 2, "threads", timeout=0.3)[0]
    assert re.findall(r"waited (\S+) s for", told) == ["0.3"] * 2


@pytest.mark.parametrize("strategy", [PS(), PS(update="server"), PS(mode="ssp")], ids=repr)
def test_bf16_trains_masters(awkward: Any, strategy: Any) -> None:
    expected = train(awkward, strategy, 1)[0]
    found = train(awkward, strategy, 1, precision="bf16")[0]
    for key, one in expected.items():
        assert found[key].dtype == np.float32
        np.testing.assert_allclose(found[key], one, atol=0.05)


def test_a_scaled_loss_is_refused_where_servers_update(awkward: Any) -> None:
    for strategy in (PS(update="server"), "ps-async", "ps-ssp"):
        with pytest.raises(InvalidArgumentError, match="bf16"):
            train(awkward, strategy, 1, precision="fp16")


# ---- the user's own aggregate


class Plane(torch.nn.Module):  # type: ignore[misc, name-defined]
    """One parameter whose gradient is the input."""

    def __init__(self, length: int = 3) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(length, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return (self.weight * x).sum()


def one_step(strategy: Any, size: int) -> list[Any]:
    """Let rank r push r + 1; return where weights went that began at 0, per rank."""

    def be_rank(comm: Any) -> Any:
        model = Plane()
        model, optimizer = rd.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), strategy=strategy, comm=comm
        )
        model(torch.full((3,), comm.rank + 1.0, dtype=torch.float64)).backward()
        optimizer.step()
        return -model.weight.detach().numpy()

    return rd.run(be_rank, size, "threads")


@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("mean", 2.5),
        ("sum", 10.0),
        (lambda grads: torch.stack(grads).max(0).values, 4.0),
        (lambda grads: grads[1] * 10 + grads[2], 23.0),  # in rank order
    ],
    ids=["mean", "sum", "largest", "second and third"],
)
def test_any_function_of_the_gradients_aggregates(
    aggregate: Any, expected: float, update: str
) -> None:
    for servers in (1, 2):
        strategy = PS(aggregate=aggregate, update=update, servers=servers)
        for found in one_step(strategy, 4):
            assert (found == expected).all()


def broken(grads: list[Any]) -> Any:
    raise ValueError(f"no sense in {len(grads)} gradients")


@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize(
    ("aggregate", "own", "others", "word"),
    [
        (broken, ValueError, PeerLost, "no sense in 3 gradients"),
        (lambda grads: grads[0][:1], InvalidArgumentError, InvalidArgumentError, "must keep shape"),
        (lambda _: None, InvalidArgumentError, InvalidArgumentError, "NoneType"),
    ],
    ids=["raises", "other shape", "nothing"],
)
def test_what_goes_wrong_in_a_server_reaches_every_rank(
    aggregate: Any, own: Any, others: Any, word: str, update: str
) -> None:
    def be_rank(comm: Any) -> tuple[str, str]:
        model = Plane()
        strategy = PS(aggregate=aggregate, update=update, servers=[1])
        model, optimizer = rd.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), strategy=strategy, comm=comm
        )
        try:
            model(torch.ones(3, dtype=torch.float64)).backward()
            optimizer.step()
        except (ValueError, PeerLost) as error:
            return type(error).__name__, str(error)
        return "", ""

    for rank, (kind, told) in enumerate(rd.run(be_rank, 3, "threads")):
        assert kind == (own if rank == 1 else others).__name__
        assert word in told


# ---- asynchronous


def pushes(strategy: Any, steps: list[int], seed: int, *, size: int | None = None) -> list[Any]:
    """Let worker r push steps[r] gradients of whole numbers, with pauses between them.

    Returns, per worker: its weights at the end, the sum of what it pushed, how many gradients the
    servers counted of every worker, and the staleness that it measured.
    """
    size = len(steps) if size is None else size

    def be_rank(comm: Any) -> Any:
        model = torch.nn.ModuleList([Plane(3), Plane(5), Plane(2)])
        model, optimizer = rd.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), strategy=strategy, comm=comm
        )
        comm = optimizer.run.comm
        chance = random.Random(f"{seed} {comm.rank}")
        total = 0
        for _ in range(steps[comm.rank]):
            time.sleep(chance.choice([0, 0, 0.001, 0.004]))
            number = chance.randrange(1, 1000) * 1000**comm.rank
            total += number
            sum(one(torch.full_like(one.weight, number)) for one in model).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = rd.full_state_dict(model)
        found = {float(one) for tensor in state.values() for one in tensor}
        counted = optimizer.run.state.applied()
        measured = sorted(optimizer.run.state.staleness.items())
        whole = rd.staleness(model)
        return sorted(found), total, counted, measured, (whole.total, whole.most, whole.bound)

    return [one for one in rd.run(be_rank, size, "threads") if one is not None]


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (PS(mode="async"), 3),
        (PS(mode="async", servers=3), 3),
        (PS(mode="async", servers=2, dedicated=True), 5),
        (PS(mode="ssp", staleness=0), 3),
        (PS(mode="ssp", staleness=2, servers=2), 3),
        (PS(mode="ssp", staleness=1, dedicated=True), 4),
    ],
    ids=repr,
)
@pytest.mark.parametrize("steps", [[9, 9, 9], [3, 12, 7]], ids=str)
def test_every_gradient_is_applied_exactly_once(strategy: Any, size: int, steps: Any) -> None:
    results = pushes(strategy, steps, seed=len(steps), size=size)
    everything = -float(sum(total for _, total, *_ in results))
    for found, _, counted, measured, whole in results:
        assert found == [everything]  # every weight, on every server and every worker
        assert counted == [steps] * len(strategy.places(size)[0])
        assert sum(count for _, count in measured) in steps
        assert whole[0] == sum(steps)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_stale_synchronous_keeps_its_bound(workers: int, bound: int) -> None:
    for servers in (1, workers):
        strategy = PS(mode="ssp", staleness=bound, servers=servers)
        for *_, measured, whole in pushes(strategy, [12] * workers, seed=bound):
            assert max(age for age, _ in measured) <= staleness_bound(workers, bound)
            assert whole[1] <= whole[2] == staleness_bound(workers, bound)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_worker_begins_a_step_too_far_ahead(bound: int) -> None:
    """Look into the server at the beginning of every step: the slowest is near enough."""
    servers: list[Any] = []
    steps = 15

    def be_rank(comm: Any) -> int:
        model = Plane()
        model, optimizer = rd.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            strategy=PS(mode="ssp", staleness=bound),
            comm=comm,
        )
        if comm.rank == 0:
            servers.append(optimizer.run.state.client.server)
        comm.barrier()
        chance = random.Random(f"{bound} {comm.rank}")
        ahead = 0
        for step in range(steps):
            ahead = max(ahead, step - min(servers[0].applied.values()))
            time.sleep(0.01 if comm.rank == 1 and step < 5 else chance.choice([0, 0.001]))
            model(torch.ones(3, dtype=torch.float64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return ahead

    assert max(rd.run(be_rank, 3, "threads")) <= bound


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_who_is_slow_holds_up_nobody_within_the_bound(mode: str) -> None:
    """Rank 1 begins when rank 0 can get no further; what it pushes then is exactly that old."""
    limit = {"async": 10, "ssp": 3}[mode]  # a bound of 2 lets 3 gradients in
    servers: list[Any] = []
    far = threading.Event()

    def be_rank(comm: Any) -> list[tuple[int, int]]:
        model = Plane()
        strategy = PS(mode="ssp", staleness=2) if mode == "ssp" else PS(mode="async")
        model, optimizer = rd.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), strategy=strategy, comm=comm
        )
        if comm.rank == 0:
            servers.append(optimizer.run.state.client.server)
        else:
            far.wait(30)
        for step in range(10):
            model(torch.ones(3, dtype=torch.float64)).backward()
            if comm.rank == 0 and step + 1 == limit:
                threading.Timer(0.2, far.set).start()  # time enough to get ahead, if it could
            optimizer.step()
            optimizer.zero_grad()
            if comm.rank == 1 and step == 0:
                [(age, _)] = optimizer.run.state.staleness.items()
                assert age == limit
        return sorted(optimizer.run.state.staleness.items())

    first, _ = rd.run(be_rank, 2, "threads")
    assert first[0][0] == 0
    assert servers[0].applied == {0: 10, 1: 10}


def test_asynchronous_training_learns(awkward: Any) -> None:
    model, batches = awkward.model(), awkward.batches(1)

    def be_rank(comm: Any, strategy: Any) -> tuple[float, float]:
        mine = awkward.copy(model)
        mine, optimizer = rd.prepare(
            mine, awkward.adam(mine.parameters()), strategy=strategy, comm=comm
        )
        tokens, targets = batches[0]
        losses = []
        for _ in range(40):
            loss = awkward.loss(mine, tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses[0], losses[-1]

    for strategy in ("ps-async", "ps-ssp"):
        for first, last in rd.run(be_rank, 3, "threads", args=(strategy,)):
            assert last < first / 2


# ---- faults


def caught(work: Callable[[Any, Any, Any], None], strategy: Any, size: int,
           engine: str = "threads") -> list[Any]:  # fmt: skip
    """Return what each rank raises while it does its work."""

    def be_rank(comm: Any) -> str:
        model = Plane()
        try:
            model, optimizer = rd.prepare(
                model, torch.optim.SGD(model.parameters(), lr=1.0), strategy=strategy, comm=comm
            )
            work(comm, model, optimizer)
        except rd.RoundelayError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return rd.run(be_rank, size, engine)


def backward(model: Any) -> None:
    model(torch.ones(3, dtype=torch.float64)).backward()


@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize("early", [0, 1])
def test_a_worker_that_stops_early_is_named(update: str, early: int) -> None:
    def work(comm: Any, model: Any, optimizer: Any) -> None:
        for _ in range(2 if comm.rank == early else 3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()

    told = caught(work, PS(update=update, servers=[2], dedicated=True), 3)
    assert told[early] == ""
    assert f"Rank {early} has finished" in told[1 - early]


def test_workers_that_do_different_things_are_told() -> None:
    def work(comm: Any, model: Any, optimizer: Any) -> None:
        backward(model)
        if comm.rank == 0:
            optimizer.step()
        else:
            optimizer.clip_grad_norm_(1.0)

    for told in caught(work, PS(update="server"), 2):
        assert told.startswith("CollectiveMismatch")
        assert "rank 0 steps" in told
        assert "rank 1 asks for a norm" in told


def test_other_learning_rates_are_told() -> None:
    def work(comm: Any, model: Any, optimizer: Any) -> None:
        backward(model)
        optimizer.param_groups[0]["lr"] = 0.1 + comm.rank
        optimizer.step()

    for told in caught(work, PS(update="server"), 2):
        assert "Rank 1 steps with other options" in told


def test_ranks_with_other_options_are_told() -> None:
    def be_rank(comm: Any) -> str:
        model = Plane()
        with pytest.raises(CollectiveMismatch) as error:
            rd.prepare(
                model,
                torch.optim.SGD(model.parameters(), lr=1.0),
                strategy=PS(mode="ssp", staleness=1 + comm.rank),
                comm=comm,
            )
        return str(error.value)

    for told in rd.run(be_rank, 2, "threads"):
        assert "staleness=2" in told


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_a_gradient_that_is_not_finite_ends_it_for_all(mode: str) -> None:
    def work(comm: Any, model: Any, optimizer: Any) -> None:
        for step in range(1000):
            bad = float("nan") if comm.rank == 2 and step == 3 else 1.0
            (model(torch.ones(3, dtype=torch.float64)) * bad).backward()
            optimizer.step()
            optimizer.zero_grad()

    expected = str(NotFiniteError(["weight"], [2]))
    assert caught(work, PS(mode=mode, servers=2), 3) == [f"NotFiniteError: {expected}"] * 3


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        (PS(), 1),
        (PS(), 0),
        (PS(update="server", servers=2), 1),
        (PS(dedicated=True), 0),
        (PS(mode="async"), 0),
        (PS(mode="ssp", staleness=1, servers=[2]), 2),
    ],
    ids=repr,
)
def test_a_rank_that_dies_is_named_at_once(strategy: Any, victim: int) -> None:
    def be_rank(comm: Any) -> None:
        model = Plane()
        model, optimizer = rd.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), strategy=strategy, comm=comm
        )
        for step in range(10**6):
            if step == 3 and comm.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(model)
            optimizer.step()
            optimizer.zero_grad()

    began = time.monotonic()
    with pytest.raises(RankFailed, match=f"rank {victim} .*SIGKILL"):
        rd.run(be_rank, 3)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("mode", "server"), [("sync", 0), ("async", 1), ("ssp", 1)])
@pytest.mark.parametrize("error", [ValueError("bad row"), SystemExit(3)], ids=repr)
def test_a_rank_that_raises_and_is_needed_is_named_on_every_rank(
    mode: str, server: int, error: BaseException
) -> None:
    told: dict[int, str] = {}

    def be_rank(comm: Any) -> None:
        model = Plane()
        strategy = PS(mode=mode, servers=[server])
        model, optimizer = rd.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), strategy=strategy, comm=comm
        )
        try:
            for step in range(10**6):
                if step == 3 and comm.rank == 1:
                    raise type(error)(*error.args)
                backward(model)
                optimizer.step()
                optimizer.zero_grad()
        except PeerLost as lost:
            told[comm.rank] = str(lost)
            raise

    leaves = isinstance(error, SystemExit)  # by which who calls rd.run would end as well
    with pytest.raises(RankFailed if leaves else type(error)) as raised:
        rd.run(be_rank, 3, "threads")
    found = raised.value.__cause__ if leaves else raised.value
    assert found is not None
    assert found.__notes__ == ["Raised on rank 1 of 3, in step 3."]
    text = f"Rank 1 failed in step 3: {type(error).__name__}: {error}"
    assert told == {0: text, 2: text}
    with pytest.raises(RankFailed, match=f"rank 1 in step 3 raised {type(error).__name__}"):
        rd.run(be_rank, 3)


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_a_worker_that_returns_early_holds_up_nobody(mode: str) -> None:
    def be_rank(comm: Any) -> int:
        model = Plane()
        model, optimizer = rd.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), strategy=PS(mode=mode), comm=comm
        )
        steps = 3 if comm.rank == 1 else 20
        for _ in range(steps):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        return steps

    for engine in ("threads", "shared_memory"):
        assert rd.run(be_rank, 3, engine) == [20, 3, 20]


def test_a_dedicated_server_that_dies_is_named_at_once() -> None:
    def deadly(_: list[Any]) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def be_rank(comm: Any) -> str:
        model = Plane()
        model, _ = rd.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            strategy=PS(dedicated=True, aggregate=deadly),
            comm=comm,
        )
        with pytest.raises(PeerLost, match=r"Rank 2 .* died"):
            backward(model)
        return "told"

    with pytest.raises(RankFailed, match=r"rank 2 .*SIGKILL"):
        rd.run(be_rank, 3)


def test_a_dedicated_server_ends_the_script_well() -> None:
    assert issubclass(rd.ServerFinished, SystemExit)

    def be_rank(comm: Any) -> str:
        model = Plane()
        try:
            rd.prepare(
                model,
                torch.optim.SGD(model.parameters(), lr=1.0),
                strategy=PS(dedicated=True),
                comm=comm,
            )
        except SystemExit as error:
            return f"exit {error.code}"
        return "worker"

    assert rd.run(be_rank, 3, "threads") == ["worker", "worker", "exit 0"]


def test_closures_and_lbfgs() -> None:
    def be_rank(comm: Any, strategy: Any) -> list[float]:
        model = Plane()
        make = torch.optim.LBFGS if strategy.update == "worker" else torch.optim.SGD
        model, optimizer = rd.prepare(
            model, make(model.parameters(), lr=0.1), strategy=strategy, comm=comm
        )

        def closure() -> Any:
            optimizer.zero_grad()
            loss = ((model.weight - 1) ** 2).sum()
            loss.backward()
            return loss

        return [float(optimizer.step(closure).detach()) for _ in range(5)]

    for strategy in (PS(update="worker"), PS(update="server"), PS(mode="async")):
        for losses in rd.run(be_rank, 2, "threads", args=(strategy,)):
            assert losses[0] == 3.0
            assert losses == sorted(losses, reverse=True)

    def refused(comm: Any) -> None:
        model = Plane()
        rd.prepare(model, torch.optim.LBFGS(model.parameters()), strategy="ps-async", comm=comm)

    with pytest.raises(InvalidArgumentError, match="LBFGS"):
        rd.run(refused, 2, "threads")


# ---- the ledger


@pytest.mark.parametrize(
    "strategy",
    [PS(), PS(servers=3), PS(update="server"), PS(update="server", servers=2), PS(mode="async")],
    ids=repr,
)
def test_what_it_holds_and_exchanges_is_what_is_predicted(awkward: Any, strategy: Any) -> None:
    model = awkward.model()

    def be_rank(comm: Any) -> Any:
        mine = awkward.copy(model)
        mine, optimizer = rd.prepare(
            mine, awkward.adam(mine.parameters()), strategy=strategy, comm=comm
        )
        state = optimizer.run.state
        tokens, targets = awkward.batches(2)[1]
        comm.barrier()
        before = state.moved()
        comm.barrier()
        awkward.loss(mine, tokens, targets).backward()
        optimizer.step()
        comm.barrier()
        after = state.moved()
        comm.barrier()
        predicted, volume = state.predicted()
        held = state.held()
        return {
            "held": [held.parameters, held.transient],
            "predicted": [predicted.parameters, predicted.transient],
            "moved": [after[0] - before[0], after[1] - before[1]],
            "volume": [volume.sent, volume.received],
            "told": [state.told_volume().sent, state.told_volume().received],
            "state": [held.optimizer, predicted.optimizer],
        }

    for found in rd.run(be_rank, 3, "threads"):
        assert found["held"] == found["predicted"]
        told = found["told"]
        assert found["moved"] == [one - two for one, two in zip(found["volume"], told, strict=True)]
        measured, expected = found["state"]
        assert measured <= expected  # parameters that nobody used have no state


@pytest.mark.parametrize("update", ["server", "worker"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_servers_end_with_the_model(size: int, update: str) -> None:
    """Models that are dropped, one after the other, leave neither threads nor memory."""
    alive: list[Any] = []

    def be_rank(comm: Any) -> None:
        for _ in range(3):
            model = Plane()
            own = torch.optim.SGD(model.parameters(), lr=1e-3)
            model, own = rd.prepare(model, own, strategy=PS(update=update), comm=comm)
            model(torch.ones(3)).backward()
            own.step()
            alive.append(weakref.ref(own.run.state.client))
            del model, own
            comm.barrier()
            gc.collect()
            comm.barrier()
        for _ in range(500):
            if not any(one.name == "roundelay-server" for one in threading.enumerate()):
                return
            time.sleep(0.01)
        raise AssertionError([one.name for one in threading.enumerate()])

    rd.run(be_rank, size, "threads")
    assert [one() for one in alive] == [None] * 3 * size


@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
@pytest.mark.parametrize("server", [0, 1])
def test_ranks_drop_a_model_when_they_like(mode: str, server: int) -> None:
    """Who drops it first, in the middle of the job or by its end, breaks nothing for the others."""

    def be_rank(comm: Any, first: int) -> int:
        held = []
        for _ in range(2):
            model = Plane()
            own = torch.optim.SGD(model.parameters(), lr=1e-3)
            strategy = PS(mode=mode, update="server", servers=[server])
            model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
            backward(model)
            own.step()
            held.append((model, own))
            del model, own
            if comm.rank == first:
                held.clear()
                gc.collect()
            comm.barrier()  # the others still have it
        return len(held)

    for first in range(3):
        kept = rd.run(be_rank, 3, "threads", args=(first,))
        assert kept == [0 if rank == first else 2 for rank in range(3)]
