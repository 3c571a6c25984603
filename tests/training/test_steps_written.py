"""What a program writes into a model and its optimizer counts, as it does on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import (  # noqa: E402
    CollectiveMismatch,
    InvalidArgumentError,
)
from small_steps import (  # noqa: E402
    SIZES,
    START,
    WAYS,
    Place,
    Program,
    adam,
    alone,
    assert_close,
    assert_one_device,
    make,
    on_ranks,
    plain,
    rows_of,
    told_by,
    trained_steps,
)

nn = torch.nn

# ---- what the user writes into the model


def other_weights() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    return {
        key: torch.randn(one.shape, generator=generator).to(one.dtype)
        for key, one in START.state_dict().items()
        if one.is_floating_point()
    }


def load(model: Any) -> None:
    model.load_state_dict(other_weights(), strict=False)


def clamp(model: Any) -> None:
    with torch.no_grad():
        for one in model.parameters():
            one.clamp_(-0.1, 0.1)


def clamp_data(model: Any) -> None:
    for one in model.parameters():
        one.data.clamp_(-0.1, 0.1)


def from_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


EDITS = {"load": load, "clamp": clamp, "clamp data": clamp_data, "vector": from_vector}


@pytest.mark.parametrize("what", EDITS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_into_the_model_is_trained_on(way: str, size: int, what: str) -> None:
    def program(at: Place) -> None:
        trained_steps(at, range(2))
        EDITS[what](at.model)
        trained_steps(at, range(2, 4))
        EDITS[what](at.model)  # and looked at before another step

    assert_one_device(way, size, program)


@pytest.mark.parametrize("what", EDITS)
@pytest.mark.parametrize("way", WAYS)
def test_in_bf16_it_reaches_the_masters(way: str, what: str) -> None:
    """By the first rank of all: within the rounding of bf16, and loaded values exactly."""

    def program(at: Place) -> None:
        trained_steps(at, range(2))
        EDITS[what](at.model)

    def back(at: Place) -> None:
        program(at)
        for one in at.model.parameters():
            one.grad = torch.zeros_like(one)  # steps nowhere
        if way != "ps-server":
            at.optimizer.step()

    def sgd(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    expected = alone(program, sgd)
    tolerance = 0 if what == "load" else 2e-2
    for found in on_ranks(way, 2, back, sgd, precision="bf16"):
        for key, one in START.named_parameters():
            scale = float(one.detach().abs().max())
            np.testing.assert_allclose(
                found[key], expected[key], rtol=0, atol=tolerance * scale, err_msg=key
            )


@pytest.mark.parametrize("way", ["ps-async", "ps-async-bf16"])
def test_asynchronous_servers_take_what_workers_write(way: str) -> None:
    def be_rank(comm: Any) -> Any:
        mine = make()
        own = torch.optim.SGD(mine.parameters(), lr=1e-3)
        precision = "bf16" if way.endswith("16") else "fp32"
        mine, own = rd.prepare(mine, own, strategy="ps-async", comm=comm, precision=precision)
        trained_steps(Place(mine, own, comm), range(2))
        own.run.comm.barrier()
        load(mine)
        return {key: plain(one) for key, one in rd.full_state_dict(mine).items()}

    for found in rd.run(be_rank, 2, "threads"):
        for key, one in other_weights().items():
            np.testing.assert_array_equal(found[key], one.numpy(), err_msg=key)


def test_a_parameter_of_another_shape_is_refused() -> None:
    def program(at: Place) -> None:
        at.loss(0).backward()
        at.model.first.weight.data = torch.ones(5, 4, dtype=torch.float64)
        at.optimizer.step()

    for told in told_by("zero2", 2, program):
        assert "first.weight" in told


# ---- gradients that the user sets, clips or hooks into


def set_by_hand(at: Place) -> None:
    for step in range(2):
        for number, one in enumerate(at.model.parameters()):
            one.grad = torch.full_like(one, 0.1 * (number + step) - 0.2)
        at.optimizer.step()
        at.optimizer.zero_grad()


def replaced_by_hand(at: Place) -> None:
    at.loss(0).backward()
    at.model.last.bias.grad = torch.ones_like(at.model.last.bias)
    at.model.extra.bias.grad = None
    at.optimizer.step()


@pytest.mark.parametrize("program", [set_by_hand, replaced_by_hand])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_set_by_hand_count_or_are_refused(way: str, size: int, program: Program) -> None:
    if way == "ps-server":
        assert all("by hand" in told for told in told_by(way, size, program))
    else:
        assert_one_device(way, size, program)


@pytest.mark.parametrize("what", ["value", "norm", "both"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_clipping_is_that_of_one_device(way: str, size: int, what: str) -> None:
    def program(at: Place) -> None:
        for step in range(3):
            at.loss(step).backward()
            if what in ("value", "both"):
                if at.comm is None:
                    nn.utils.clip_grad_value_(at.model.parameters(), 0.02)
                else:
                    at.optimizer.clip_grad_value_(0.02)
            if what in ("norm", "both"):
                clip = at.optimizer.clip_grad_norm_ if at.comm is not None else (
                    lambda most: nn.utils.clip_grad_norm_(at.model.parameters(), most)
                )  # fmt: skip
                assert isinstance(clip(0.05), torch.Tensor)
            at.optimizer.step()
            at.optimizer.zero_grad()

    def sgd(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    assert_one_device(way, size, program, sgd)


CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda them: nn.utils.clip_grad_norm_(them, 0.01),
    "value": lambda them: nn.utils.clip_grad_value_(them, 0.01),
    "own": lambda them: [one.grad.mul_(0.5) for one in them if one.grad is not None],
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("whose", ["model", "groups"])
@pytest.mark.parametrize("way", WAYS)
def test_clipping_by_torch_is_right_or_refused_on_all_ranks(
    way: str, whose: str, clip: str
) -> None:
    def program(at: Place) -> None:
        for step in range(2):
            at.loss(step).backward()
            groups = at.optimizer.param_groups
            them = [one for group in groups for one in group["params"]]
            CLIPS[clip](list(at.model.parameters()) if whose == "model" else them)
            at.optimizer.step()
            at.optimizer.zero_grad()

    if way == "ps-server":
        assert all("clip_grad_norm_" in told for told in told_by(way, 3, program))
        assert all("clip_grad_norm_" in told for told in told_by(way, 1, program))
    else:
        assert_one_device(way, 3, program)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_hooks_around_the_step_come_once(way: str, size: int) -> None:
    def program(at: Place) -> None:
        seen: list[str] = []
        at.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        at.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        trained_steps(at, range(1))
        at.optimizer.load_state_dict(at.optimizer.state_dict())
        trained_steps(at, range(1, 2))
        assert seen == ["before", "after"] * 2

    assert_one_device(way, size, program)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_that_clip_are_right_or_refused(way: str) -> None:
    def program(at: Place) -> None:
        def clip(optimizer: Any, *_: Any) -> None:
            them = [one for group in optimizer.param_groups for one in group["params"]]
            nn.utils.clip_grad_norm_(them, 0.01)

        at.optimizer.register_step_pre_hook(clip)
        trained_steps(at, range(2))

    if way == "ps-server":
        assert all("clip_grad_norm_" in told for told in told_by(way, 3, program))
    else:
        assert_one_device(way, 3, program)


# ---- optimizers that look at several parameters


class Clipping(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Clips by the norm of all gradients, in its step."""

    def __init__(self, params: Any, lr: float = 0.1, most: float = 50.0) -> None:
        super().__init__(params, lr=lr)
        self.most = most

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.most)
        return super().step(closure)


@pytest.mark.parametrize("most", [1e-2, 50.0])
def test_an_optimizer_that_couples_parameters_is_refused_by_several_servers(most: float) -> None:
    strategy = rd.ParameterServer(update="server", servers=2)

    def be_rank(comm: Any) -> str:
        mine = make()
        with pytest.raises(InvalidArgumentError) as error:
            rd.prepare(mine, Clipping(mine.parameters(), most=most), strategy=strategy, comm=comm)
        return str(error.value)

    assert all("Clipping" in told for told in rd.run(be_rank, 2, "threads"))


@pytest.mark.parametrize("way", WAYS)
def test_where_it_has_all_parameters_it_is_right(way: str) -> None:
    def clipping(model: Any) -> Any:
        return Clipping(model.parameters(), most=1e-2)

    assert_one_device(way, 3, lambda at: trained_steps(at, range(3)), clipping)


# ---- the optimizer's state, and back to one device


def grouped(model: Any) -> Any:
    rest = [one for name, one in model.named_parameters() if not name.startswith("last")]
    return torch.optim.Adam(
        [{"params": model.last.parameters(), "lr": 3e-2}, {"params": rest}], lr=1e-2, amsgrad=True
    )


def assert_state(found: Any, expected: Any) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert found["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert found["state"][number][key].shape == value.shape
            assert_close(found["state"][number][key].numpy(), value.numpy(), f"{number} {key}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_the_state_of_the_optimizer_is_that_of_one_device(way: str, size: int) -> None:
    model = make()
    own = grouped(model)
    trained_steps(Place(model, own), range(2))
    expected = copy.deepcopy(own.state_dict())

    def be_rank(comm: Any) -> Any:
        mine = make()
        mine, optimizer = rd.prepare(mine, grouped(mine), strategy=WAYS[way], comm=comm)
        trained_steps(Place(mine, optimizer, comm), range(2))
        return optimizer.state_dict()

    for found in rd.run(be_rank, size, "threads"):
        assert_state(found, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_the_state_of_one_device_may_be_loaded(way: str, size: int) -> None:
    model = make()
    own = grouped(model)
    trained_steps(Place(model, own), range(3))
    state = copy.deepcopy(own.state_dict())
    state["param_groups"][0]["lr"] = 7e-3

    def program(at: Place) -> None:
        trained_steps(at, range(1))
        at.optimizer.load_state_dict(copy.deepcopy(state))
        trained_steps(at, range(1, 3))

    assert_one_device(way, size, program, grouped)


@pytest.mark.parametrize("way", WAYS)
def test_the_state_of_another_optimizer_is_refused(way: str) -> None:
    def program(at: Place) -> None:
        other = make()
        at.optimizer.load_state_dict(grouped(other).state_dict())

    assert all("group" in told for told in told_by(way, 2, program, ValueError))


def unprepared(model: Any) -> tuple[Any, Any]:
    model, optimizer = rd.unprepare(model)
    assert type(optimizer) is torch.optim.Adam
    assert not hasattr(optimizer, "run")
    assert all(type(one) is nn.Parameter for one in model.parameters())
    with pytest.raises(InvalidArgumentError, match=r"rd\.prepare"):
        rd.full_state_dict(model)
    return model, optimizer


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_phases_under_every_strategy_are_one_device(way: str, size: int) -> None:
    """Train, take back, train alone, freeze, prepare otherwise, train, take back."""
    ways = list(WAYS)
    other = ways[(ways.index(way) + 3) % len(ways)]

    def train(at: Place) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(at.optimizer, 0.5)
        trained_steps(at, range(2))
        schedule.step()
        model, optimizer, comm = at.model, at.optimizer, at.comm
        if comm is not None:
            model, optimizer = unprepared(model)
        model.extra.requires_grad_(requires_grad=False)
        trained_steps(Place(model, optimizer), range(2, 3))
        schedule.step()
        if comm is not None:
            model, optimizer = rd.prepare(model, optimizer, strategy=WAYS[other], comm=comm)
        trained_steps(Place(model, optimizer, comm), range(3, 5))
        if comm is not None:
            unprepared(model)
        assert optimizer.param_groups[0]["lr"] == 2.5e-3
        assert sorted(optimizer.state_dict()["state"]) == list(range(6))

    model = make()
    train(Place(model, adam(model)))

    def be_rank(comm: Any) -> dict[str, Any]:
        mine = make()
        mine, own = rd.prepare(mine, adam(mine), strategy=WAYS[way], comm=comm)
        train(Place(mine, own, comm))
        return {key: plain(one) for key, one in mine.state_dict().items()}

    for found in rd.run(be_rank, size, "threads"):
        for key, one in model.state_dict().items():
            assert_close(found[key], one.numpy(), key)


@pytest.mark.parametrize("way", WAYS)
def test_in_bf16_the_masters_come_back(way: str) -> None:
    def be_rank(comm: Any) -> tuple[bool, set[Any]]:
        mine = make()
        mine, own = rd.prepare(mine, adam(mine), strategy=WAYS[way], comm=comm, precision="bf16")
        trained_steps(Place(mine, own, comm), range(2))
        whole = {key: one.clone() for key, one in rd.full_state_dict(mine).items()}
        mine, _ = rd.unprepare(mine)
        mine(rows_of(0))  # whose floats nobody casts any more
        return (all(torch.equal(whole[key], one) for key, one in mine.named_parameters()),
                {one.dtype for one in (*mine.parameters(), mine.mean)})  # fmt: skip

    assert rd.run(be_rank, 2, "threads") == [(True, {torch.float64})] * 2


def freeze(at: Place, *layers: str) -> None:
    """Train all layers but these."""
    for name, layer in at.model.named_children():
        layer.requires_grad_(requires_grad=name not in layers)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_freezing_in_between_is_one_device(way: str, size: int) -> None:
    """Also layers with a unit of their own, all but one, and ones with gradients still there."""

    def program(at: Place) -> None:
        for step, layers in enumerate([(), ("extra",), ("first", "extra"), ("last",), ()]):
            freeze(at, *layers)
            trained_steps(at, range(step, step + 1))
        at.loss(5).backward()
        freeze(at, "first")  # which has a gradient, and moves once more
        at.optimizer.step()
        at.optimizer.step()
        at.optimizer.zero_grad()
        trained_steps(at, range(6, 7))

    assert_one_device(way, size, program)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_freezes_alone_is_named(way: str, size: int) -> None:
    def program(at: Place) -> None:
        trained_steps(at, range(1))
        freeze(at, *(["extra"] if at.rank == size - 1 else []))
        with pytest.raises(CollectiveMismatch, match=rf"extra.weight is frozen on rank {size - 1}"):
            trained_steps(at, range(1, 2))
        at.optimizer.zero_grad()
        freeze(at, "extra")
        trained_steps(at, range(1, 2))

    found = on_ranks(way, size, program)
    assert all((one[key] == found[0][key]).all() for one in found for key in one)


@pytest.mark.parametrize("way", WAYS)
def test_training_what_was_frozen_at_prepare_is_refused_by_name(way: str) -> None:
    def be_rank(comm: Any) -> str:
        mine = make()
        mine.extra.requires_grad_(requires_grad=False)
        mine, own = rd.prepare(mine, adam(mine), strategy=WAYS[way], comm=comm)
        mine.extra.requires_grad_(requires_grad=True)
        with pytest.raises(InvalidArgumentError, match=r"extra\.weight.*rd\.unprepare") as error:
            trained_steps(Place(mine, own, comm), range(1))
        return str(error.value)

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("way", ["ddp", "zero1", "zero2", "zero3", "ps"])
def test_checkpointing_that_runs_backward_inside_backward(way: str) -> None:
    """Is right where no pass is weighed, and told to be the cause where that is refused."""

    def through(at: Place, step: int) -> Any:
        rows = rows_of(step).tensor_split(at.size)[at.rank].requires_grad_()
        inner = torch.utils.checkpoint.checkpoint(at.model.first, rows, use_reentrant=True)
        return torch.utils.checkpoint.checkpoint(at.model.last, inner, use_reentrant=True)

    def program(at: Place) -> None:
        for step in range(2):
            through(at, step).square().mean().backward()
            at.optimizer.step()
            at.optimizer.zero_grad()

    def weighed(at: Place) -> None:
        rd.backward(through(at, 0).square().sum(), weight=3)

    assert_one_device(way, 2, program)
    assert all("use_reentrant" in told for told in told_by(way, 2, weighed))


@pytest.mark.parametrize("last", ["inside", "outside"])
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_in_several_passes_inside_a_pass_is_one_device(way: str, last: str) -> None:
    """Also in fewer of them than before, and while gradients add up."""

    def inside(layer: Any, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)

    def backward(at: Place, step: int, times: int) -> None:
        x = rows_of(step).tensor_split(at.size)[at.rank].requires_grad_()
        x = inside(at.model.first, x)
        for _ in range(times):
            x = inside(at.model.extra, torch.tanh(x))
        x = inside(at.model.last, x) if last == "inside" else at.model.last(x)
        x.square().mean().backward()

    def program(at: Place) -> None:
        for step, times in enumerate([3, 2, 0, 1, 2]):
            if last == "outside":
                with at.adding():
                    backward(at, step + 50, times)
            backward(at, step, times)
            at.optimizer.step()
            at.optimizer.zero_grad()

    if way == "ps-server" and last == "inside":  # every pass by itself, which it refuses
        assert all("rd.accumulate" in told for told in told_by(way, 2, program))
    else:
        assert_one_device(way, 2, program)
