"""Every strategy there is, on every number of ranks, does what one device does."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import (  # noqa: E402
    CollectiveMismatch,
    InvalidArgumentError,
    NotFiniteError,
)
from roundelay.training.prepare import known_strategies  # noqa: E402

SIZES = (1, 2, 3, 4, 7)
STRATEGIES = known_strategies()
SYNCHRONOUS = [name for name, one in STRATEGIES.items() if one.synchronous]


def states(hand: Any, name: str, size: int, *, late: int | None = None, dtype: Any = None,
           engine: str = "threads", clip: float | None = None, accumulate: bool = False,
           groups: bool = False) -> list[dict[str, Any]]:  # fmt: skip
    """Train, and return every rank's whole state as arrays."""
    model, batches = hand.model(dtype or torch.float64), hand.batches()

    def be_rank(comm: Any) -> dict[str, Any]:
        if late is not None:
            comm = hand.late(comm, late)
        mine = hand.copy(model)
        mine, optimizer = rd.prepare(
            mine, optimizer_of(hand, mine, groups=groups), strategy=name, comm=comm
        )
        for tokens, targets in batches:
            train_one(
                hand, comm, mine, optimizer, tokens, targets, clip=clip, accumulate=accumulate
            )
        return {key: one.detach().numpy().copy() for key, one in rd.full_state_dict(mine).items()}

    return rd.run(be_rank, size, engine)


def optimizer_of(hand: Any, model: Any, *, groups: bool) -> Any:
    if not groups:
        return hand.adam(model.parameters())
    bias = [one for name, one in model.named_parameters() if "bias" in name]
    rest = [one for name, one in model.named_parameters() if "bias" not in name]
    return torch.optim.AdamW(
        [{"params": bias, "weight_decay": 0.0}, {"params": rest, "lr": 3e-3}], lr=1e-2
    )


def train_one(hand: Any, comm: Any, model: Any, optimizer: Any, tokens: Any, targets: Any, *,
              clip: float | None, accumulate: bool) -> None:  # fmt: skip
    rows = slice(*np.linspace(0, len(tokens), comm.size + 1).astype(int)[comm.rank : comm.rank + 2])
    tokens, targets = tokens[rows], targets[rows]
    parts = [(tokens, targets)]
    if accumulate:
        parts = list(zip(tokens.tensor_split(2), targets.tensor_split(2), strict=True))
        with rd.accumulate(model):
            one, two = parts.pop(0)
            rd.backward(hand.loss(model, one, two) * len(one), weight=len(one), model=model)
    one, two = parts[0]
    rd.backward(hand.loss(model, one, two) * len(one), weight=len(one), model=model)
    if clip is not None:
        optimizer.clip_grad_norm_(clip)
    optimizer.step()
    optimizer.zero_grad()


def one_device(hand: Any, *, clip: float | None = None, groups: bool = False,
               dtype: Any = None) -> dict[str, Any]:  # fmt: skip
    model = hand.model(dtype or torch.float64)
    optimizer = optimizer_of(hand, model, groups=groups)
    for tokens, targets in hand.batches():
        hand.loss(model, tokens, targets).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {key: one.detach().numpy() for key, one in model.state_dict().items()}


def farthest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(found[key] - expected[key]).max() / np.abs(expected[key]).max())
        for key in expected
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(
    "how",
    [{}, {"clip": 0.05}, {"accumulate": True}, {"groups": True, "clip": 0.05}],
    ids=["plain", "clipped", "accumulated", "groups"],
)
def test_it_is_one_device_to_rounding(awkward: Any, name: str, size: int, how: Any) -> None:
    expected = one_device(
        awkward, **{key: value for key, value in how.items() if key != "accumulate"}
    )
    for found in states(awkward, name, size, **how):
        assert farthest(found, expected) <= 1e-12


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("name", [name for name in SYNCHRONOUS if name != "ddp"])
def test_it_is_ddp_bit_for_bit(awkward: Any, name: str, size: int) -> None:
    expected = states(awkward, "ddp", size, dtype=torch.float32)
    found = states(awkward, name, size, dtype=torch.float32)
    for one, other in zip(expected, found, strict=True):
        for key in one:
            assert (one[key].view(np.uint32) == other[key].view(np.uint32)).all(), key


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_delays_change_nothing(awkward: Any, name: str, size: int) -> None:
    expected = states(awkward, name, size, dtype=torch.float32)
    for seed in (1, 2):
        found = states(awkward, name, size, dtype=torch.float32, late=seed)
        for one, other in zip(expected, found, strict=True):
            for key in one:
                assert (one[key] == other[key]).all(), key


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_processes_and_threads_agree(awkward: Any, name: str) -> None:
    threads = states(awkward, name, 3, dtype=torch.float32)
    processes = states(awkward, name, 3, dtype=torch.float32, engine="shared_memory")
    for one, other in zip(threads, processes, strict=True):
        for key in one:
            assert (one[key] == other[key]).all(), key


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_optimizer_that_it_takes_learns(awkward: Any, name: str) -> None:
    model, batches = awkward.model(), awkward.batches(20)

    def be_rank(comm: Any) -> tuple[float, float]:
        mine = awkward.copy(model)
        mine, optimizer = rd.prepare(
            mine, awkward.adam(mine.parameters()), strategy=name, comm=comm
        )
        losses = []
        for _ in range(3):
            for tokens, targets in batches[:1]:
                loss = awkward.loss(mine, tokens, targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        return losses[0], losses[-1]

    for first, last in rd.run(be_rank, 2, "threads"):
        assert last < first


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("size", "bad"), [(1, 0), (3, 1)])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(
    awkward: Any, name: str, size: int, bad: int
) -> None:
    if name == "ddp" and size == 1:
        pytest.skip("is plain torch, and looks at nothing")
    model = awkward.model()

    def be_rank(comm: Any) -> str:
        mine = awkward.copy(model)
        mine, optimizer = rd.prepare(
            mine, awkward.adam(mine.parameters()), strategy=name, comm=comm
        )
        tokens, targets = awkward.batches(1)[0]
        try:
            for _ in range(1000):  # who does not wait for the others hears of it later
                loss = awkward.loss(mine, tokens, targets)
                (loss * float("nan") if comm.rank == bad else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
        except NotFiniteError as error:
            return str(error)
        return "nothing was raised"

    for told in rd.run(be_rank, size, "threads"):
        assert "layers.0.weight" in told or "embed.weight" in told, told
        assert f"rank {bad}" in told, told


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("what", ["model", "optimizer", "order"])
def test_ranks_that_differ_are_told_apart(name: str, what: str) -> None:
    def be_rank(comm: Any) -> str:
        odd = comm.rank == 1
        layers = [torch.nn.Linear(3, 4), torch.nn.Linear(4, 4)]
        if what == "model" and odd:
            layers[1] = torch.nn.Linear(4, 5)
        if what == "order" and odd:
            layers = [torch.nn.Linear(3, 4), torch.nn.Linear(4, 4, bias=False)]
        model = torch.nn.Sequential(*layers)
        rate = 0.2 if what == "optimizer" and odd else 0.1
        try:
            rd.prepare(
                model, torch.optim.SGD(model.parameters(), lr=rate), strategy=name, comm=comm
            )
        except CollectiveMismatch as error:
            return str(error)
        return "nothing was raised"

    word = {"model": "1.weight: (5, 4)", "optimizer": "lr=0.2", "order": "1.bias"}[what]
    for told in rd.run(be_rank, 2, "threads"):
        assert word in told, told


def test_unknown_words_are_named_with_the_nearest(awkward: Any) -> None:
    model = awkward.model()

    def be_rank(comm: Any) -> list[str]:
        told = []
        for options in ({"strategy": "dpd"}, {"strategy": 3}, {"precision": "fp8"}):
            with pytest.raises(InvalidArgumentError) as error:
                rd.prepare(model, awkward.adam(model.parameters()), comm=comm, **options)
            told.append(str(error.value))
        return told

    nearest, kinds, precision = rd.run(be_rank, 1, "threads")[0]
    assert "ddp" in nearest
    assert "ddp" in kinds
    assert "fp16" in precision


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_trained_is_forgotten(awkward: Any, name: str, precision: str) -> None:
    """A model that nobody holds any more goes, and the shared memory of its ranks with it."""
    tokens, targets = awkward.batches()[0]
    alive: list[Any] = []

    def be_rank(comm: Any) -> None:
        model = awkward.model(torch.float32)
        optimizer = awkward.adam(model.parameters())
        alive.extend(weakref.ref(one) for one in (comm, model, optimizer))
        rd.prepare(model, optimizer, strategy=name, comm=comm, precision=precision)
        optimizer.scale(awkward.loss(model, tokens, targets)).backward()
        optimizer.step()

    try:
        rd.run(be_rank, 2, "threads")
    except InvalidArgumentError:
        assert (precision, STRATEGIES[name].synchronous) == ("fp16", False)
    gc.collect()
    assert [one() for one in alive] == [None] * 6


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_not_prepared(awkward: Any, copied: Any) -> None:
    def be_rank(comm: Any) -> None:
        model = awkward.model(torch.float32)
        model, _ = rd.prepare(model, awkward.adam(model.parameters()), comm=comm)
        twin = copied(model)
        with pytest.raises(InvalidArgumentError, match=r"needs a model that rd\.prepare"):
            rd.full_state_dict(twin)
        rd.full_state_dict(model)

    rd.run(be_rank, 1, "threads")
