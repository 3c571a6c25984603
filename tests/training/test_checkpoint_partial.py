"""Weights only, a part of a checkpoint, other names; and what is not there is listed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CheckpointMismatch, InvalidArgumentError  # noqa: E402
from roundelay.training.prepare import known_strategies  # noqa: E402

nn = torch.nn
STRATEGIES: dict[str, Any] = {
    **known_strategies(),
    "ps by servers": rd.ParameterServer(update="server", servers=2),
    "ps by servers of their own": rd.ParameterServer(update="server", dedicated=True),
}
SYNCHRONOUS = [name for name, one in STRATEGIES.items() if one.synchronous]


BUILDING = threading.Lock()  # ranks that are threads share torch's random numbers


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """A body with buffers and extra state, and a head that may be another one."""

    def __init__(self, head: int = 3, *, more: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
        self.head = nn.Linear(5, head)
        if more:
            self.gate = nn.Linear(5, 1)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        y = self.body(x)
        return self.head(y).sum(-1) * (self.gate(y).sum(-1) if hasattr(self, "gate") else 1)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def net(head: int = 3, *, seed: int = 0, more: bool = False) -> Any:
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(head, more=more).double()


def prepared(comm: Any, model: Any, name: str, **options: Any) -> tuple[Any, Any]:
    own = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return rd.prepare(model, own, strategy=STRATEGIES[name], comm=comm, **options)


X = torch.arange(24.0, dtype=torch.float64).reshape(6, 4).sin()


def steps(model: Any, own: Any, count: int) -> None:
    for _ in range(count):
        model(X).square().mean().backward()
        own.step()
        own.zero_grad()


def state_of(model: Any) -> dict[str, Any]:
    return {
        key: one.clone() if isinstance(one, torch.Tensor) else one
        for key, one in rd.full_state_dict(model).items()
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


def worker(results: list[Any]) -> Any:
    """The result of a rank that is no server."""
    return next(one for one in results if one is not None)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_weights_only_begin_with_a_new_optimizer(tmp_path: Path, name: str) -> None:
    """Saved with or without the optimizer, loaded without it, by this strategy."""

    def write(comm: Any) -> Any:
        pair = prepared(comm, net(), "zero2")
        steps(*pair, 3)
        rd.save(tmp_path / "both", *pair)
        rd.save(tmp_path / "weights", pair[0])
        return state_of(pair[0])

    trained = rd.run(write, 2, "threads")[0]
    bare = rd.read_checkpoint(tmp_path / "weights")
    assert bare.optimizers() == []
    same(bare.state_dict(), trained)

    def go_on(comm: Any, path: str, *, strict: bool, load: bool) -> Any:
        model = net(seed=1)
        if not load:
            model.load_state_dict(trained)
        pair = prepared(comm, model, name)
        if load:
            steps(*pair, 2)  # what the optimizer has learnt by then is forgotten
            if not strict:  # asked for its state, which is not there
                found = rd.load(tmp_path / path, *pair, strict=False)
                assert "weights only" in found.differences[0]
            else:
                found = rd.load(tmp_path / path, pair[0])
                assert found.differences == ()
            assert found.steps == 3
            assert pair[0].calls == 3
            same(state_of(pair[0]), trained)
        steps(*pair, 2)
        return state_of(pair[0])

    expected = worker(rd.run(lambda comm: go_on(comm, "", strict=True, load=False), 3, "threads"))
    for path, strict in (("both", True), ("weights", True), ("weights", False)):
        results = rd.run(
            lambda comm, path=path, strict=strict: go_on(comm, path, strict=strict, load=True),
            3,
            "threads",
        )
        same(worker(results), expected)

    def refused(comm: Any) -> str:
        with pytest.raises(CheckpointMismatch, match=r"weights only\. Load it without the opt"):
            rd.load(tmp_path / "weights", *prepared(comm, net(), name))
        return "refused"

    assert worker(rd.run(refused, 2, "threads")) == "refused"


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_changed_head_is_left_as_it_is_and_listed(
    tmp_path: Path, name: str, precision: str
) -> None:
    def write(comm: Any) -> Any:
        pair = prepared(comm, net(3, more=True), name, precision=precision)
        steps(*pair, 3)
        rd.save(tmp_path / "it", *pair)
        return None if comm.rank else "done"

    rd.run(write, 3, "threads")
    saved = rd.read_checkpoint(tmp_path / "it")

    def read(comm: Any) -> Any:
        model = net(7, seed=1)
        model.extra = nn.Linear(2, 2, bias=False).double()
        torch.nn.init.constant_(model.extra.weight, 0.25)
        pair = prepared(comm, model, name, precision=precision)
        before = state_of(pair[0])
        with pytest.raises(CheckpointMismatch) as refused:
            rd.load(tmp_path / "it", *pair)
        assert "Nothing was loaded" in str(refused.value)
        same(state_of(pair[0]), before)
        found = rd.load(tmp_path / "it", *pair, strict=False)
        assert found.missing == ("extra.weight",)
        assert found.unexpected == ("gate.weight", "gate.bias")
        assert found.reshaped == ("head.weight", "head.bias")
        assert list(found.differences) == refused.value.differences
        for line in found.differences:
            assert line in str(refused.value)
        after = state_of(pair[0])
        for key in after:
            if key.startswith("body."):
                assert torch.equal(after[key], saved.weights[key].to(after[key].dtype)), key
            elif key.startswith(("head.", "extra.")):
                assert torch.equal(after[key], before[key]), key
        assert pair[0].calls == 3
        state = pair[1].state_dict()["state"]
        names = [name for name, _ in pair[0].named_parameters()]
        held = {names[at]: one for at, one in state.items()}
        assert all(one.startswith("body.") for one in held), held.keys()
        own = saved.optimizers()[0]["state"]
        for key, one in held.items():
            assert one["step"] == own[key]["step"] == 3
            assert torch.equal(one["exp_avg"], own[key]["exp_avg"])
        steps(*pair, 1)
        return "done"

    assert worker(rd.run(read, 2, "threads")) == "done"


def test_other_names_of_modules(tmp_path: Path) -> None:
    """A prefix becomes another one, is put before everything, or goes."""

    def be_rank(comm: Any) -> None:
        pair = prepared(comm, net(), "zero1")
        steps(*pair, 2)
        rd.save(tmp_path / "it", *pair)
        expected = state_of(pair[0])

        class Outer(nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.inner = net(seed=1)

        outer = prepared(comm, Outer(), "zero3")
        found = rd.load(tmp_path / "it", *outer, rename={"": "inner."})
        assert found.differences == ()
        assert found.steps == 2
        whole = state_of(outer[0])
        same({key.removeprefix("inner."): one for key, one in whole.items()}, expected)
        assert outer[0].inner.calls == 2
        rd.save(tmp_path / "outer", *outer)
        back = prepared(comm, net(seed=1), "ddp")
        rd.load(tmp_path / "outer", *back, rename=lambda key: key.removeprefix("inner."))
        same(state_of(back[0]), expected)
        torch.testing.assert_close(back[1].state_dict()["state"], pair[1].state_dict()["state"],
                                   rtol=0, atol=0)  # fmt: skip
        with pytest.raises(CheckpointMismatch, match=r"parameter head\.weight"):
            rd.load(tmp_path / "it", back[0], rename={"head.": "tail."})
        found = rd.load(tmp_path / "it", back[0], rename={"head.": "tail."}, strict=False)
        assert found.missing == ("head.weight", "head.bias")
        assert found.unexpected == ("tail.weight", "tail.bias")
        wrong: Any
        for wrong in (5, "inner.", {1: "inner."}, {"": None}):
            with pytest.raises(InvalidArgumentError, match="dict of prefixes"):
                rd.load(tmp_path / "it", back[0], rename=wrong)
        with pytest.raises(InvalidArgumentError, match="one name, x"):
            rd.load(tmp_path / "it", back[0], rename=lambda _: "x")

    rd.run(be_rank, 2, "threads")


def test_parameters_that_are_shared_here_and_not_there_are_told(tmp_path: Path) -> None:
    def pair(comm: Any, *, tied: bool) -> tuple[Any, Any]:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        if tied:
            model["b"].weight = model["a"].weight
        return rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)

    def be_rank(comm: Any) -> None:
        rd.save(tmp_path / "it", *pair(comm, tied=False))
        with pytest.raises(CheckpointMismatch, match=r"b\.weight: shared with a\.weight here"):
            rd.load(tmp_path / "it", *pair(comm, tied=True))

    rd.run(be_rank, 2, "threads")


def test_other_optimizers_and_groups_are_told_and_begin_anew(tmp_path: Path) -> None:
    def be_rank(comm: Any) -> None:
        pair = prepared(comm, net(), "ddp")
        steps(*pair, 2)
        rd.save(tmp_path / "it", *pair)
        for kind, lines, state in ((torch.optim.SGD, 1, False), (torch.optim.AdamW, 3, True)):
            model = net(seed=1)
            groups = [{"params": model.body.parameters()}, {"params": model.head.parameters()}]
            own: Any = kind(groups if state else model.parameters(), lr=0.5)
            mine = rd.prepare(model, own, comm=comm)
            found = rd.load(tmp_path / "it", *mine, strict=False)
            assert len(found.differences) == lines, found.differences
            assert {group["lr"] for group in mine[1].param_groups} == {0.5}
            assert bool(mine[1].state_dict()["state"]) == state
            same(state_of(mine[0]), state_of(pair[0]))

    rd.run(be_rank, 2, "threads")
