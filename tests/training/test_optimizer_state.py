"""What optimizers keep in containers, in views, and for no parameter: one device's, everywhere."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError, RoundelayError  # noqa: E402

nn = torch.nn

SERVER = rd.ParameterServer(update="server")
WAYS = {"ddp": ("ddp", 2), "ps": ("ps", 2), "zero1": ("zero1", 2), "zero2": ("zero2", 3),
        "zero3": ("zero3", 4)}  # fmt: skip


class Keeping(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Keeps state in every form there is, and steps by it."""

    everywhere = True  # whether it keeps some for no parameter

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]  # which stays empty of the last one
                if one.shape == (2,):
                    one.sub_(one.grad, alpha=group["lr"])
                    continue
                past = state.setdefault("past", [])
                past.append(one.grad.clone())
                del past[:-2]
                means = state.setdefault("means", {"fast": torch.zeros_like(one), "n": 0})
                means["fast"].lerp_(one.grad, 0.5)
                means["n"] += 1
                state["pair"] = (one.grad.sign(), one.grad.norm())
                state["flat"] = one.grad.view(-1) * 2
                state["row"] = one.grad[0]  # a view
                state["line"] = deque([one.grad + 1], 3)
                state[7] = one.grad * 3
                step = sum(past) + means["fast"] + state["pair"][0] * 1e-3 + state[7]
                one.sub_(step + state["flat"].view_as(one) + state["row"], alpha=group["lr"])
        if self.everywhere:
            first = self.param_groups[0]["params"][0]
            shared = self.state.setdefault("shared", {"sum": torch.zeros(()), "last": None})
            shared["sum"] = shared["sum"] + first.grad.norm()
            shared["last"] = first.grad.clone()
            first.sub_(shared["last"] * torch.tanh(shared["sum"]), alpha=0.01)


class Alone(Keeping):
    """Keeps nothing for no parameter."""

    everywhere = False


def _start() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


START = _start()  # once: random numbers are those of all threads


def _model() -> Any:
    return copy.deepcopy(START)


def _train(model: Any, optimizer: Any, steps: range, comm: Any = None) -> None:
    for step in steps:
        rows = torch.randn(
            12, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )
        if comm is not None:
            rows = rows.tensor_split(comm.size)[comm.rank]
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()


def _nothing(value: Any) -> bool:
    return isinstance(value, dict) and not value


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        assert type(value) is torch.Tensor, "something divided was handed out"
        return value.numpy().copy()
    if isinstance(value, dict):
        # Entries of nothing are not kept.
        return {key: _plain(one) for key, one in value.items() if not _nothing(one)}
    if isinstance(value, list | tuple | deque):
        return type(value)(_plain(one) for one in value)
    return value


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.shape == two.shape and np.allclose(one, two, rtol=1e-9, atol=1e-12)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return type(one) is type(two) and len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two)


def _expected(kind: type) -> tuple[Any, Any, Any]:
    model = _model()
    optimizer = kind(model.parameters())
    _train(model, optimizer, range(3))
    middle = _plain(optimizer.state_dict()["state"])
    _train(model, optimizer, range(3, 5))
    return middle, _plain(optimizer.state_dict()["state"]), _plain(dict(model.state_dict()))


def _go_on(comm: Any, strategy: Any, kind: type, path: Path) -> list[Any]:
    """Train, and go on by each of the ways there are."""
    found = []
    for way in ("as it is", "state_dict", "unprepare", "save"):
        model = _model()
        model, optimizer = rd.prepare(model, kind(model.parameters()), strategy=strategy, comm=comm)
        _train(model, optimizer, range(3), comm)
        middle = copy.deepcopy(optimizer.state_dict())  # torch hands out what it has
        if way == "state_dict":
            weights = {key: one.clone() for key, one in rd.full_state_dict(model).items()}
            rd.unprepare(model)
            model = _model()
            model.load_state_dict(weights)
            optimizer = kind(model.parameters())
            model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
            optimizer.load_state_dict(copy.deepcopy(middle))
            assert _same(_plain(middle), _plain(optimizer.state_dict()))
        elif way == "unprepare":
            model, optimizer = rd.unprepare(model)
            assert _same(_plain(middle["state"]), _plain(optimizer.state_dict()["state"]))
            model, optimizer = rd.prepare(model, optimizer, strategy="zero2", comm=comm)
        elif way == "save":
            rd.save(path, model, optimizer)
            read = rd.read_checkpoint(path).optimizers()[0]["state"]
            model = _model()
            model, optimizer = rd.prepare(model, kind(model.parameters()), comm=comm)
            rd.load(path, model, optimizer)
            named = {name: middle["state"][at] for at, (name, _) in
                     enumerate(_model().named_parameters()) if middle["state"].get(at)}  # fmt: skip
            named |= {key: one for key, one in middle["state"].items() if isinstance(key, str)}
            assert _same(_plain(named), _plain(read))
        _train(model, optimizer, range(3, 5), comm)
        end = _plain(optimizer.state_dict()["state"])
        found.append((_plain(middle["state"]), end, _plain(dict(rd.full_state_dict(model)))))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_state_in_any_form_goes_on_as_on_one_device(way: str, tmp_path: Path) -> None:
    strategy, ranks = WAYS[way]
    middle, end, weights = _expected(Keeping)
    for found in rd.run(
        lambda comm: _go_on(comm, strategy, Keeping, tmp_path / "it"), ranks, engine="threads"
    ):
        for one, two, three in found:
            assert _same(middle, one)
            assert _same(end, two)
            assert _same(weights, three)


def test_servers_take_and_give_containers(tmp_path: Path) -> None:
    expected = _expected(Alone)[2]
    for found in rd.run(
        lambda comm: _go_on(comm, SERVER, Alone, tmp_path / "it"), 2, engine="threads"
    ):
        assert all(_same(expected, weights) for _, _, weights in found)


def test_servers_refuse_state_of_no_parameter(tmp_path: Path) -> None:
    def be_rank(comm: Any) -> list[str]:
        model, said = _model(), []
        strategy = rd.ParameterServer(update="server", servers=1)
        own = Keeping(model.parameters())
        model, optimizer = rd.prepare(model, own, strategy=strategy, comm=comm)
        _train(model, optimizer, range(1), comm)
        for call in (optimizer.state_dict, lambda: rd.save(tmp_path / "it", model, optimizer),
                     lambda: rd.unprepare(model)):  # fmt: skip
            with pytest.raises(RoundelayError) as raised:
                call()
            said.append(str(raised.value))
        model = _model()
        own = Keeping(model.parameters())
        own.state["shared"] = {}
        with pytest.raises(InvalidArgumentError) as refused:
            rd.prepare(model, own, strategy=strategy, comm=comm)
        return [*said, str(refused.value)]

    for said in rd.run(be_rank, 2, engine="threads"):
        assert all("shared" in one and "update='worker'" in one for one in said)


class Odd(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Keeps what no checkpoint has a form for."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's
        for one in self.param_groups[0]["params"]:
            self.state[one]["odd"] = [{1, 2}]


@pytest.mark.parametrize("strategy", ["zero3", SERVER], ids=["zero3", "server"])
def test_what_has_no_form_is_named_on_all_ranks(strategy: Any, tmp_path: Path) -> None:
    def be_rank(comm: Any) -> list[str]:
        model, said = _model(), []
        own = Odd(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(model, own, strategy=strategy, comm=comm)
        _train(model, optimizer, range(1), comm)
        for call in (optimizer.state_dict, lambda: rd.save(tmp_path / "it", model, optimizer)):
            with pytest.raises(RoundelayError) as raised:
                call()
            said.append(str(raised.value))
        _train(model, optimizer, range(1), comm)  # nobody waits for anybody
        return said

    for said in rd.run(be_rank, 2, engine="threads"):
        assert all("['odd'][0] is a set" in one and ("0." in one or "2." in one) for one in said)


@pytest.mark.parametrize("way", ["zero1", "zero2", "zero3"])
def test_state_is_gone_through_in_the_order_of_the_groups(way: str) -> None:
    def be_rank(comm: Any = None) -> Any:
        model = _model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if comm is not None:
            model, optimizer = rd.prepare(model, optimizer, strategy=way, comm=comm)
        _train(model, optimizer, range(2), comm)
        for one in model.parameters():
            optimizer.state[one]["own"] = {1}  # what no message has a form for
        _train(model, optimizer, range(1), comm)
        norms = [float(state["exp_avg"].norm()) for state in optimizer.state.values()]
        asked = [optimizer.state.get("none", 1), optimizer.state.pop("none", 2),
                 "none" in optimizer.state, optimizer.state.setdefault("none", 3),
                 optimizer.state.pop("none"), len(optimizer.state)]  # fmt: skip
        return norms, asked

    norms, asked = be_rank()
    for mine, told in rd.run(be_rank, 4, engine="threads"):
        assert mine == pytest.approx(norms, rel=1e-9)
        assert told == asked


@pytest.mark.parametrize("way", ["ddp", "zero2"])
def test_a_prepared_optimizer_is_not_copied(way: str) -> None:
    def be_rank(comm: Any) -> None:
        model = _model()
        model, optimizer = rd.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=way, comm=comm
        )
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(InvalidArgumentError, match=r"state_dict\(\)"):
                call(optimizer)
        _, optimizer = rd.unprepare(model)
        pickle.dumps(optimizer)

    rd.run(be_rank, 2, engine="threads")


def test_a_server_s_optimizer_may_set_data() -> None:
    class Sets(torch.optim.SGD):  # type: ignore[misc, name-defined]
        @torch.no_grad()  # type: ignore[untyped-decorator]
        def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's
            for one in self.param_groups[0]["params"]:
                one.data = one.data - 0.1 * one.grad

    def be_rank(comm: Any = None) -> Any:
        model = _model()
        optimizer = Sets(model.parameters(), lr=0.1)
        if comm is not None:
            model, optimizer = rd.prepare(model, optimizer, strategy=SERVER, comm=comm)
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            with pytest.raises(InvalidArgumentError, match="parameter server"):
                np.asarray(model[0].weight.grad)
        _train(model, optimizer, range(3), comm)
        return _plain(dict(model.state_dict() if comm is None else rd.full_state_dict(model)))

    expected = be_rank()
    assert all(_same(expected, found) for found in rd.run(be_rank, 2, engine="threads"))
