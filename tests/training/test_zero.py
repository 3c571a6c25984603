"""ZeRO trains as DDP does, however modules are called and gradients come."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError  # noqa: E402
from roundelay.training.strategies.zero._layout import FlatLayout  # noqa: E402
from roundelay.training.strategies.zero.units import find_units  # noqa: E402

nn = torch.nn


NAMES = ["zero1", "zero2", "zero3"]


# ---- how parameters are divided


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    size=st.integers(1, 9),
)
def test_pieces_of_all_ranks_are_every_element_once(shapes: Any, size: int) -> None:
    layout = FlatLayout(range(len(shapes)), [tuple(shape) for shape in shapes], size=size)
    seen: dict[int, int] = {}
    for rank in range(size):
        for piece in layout.pieces(rank):
            assert seen.get(piece.index, 0) == piece.start  # in order, with no gap
            seen[piece.index] = piece.stop
            assert 0 <= piece.at < piece.inside.stop <= layout.part
    assert all(seen.get(place.index, 0) == place.numel for place in layout.places)
    assert layout.padded - layout.numel < size


def test_units_are_elements_of_lists_and_the_rest_is_the_model_s(stacks: Any) -> None:
    model = stacks.Stack()
    units = find_units(model, None)
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert sum(len(unit.parameters) for unit in units) == len(list(model.parameters()))
    assert len(units[0].parameters) == 4
    chosen = find_units(model, [nn.LayerNorm, "blocks.1"])
    assert [unit.name for unit in chosen] == [
        "", "blocks.0.norm", "blocks.1", "blocks.1.norm", "blocks.2.norm"
    ]  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=r"blocks\.7"):
        find_units(model, ["blocks.7"])


def test_shared_parameters_belong_to_the_model_or_to_the_first_unit(stacks: Any) -> None:
    model = stacks.Stack()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[2].norm.weight = nn.Parameter(model.last.bias.detach().new_ones(6))
    model.last_scale = model.blocks[2].norm.weight
    units = {unit.name: {id(one) for one in unit.parameters} for unit in find_units(model, None)}
    assert id(model.blocks[0].up.weight) in units["blocks.0"]
    assert id(model.blocks[0].up.weight) not in units["blocks.1"]
    assert id(model.last_scale) in units[""]


# ---- how modules may be called under zero3


@pytest.mark.parametrize("way", ["plain", "each", "pairs", "inside", "twice"])
@pytest.mark.parametrize("size", [2, 3])
def test_zero3_is_ddp_however_modules_are_called(stacks: Any, way: str, size: int) -> None:
    model = stacks.make(lambda: stacks.Stack(way=way))
    stacks.assert_same(stacks.trained("zero3", size, model), stacks.trained("ddp", size, model))


@pytest.mark.parametrize("way", ["plain", "each", "pairs", "inside", "twice"])
def test_units_may_stay_between_forward_and_backward(stacks: Any, way: str) -> None:
    """Bit for bit the same; each is gathered once for each step, and all are here at most."""
    model = stacks.make(lambda: stacks.Stack(way=way))
    strategy = rd.Zero(3, reshard_after_forward=False)

    def train(comm: Any, mine: Any, _: Any, step: int) -> None:
        mine.eval()
        with torch.no_grad():
            stacks.loss_on(comm, mine, step + 7)
        mine.train()
        loss = stacks.loss_on(comm, mine, step) + stacks.loss_on(comm, mine, step + 1)
        loss.backward()

    stacks.assert_same(
        stacks.trained(strategy, 3, model, train=train),
        stacks.trained("ddp", 3, model, train=train),
    )

    def be_rank(comm: Any) -> tuple[Any, int, int]:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy=strategy, comm=comm)
        for step in range(3):
            stacks.loss_on(comm, mine, step).backward()
            own.step()
            own.zero_grad()
        parts = own.run.state.partition
        assert parts.scheduler.in_flight == 0
        whole = sum(one.nbytes for one in parts.units)
        return rd.ledger(mine).entries[comm.rank], parts.peak, whole

    for line, peak, whole in rd.run(be_rank, 2, "threads"):
        assert line.sent == pytest.approx(line.sent_predicted, abs=1)
        assert peak == whole


def test_parts_of_a_unit_may_be_called_by_others(stacks: Any) -> None:
    model = stacks.make(lambda: stacks.Stack(way="direct"))
    for block in model.blocks:  # whose bias is used by the model itself
        block.norm.bias.requires_grad_(requires_grad=True)
    strategy = rd.Zero(stage=3, units=["blocks.0.up", "blocks.1.down", "blocks.2.up"])
    stacks.assert_same(stacks.trained(strategy, 2, model), stacks.trained("ddp", 2, model))


@pytest.mark.parametrize("name", NAMES)
def test_looking_at_the_model_between_steps_changes_nothing(stacks: Any, name: str) -> None:
    model = stacks.make(stacks.Stack)

    def look(comm: Any, mine: Any, _: Any, step: int) -> None:
        with torch.no_grad():
            before = stacks.loss_on(comm, mine, step)
        first, second = stacks.loss_on(comm, mine, step), stacks.loss_on(comm, mine, step + 50)
        mine.eval()
        stacks.loss_on(comm, mine, step + 7)  # with gradients that nobody asks for
        mine.train()
        assert before == first.detach()
        (first + 0 * second).backward()

    stacks.assert_same(
        stacks.trained(name, 2, model, train=look), stacks.trained("ddp", 2, model, train=look)
    )


@pytest.mark.parametrize("name", NAMES)
def test_frozen_layers_below_and_between(stacks: Any, name: str) -> None:
    model = stacks.make(stacks.Stack)
    for part in (model.first, model.blocks[0], model.blocks[1].up, model.blocks[2].down):
        part.requires_grad_(requires_grad=False)
    stacks.assert_same(stacks.trained(name, 3, model), stacks.trained("ddp", 3, model))


def test_a_forward_pass_that_fails_leaves_nothing_behind(stacks: Any) -> None:
    model = stacks.make(stacks.Stack)

    def stumble(comm: Any, mine: Any, own: Any, step: int) -> None:
        with pytest.raises(RuntimeError):
            mine(torch.zeros(2, 5))  # of the wrong width: the model itself is in flight
        assert own.run.state.partition.scheduler.in_flight == 0
        stacks.loss_on(comm, mine, step).backward()

    plain = stacks.trained("ddp", 2, model)
    stacks.assert_same(stacks.trained("zero3", 2, model, train=stumble), plain)


# ---- gradients


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("forget", ["optimizer", "model", "zeros"])
def test_backward_adds_up_until_it_is_forgotten(stacks: Any, name: str, forget: str) -> None:
    model = stacks.make(stacks.Stack, torch.float64)

    def several(comm: Any, mine: Any, own: Any, step: int) -> None:
        stacks.loss_on(comm, mine, step + 90, torch.float64).backward()
        if forget == "model":
            mine.zero_grad()
        else:
            own.zero_grad(set_to_none=forget == "optimizer")
        for part in range(3):
            stacks.loss_on(comm, mine, step + 10 * part, torch.float64).backward()

    expected = stacks.trained("ddp", 3, model, train=several)
    for one, other in zip(stacks.trained(name, 3, model, train=several), expected, strict=True):
        for key in one:
            assert abs(one[key] - other[key]).max() <= 1e-12 * abs(other[key]).max(), key


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_the_norm_is_that_of_one_device(stacks: Any, name: str, norm: float) -> None:
    model = stacks.make(stacks.Stack, torch.float64)
    alone = copy.deepcopy(model)
    x, y = stacks.batch_of(0, torch.float64)
    (alone(x) - y).square().mean().backward()
    expected = float(nn.utils.get_total_norm([one.grad for one in alone.parameters()], norm))

    def be_rank(comm: Any) -> float:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy=name, comm=comm)
        stacks.loss_on(comm, mine, 0, torch.float64).backward()
        return float(own.clip_grad_norm_(1e9, norm))

    for found in rd.run(be_rank, 4, "threads"):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 4},
        {"bucket_bytes": 0},
        {"stage": 1, "units": ["a"]},
        {"stage": 2, "reshard_after_forward": False},
        {"reshard_after_forward": 2},
    ],
)
def test_options_without_a_meaning_are_refused(options: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        rd.Zero(**options)
