"""What lies on the host trains as what lies beside the model.

There is no device here, so the way to the host is opened by hand: everything goes there and back as
it would, from memory to memory.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError  # noqa: E402
from roundelay.training.strategies.zero import offload as _zero_offload  # noqa: E402

WAYS = [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")]


@pytest.fixture
def _way_to_the_host(monkeypatch: Any) -> None:
    monkeypatch.setattr(_zero_offload, "moves", lambda _: True)


class Own(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Somebody's optimizer, with a number for all parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            group["count"] += 1
            for one in group["params"]:
                if one.grad is not None:
                    one.data.sub_(one.grad, alpha=group["lr"] / group["count"])


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "own": Own,
}


@pytest.mark.usefixtures("_way_to_the_host")
@pytest.mark.parametrize(("kind", "size"), [("adam", 1), ("adam", 3), ("sgd", 2), ("own", 2)])
@pytest.mark.parametrize(("stage", "offload"), WAYS)
def test_it_is_one_device(awkward: Any, stage: int, offload: str, kind: str, size: int) -> None:
    """With unused, shared and frozen parameters, clipping, and edits of all kinds in between."""
    model, batches = awkward.model(), awkward.batches(5)

    def train(comm: Any) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        own: Any = OPTIMIZERS[kind](mine.parameters())
        if comm is not None:
            strategy = rd.Zero(stage, offload=offload)
            mine, own = rd.prepare(mine, own, strategy=strategy, comm=comm)
            assert own.run.setup.host is not None
        for tokens, targets in batches:
            if comm is None:
                awkward.loss(mine, tokens, targets).backward()
                torch.nn.utils.clip_grad_norm_(mine.parameters(), 0.05)
                write(mine)
            else:
                x, y = (one.tensor_split(comm.size)[comm.rank] for one in (tokens, targets))
                rd.backward(awkward.loss(mine, x, y) * len(x), weight=len(x), model=mine)
                own.clip_grad_norm_(0.05)
                with rd.whole(mine):
                    write(mine)
            own.step()
            own.zero_grad()
        whole = mine.state_dict() if comm is None else rd.full_state_dict(mine)
        return {key: one.detach().numpy() for key, one in whole.items()}

    expected = train(None)
    for found in rd.run(train, size, "threads"):
        for key, one in expected.items():
            assert np.abs(found[key] - one).max() <= 1e-12 * np.abs(one).max(), key


def write(model: Any) -> None:
    with torch.no_grad():
        model.layers[0].weight.clamp_(-0.3, 0.3)
        weight = model.layers[1].weight.data
        weight[[0, 1]] = weight[[1, 0]]  # the same elements elsewhere
        model.norm.bias.data = model.norm.bias.detach() * 0.5


@pytest.mark.usefixtures("_way_to_the_host")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "offload"), WAYS)
def test_it_is_the_same_strategy_bit_for_bit(
    stacks: Any, tmp_path: Any, stage: int, offload: str, precision: str
) -> None:
    """Also out of a checkpoint, which either may have written."""
    model = stacks.make(stacks.Stack)

    def be_rank(comm: Any, *, writes: str | None, reads: str | None) -> dict[str, Any]:
        mine, found = copy.deepcopy(model), {}
        for strategy, steps in ((writes, range(2)), (reads, range(2, 4))):
            mine = copy.deepcopy(model)
            own = torch.optim.Adam(mine.parameters(), lr=1e-2, foreach=True)
            mine, own = rd.prepare(
                mine, own, strategy=rd.Zero(stage, offload=strategy), comm=comm, precision=precision
            )
            path = tmp_path / f"{writes} {reads}"
            if steps.start:
                rd.load(path, mine, own)
            for step in steps:
                x, y = (part.tensor_split(2)[comm.rank] for part in stacks.batch_of(step))
                (mine(x).float() - y).square().mean().backward()
                own.step()
                own.zero_grad()
                with torch.no_grad():
                    if stage < 3:
                        mine.last.bias.clamp_(-0.1, 0.1)
            if not steps.start:
                rd.save(path, mine, own)
            found = rd.full_state_dict(mine)
        return {key: one.detach().float().numpy() for key, one in found.items()}

    def run(writes: str | None, reads: str | None) -> Any:
        return rd.run(lambda comm: be_rank(comm, writes=writes, reads=reads), 2, "threads")

    expected = run(None, None)
    for writes, reads in ((offload, None), (None, offload)):
        stacks.assert_same(run(writes, reads), expected)


@pytest.mark.usefixtures("_way_to_the_host")
def test_a_step_that_fails_in_the_middle_leaves_nothing_that_loading_would_not_cure(
    stacks: Any, tmp_path: Any
) -> None:
    model = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any) -> bool:
        mine = copy.deepcopy(model)
        groups = [{"params": part.parameters()} for part in (mine.last, mine.blocks, mine.first)]
        mine, own = rd.prepare(
            mine, torch.optim.Adam(groups),
            strategy=rd.Zero(2, bucket_bytes=64, offload="optimizer"), comm=comm,
        )  # fmt: skip
        stacks.loss_on(comm, mine, 0, torch.float64).backward()
        own.step()
        own.zero_grad()
        rd.save(tmp_path / "good", mine, own)
        x = stacks.batch_of(5, torch.float64)[0]
        before = mine(x).detach()
        stacks.loss_on(comm, mine, 1, torch.float64).backward()
        good, own.param_groups[2]["betas"] = own.param_groups[2]["betas"], None
        with pytest.raises(TypeError):
            own.step()
        own.param_groups[2]["betas"] = good
        own.zero_grad()
        rd.load(tmp_path / "good", mine, own)
        return bool(torch.equal(mine(x), before))

    assert all(rd.run(be_rank, 2, "threads"))


def measured(stacks: Any, stage: int, offload: str | None, size: int, precision: str) -> Any:
    model = stacks.make(stacks.wide)

    def be_rank(comm: Any) -> Any:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(
            mine, stacks.adam(mine), strategy=rd.Zero(stage, offload=offload), comm=comm,
            precision=precision,
        )  # fmt: skip
        mine(torch.ones(3, 64)).float().square().mean().backward()
        own.step()
        return rd.ledger(mine).entries[comm.rank], str(rd.ledger(mine))

    return rd.run(be_rank, size, "threads")[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "offload"), WAYS)
def test_the_ledger_shows_what_lies_on_the_host(
    stacks: Any, monkeypatch: Any, stage: int, offload: str, precision: str
) -> None:
    line, table = measured(stacks, stage, offload, 2, precision)
    plain, _ = measured(stacks, stage, None, 2, precision)
    assert line == plain  # a model on the CPU is on the host already: nothing moves
    assert "on the host" not in table
    monkeypatch.setattr(_zero_offload, "moves", lambda _: True)
    line, table = measured(stacks, stage, offload, 2, precision)
    assert "on the host" in table
    apart = offload == "parameters"
    held = line.measured
    assert held.host == held.optimizer + apart * (held.parameters + held.gradients)
    for word in ("parameters", "gradients", "optimizer", "host"):
        one, other = getattr(line.predicted, word), getattr(line.measured, word)
        assert one == pytest.approx(other, rel=0.02), word


def test_options_without_a_meaning_are_refused(stacks: Any, monkeypatch: Any) -> None:
    for wrong in ({"stage": 2, "offload": "parameters"}, {"offload": "gradients"}, {"offload": 1}):
        with pytest.raises(InvalidArgumentError):
            rd.Zero(**wrong)
    monkeypatch.setattr(_zero_offload, "moves", lambda _: True)

    def be_rank(comm: Any) -> str:
        mine = stacks.Stack()
        mine, own = rd.prepare(
            mine, stacks.adam(mine), strategy=rd.Zero(2, offload="optimizer"), comm=comm
        )
        with pytest.raises(InvalidArgumentError) as error:
            own.step(lambda: mine(torch.ones(1, 4)).sum())
        return str(error.value)

    assert "closure" in rd.run(be_rank, 1, "threads")[0]
