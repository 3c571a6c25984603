"""Whatever comes between two steps, every strategy does what one device does, or says why not."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import (  # noqa: E402
    CollectiveMismatch,
    InvalidArgumentError,
    NotFiniteError,
    RoundelayError,
)
from small_steps import (  # noqa: E402
    SIZES,
    WAYS,
    Place,
    Program,
    adam,
    assert_close,
    assert_one_device,
    make,
    on_ranks,
    plain,
    rows_of,
    told_by,
)

nn = torch.nn

# ---- programs that are right everywhere


def forget_by(how: str) -> Program:
    def program(at: Place) -> None:
        for step in range(3):
            at.weighed(step + 50)  # a bad one
            if how == "optimizer":
                at.optimizer.zero_grad()
            elif how == "model":
                at.model.zero_grad()
            else:
                for one in at.model.parameters():
                    one.grad = None
            at.weighed(step)
            at.optimizer.step()
            at.optimizer.zero_grad()

    return program


def only_accumulated(at: Place) -> None:
    for step in range(3):
        for part in range(2):
            with at.adding():
                at.loss(step, part, 2).backward()
        at.optimizer.step()
        at.optimizer.zero_grad()


def only_accumulated_by_weight(at: Place) -> None:
    for step in range(3):
        for part in range(2):
            at.weighed(step, part, 2, more=True)
        at.optimizer.step()
        at.optimizer.zero_grad()


def no_backward(at: Place) -> None:
    at.optimizer.step()
    at.loss(0).backward()
    at.optimizer.step()
    at.optimizer.zero_grad()
    at.optimizer.step()
    at.loss(1).backward()
    at.optimizer.step()


def same_gradients_twice(at: Place) -> None:
    at.loss(0).backward()
    at.optimizer.step()
    at.optimizer.step()


def zeros(at: Place) -> None:
    """A parameter that has a gradient of zeros is stepped on, as its moments want."""
    for step in range(4):
        at.loss(step, extra=step % 2 == 0).backward()
        at.optimizer.step()
        at.optimizer.zero_grad(set_to_none=False)
    at.optimizer.step()


RIGHT: dict[str, Program] = {
    "zero_grad of the optimizer": forget_by("optimizer"),
    "zero_grad of the model": forget_by("model"),
    "grads set to None": forget_by("hand"),
    "only accumulated": only_accumulated,
    "only accumulated, weighed": only_accumulated_by_weight,
    "no backward": no_backward,
    "stepped twice": same_gradients_twice,
    "zeros": zeros,
}


@pytest.mark.parametrize("what", RIGHT)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_one_device(way: str, size: int, what: str) -> None:
    assert_one_device(way, size, RIGHT[what])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_after_one_that_was_not_finite(way: str, size: int) -> None:
    def program(at: Place) -> None:
        if at.comm is not None and not (size == 1 and way in ("ddp", "small buckets")):
            with pytest.raises(NotFiniteError):
                rd.backward(at.loss(9) * float("nan"), weight=7.0)
        for step in range(2):
            at.weighed(step)
            at.optimizer.step()
            at.optimizer.zero_grad()

    assert_one_device(way, size, program)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "ps"])
def test_zeros_in_half_precision_are_those_of_ddp(name: str, precision: str) -> None:
    def program(at: Place) -> None:
        for step in range(4):
            at.optimizer.scale(at.loss(step, extra=step % 2 == 0)).backward()
            at.optimizer.step()
            at.optimizer.zero_grad(set_to_none=False)

    first, *_ = on_ranks("ddp", 2, program, precision=precision)
    for found in on_ranks(name, 2, program, precision=precision):
        for key, one in first.items():
            np.testing.assert_array_equal(found[key], one, err_msg=key)


@pytest.mark.parametrize("size", SIZES)
def test_a_hook_of_your_own_goes_with_weights(size: int) -> None:
    def average(comm: Any, bucket: Any) -> Any:
        return comm.start.all_reduce(bucket, "avg").wait

    WAYS["hook"] = rd.Ddp(hook=average)
    try:
        assert_one_device("hook", size, RIGHT["zero_grad of the optimizer"])
    finally:
        del WAYS["hook"]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_weights_belong_to_the_models_that_the_loss_comes_from(way: str, size: int) -> None:
    def train(place: Place, other: Place) -> None:
        for step in range(2):
            place.weighed(step, 0, 2, more=True)
            other.weighed(step + 5)
            other.optimizer.step()
            other.optimizer.zero_grad()
            place.weighed(step, 1, 2)
            place.optimizer.step()
            place.optimizer.zero_grad()

    expected = [make(), make()]
    train(*(Place(one, adam(one)) for one in expected))

    def be_rank(comm: Any) -> list[dict[str, Any]]:
        places = []
        for _ in range(2):
            mine = make()
            places.append(Place(*rd.prepare(mine, adam(mine), strategy=WAYS[way], comm=comm), comm))
        train(*places)
        return [{key: plain(value) for key, value in rd.full_state_dict(place.model).items()}
                for place in places]  # fmt: skip

    for found in rd.run(be_rank, size, "threads"):
        for one, model in zip(found, expected, strict=True):
            for key, value in model.state_dict().items():
                assert_close(one[key], value.numpy(), key)


# ---- buffers


@pytest.mark.parametrize("way", WAYS)
def test_every_buffer_is_rank_0_s_after_a_step(way: str) -> None:
    def program(at: Place) -> None:
        at.model.register_buffer("wide", torch.zeros(1).expand(4), persistent=False)
        at.loss(0).backward()
        at.model.seen += 3 + at.rank
        at.model.mask[at.rank] = True
        at.model.mean += at.rank
        at.optimizer.step()
        assert at.model.wide.tolist() == [0.0] * 4

    for found in on_ranks(way, 3, program):
        assert found["seen"] == 3
        assert found["mask"].tolist() == [True, False, False]
        assert found["mean"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("way", WAYS)
def test_buffers_may_be_the_mean(way: str) -> None:
    def program(at: Place) -> None:
        at.loss(0).backward()
        at.model.seen += 3 + at.rank
        at.model.mean += at.rank
        at.optimizer.step()

    for found in on_ranks(way, 3, program, buffers="mean"):
        assert found["seen"] == 3
        assert found["mean"].tolist() == [1.0, 1.0]


# ---- refused


@pytest.mark.parametrize("way", WAYS)
def test_passes_of_a_step_are_all_weighed_or_none(way: str) -> None:
    def program(at: Place) -> None:
        at.weighed(0, more=True)
        at.loss(1).backward()

    for told in told_by(way, 2, program):
        assert "rd.backward" in told


@pytest.mark.parametrize("way", WAYS)
def test_weights_on_gradients_that_were_not_forgotten(way: str) -> None:
    def program(at: Place) -> None:
        at.weighed(0)
        at.optimizer.step()
        at.weighed(1)

    for told in told_by(way, 2, program):
        assert "zero_grad" in told


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_of_something_else_is_refused(way: str) -> None:
    def program(_: Place) -> None:
        other = nn.Linear(3, 1).double()
        rd.backward(other(rows_of(0)).sum(), weight=3)

    for told in told_by(way, 2, program):
        assert "does not depend" in told


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "zero3"])
def test_a_rank_that_skips_a_backward_pass_is_named_on_all_ranks(way: str, size: int) -> None:
    def program(at: Place) -> None:
        at.model._buffers.clear()  # the first of which would be waited for
        for step in range(4):
            if not (step == 1 and at.rank == 1):
                at.loss(step).backward()
            at.optimizer.step()
            at.optimizer.zero_grad()

    told = told_by(way, size, program, RoundelayError)
    assert all("1" in one for one in told), told


@pytest.mark.parametrize("bad", [0, 1, None])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "zero3"])  # test_zero_faults.py
def test_a_backward_pass_that_raises(way: str, bad: int | None) -> None:
    """On some ranks or on all: nobody hangs, nothing is mixed, and the next batch is right."""

    def program(at: Place) -> None:
        for step in range(3):
            if step == 1 and at.comm is not None:
                inner = torch.tanh(at.model.first(rows_of(step)))
                if bad in (None, at.rank):
                    inner.register_hook(stumble)
                loss = at.model.last(at.model.extra(inner)).square().mean()
                with pytest.raises(ValueError if bad in (None, at.rank) else CollectiveMismatch):
                    loss.backward()
                with pytest.raises(InvalidArgumentError, match="zero_grad"):
                    at.optimizer.step()
                at.optimizer.zero_grad()
                continue
            if step != 1:
                at.loss(step).backward()
                at.optimizer.step()
                at.optimizer.zero_grad()

    def stumble(_: Any) -> None:
        raise ValueError("on purpose")

    assert_one_device(way, 3, program)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_prepared_once(way: str) -> None:
    def be_rank(comm: Any) -> list[str]:
        mine = make()
        mine, own = rd.prepare(mine, adam(mine), strategy=WAYS[way], comm=comm)
        told = []
        for model in (mine, nn.Sequential(mine)):
            with pytest.raises(InvalidArgumentError) as error:
                rd.prepare(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]), comm=comm)
            told.append(str(error.value))
        with pytest.raises(InvalidArgumentError) as error:
            rd.prepare(make(), own, comm=comm)
        return [*told, str(error.value)]

    for told in rd.run(be_rank, 2, "threads"):
        assert all("rd.unprepare" in one for one in told), told


def test_parameters_belong_to_one_model() -> None:
    def be_rank(comm: Any) -> str:
        mine, other = make(), nn.Linear(5, 2).double()
        other.weight = mine.last.weight
        rd.prepare(mine, adam(mine), comm=comm)
        with pytest.raises(InvalidArgumentError) as error:
            rd.prepare(other, adam(other), comm=comm)
        return str(error.value)

    assert all("weight" in told for told in rd.run(be_rank, 2, "threads"))


# ---- what ranks must share


def other_units(comm: Any) -> Any:
    return rd.Zero(3, units=["first"] if comm.rank else ["last"])


DIFFERENT: dict[str, tuple[Any, str]] = {
    "strategies": (lambda comm: "ddp" if comm.rank else "zero2", "Zero(stage=2"),
    "stages": (lambda comm: "zero1" if comm.rank else "zero2", "stage=1"),
    "units": (other_units, "units=['last']"),
    "buckets": (lambda comm: rd.Ddp(bucket_bytes=64 + comm.rank % 2), "bucket_bytes=65"),
    "modes": (lambda comm: "ps-async" if comm.rank else "ps", "mode='async'"),
    "unknown": (lambda comm: "dpd" if comm.rank else "ddp", "dpd"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_strategies_that_differ_are_told_apart_on_all_ranks(what: str) -> None:
    choose, word = DIFFERENT[what]

    def be_rank(comm: Any) -> str:
        mine = make()
        with pytest.raises(RoundelayError) as error:
            rd.prepare(mine, adam(mine), strategy=choose(comm), comm=comm)
        return str(error.value)

    for told in rd.run(be_rank, 3, "threads"):
        assert word in told, told


@pytest.mark.parametrize("what", ["precision", "buffers", "frozen", "missing"])
def test_other_choices_that_differ_are_told_apart_on_all_ranks(what: str) -> None:
    def be_rank(comm: Any) -> str:
        mine, odd = make(), comm.rank == 1
        options: dict[str, Any] = {}
        if what == "precision":
            options["precision"] = "bf16" if odd else "fp32"
        if what == "buffers":
            options["buffers"] = "mean" if odd else "first"
        if what == "frozen":
            mine.extra.requires_grad_(requires_grad=not odd)
        own = adam(mine.first if what == "missing" and odd else mine)
        with pytest.raises(RoundelayError) as error:
            rd.prepare(mine, own, comm=comm, **options)
        return str(error.value)

    word = {"precision": "bfloat16", "buffers": "mean", "frozen": "extra", "missing": "extra"}
    for told in rd.run(be_rank, 3, "threads"):
        assert word[what] in told, told


def test_copies_are_apart() -> None:
    """A copy of a prepared model may be prepared by itself."""

    def be_rank(comm: Any) -> None:
        mine = make()
        mine, _ = rd.prepare(mine, adam(mine), comm=comm)
        twin = copy.deepcopy(mine)
        rd.prepare(twin, adam(twin), comm=comm)

    rd.run(be_rank, 2, "threads")
