"""Mixed precision: what a hand-written loop with master weights does, and fp16's two failures."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError, NotFiniteError  # noqa: E402
from roundelay.training.precision import Precision  # noqa: E402
from roundelay.training.prepare import known_strategies  # noqa: E402

SYNCHRONOUS = [name for name, one in known_strategies().items() if one.synchronous]
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 5


def make_net() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)
        )


NET = make_net()


def net() -> Any:
    """The same weights every time; ranks that are threads share their random numbers."""
    return copy.deepcopy(NET)


def data(size: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(size, STEPS, 2, 6, 5, generator=generator)
    return x, torch.randn(size, STEPS, 2, 6, 3, generator=generator)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return ((model(x).float() - y) ** 2).mean()


def mean_of(every: list[Any], wire: Any) -> Any:
    """The library's fold: by rank, in float32, divided and rounded once."""
    total = every[0].float()
    for grad in every[1:]:
        total = total + grad.float()
    return (total / len(every)).to(wire)


def by_hand(
    size: int, half: Any, *, wire: Any, parts: int, shards: bool
) -> tuple[list[Any], float]:
    """Masters in float32, everything spelled out; `shards` are brought together in every pass."""
    scale = 2.0**16 if half == torch.float16 else 1.0
    model, (x, y) = net(), data(size)
    masters = [one.detach().clone() for one in model.parameters()]
    model.to(half)
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    for step in range(STEPS):
        passes = [[part] for part in range(parts)] if shards else [list(range(parts))]
        sums: list[Any] = []
        for listed in passes:
            every = []
            for rank in range(size):
                model.zero_grad()
                for part in listed:
                    loss = loss_of(model, x[rank, step, part].to(half), y[rank, step, part])
                    (loss * scale).backward()
                every.append([one.grad.clone() for one in model.parameters()])
            means = [mean_of(list(grads), wire) for grads in zip(*every, strict=True)]
            sums = [a + b for a, b in zip(sums, means, strict=True)] if sums else means
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad.float() / scale
        if not all(torch.isfinite(master.grad).all() for master in masters):
            scale /= 2
            continue
        optimizer.step()
        with torch.no_grad():
            for one, master in zip(model.parameters(), masters, strict=True):
                one.copy_(master)
    return masters, scale


def prepared(comm: Any, model: Any, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return rd.prepare(model, optimizer, comm=comm, **options)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("word", HALVES)
@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("reduce", [None, torch.float32], ids=["half", "float32"])
@pytest.mark.parametrize("parts", [1, 2], ids=["once", "accumulated"])
def test_it_is_the_loop_by_hand_bit_for_bit(
    name: str, word: str, size: int, reduce: Any, parts: int
) -> None:
    half, (x, y) = HALVES[word], data(size)
    expected, scale = by_hand(
        size, half, wire=reduce or half, parts=parts, shards=name in ("zero2", "zero3")
    )

    def be_rank(comm: Any) -> tuple[list[Any], set[Any], float]:
        model, optimizer = prepared(
            comm, net(), strategy=name, precision=Precision(compute=half, reduce=reduce)
        )
        seen: set[Any] = set()
        model[0].register_forward_hook(
            lambda _, inputs, output: seen.update((inputs[0].dtype, output.dtype))
        )
        for step in range(STEPS):
            for part in range(parts - 1):
                with rd.accumulate(model):
                    one = loss_of(model, x[comm.rank, step, part], y[comm.rank, step, part])
                    optimizer.scale(one).backward()
            one = loss_of(model, x[comm.rank, step, parts - 1], y[comm.rank, step, parts - 1])
            optimizer.scale(one).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = [one.detach().clone() for one in rd.full_state_dict(model).values()]
        scaler = optimizer.run.setup.scaler
        return found, seen, 1.0 if scaler is None else scaler.scale

    for found, seen, scaled in rd.run(be_rank, size, "threads"):
        assert seen == {half}
        assert scaled == scale
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == torch.float32
            assert torch.equal(one, other)


# ---- the two failures of fp16


def train_alone(precision: Any, model: Any, loss: Callable[[Any], Any], *, steps: int = 1) -> Any:
    def be_rank(comm: Any) -> Any:
        mine = copy.deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)
        mine, optimizer = rd.prepare(
            mine, optimizer, comm=comm, strategy="ddp", precision=precision
        )
        for _ in range(steps):
            optimizer.scale(loss(mine)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return rd.full_state_dict(mine)["weight"].double().clone()

    return rd.run(be_rank, 2, "threads")[0]


def test_underflow_loses_small_gradients_unless_the_loss_is_scaled() -> None:
    """A gradient of 1e-8 is less than half of the smallest float16 above zero."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    def loss(mine: Any) -> Any:
        return mine(torch.ones(1, 1)).float().sum() * 1e-8

    unscaled = Precision(compute=torch.float16, loss_scale=1.0, growth_interval=None)
    assert train_alone(unscaled, model, loss).item() == 0
    assert train_alone("fp16", model, loss).item() == pytest.approx(-1e-8, rel=1e-3)


@pytest.mark.parametrize("word", HALVES)
def test_rounding_loses_small_updates_unless_there_are_master_weights(word: str) -> None:
    """1 minus 1e-4 is 1 in float16, as often as one likes; 100 of them are 0.99 in the master."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)

    def loss(mine: Any) -> Any:
        x = torch.ones(1, 1, dtype=mine.weight.dtype)
        return mine(x).float().sum() * 1e-4

    half = copy.deepcopy(model).to(HALVES[word])
    assert train_alone("fp32", half, loss, steps=100).item() == 1
    assert train_alone(word, model, loss, steps=100).item() == pytest.approx(0.99, rel=1e-3)


# ---- loss scaling


def test_overflow_on_one_rank_skips_the_step_on_all_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = data(3)

    def be_rank(comm: Any) -> list[tuple[float, bool]]:
        precision = Precision(torch.float16, loss_scale=1024.0, growth_interval=2)
        model, optimizer = prepared(comm, net(), strategy="ddp", precision=precision)
        told = []
        for step in range(STEPS):
            before = [one.clone() for one in rd.full_state_dict(model).values()]
            loss = loss_of(model, x[comm.rank, step, 0], y[comm.rank, step, 0])
            huge = 1e6 if comm.rank == 1 and step in (1, 2) else 1.0
            optimizer.scale(loss * huge).backward()
            optimizer.step()
            optimizer.zero_grad()
            after = rd.full_state_dict(model).values()
            moved = not all(torch.equal(*pair) for pair in zip(before, after, strict=True))
            told.append((optimizer.run.setup.scaler.scale, moved))
        return told

    with caplog.at_level(logging.INFO, "roundelay"):
        every = rd.run(be_rank, 3, "threads")
    assert every[0] == [
        (1024, True), (512, False), (256, False), (256, True), (512, True),
    ]  # fmt: skip
    assert every[0] == every[1] == every[2]
    messages = [one.getMessage() for one in caplog.records]
    usual = "Normal in the first steps, and now and then later."
    skipped = "skipped: gradients overflowed in fp16; loss scale"
    assert messages == [
        f"step 1 {skipped} 1024 → 512. {usual}",
        f"step 2 {skipped} 512 → 256. {usual}",
        "step 4: no overflow in 2 steps; loss scale 256 → 512, so that smaller gradients survive.",
    ]


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("when", ["at once", "while accumulating", "after a good step"])
def test_a_loss_that_nobody_scaled_is_an_error_at_the_first_gradient(name: str, when: str) -> None:
    x, y = data(2)

    def be_rank(comm: Any) -> str:
        model, optimizer = prepared(comm, net(), strategy=name, precision="fp16")
        loss = loss_of(model, x[comm.rank, 0, 0], y[comm.rank, 0, 0])
        if when == "after a good step":
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(model, x[comm.rank, 1, 0], y[comm.rank, 1, 0])
        try:
            if when == "while accumulating":
                with rd.accumulate(model):
                    loss.backward()
            else:
                loss.backward()
        except InvalidArgumentError as error:
            return str(error)
        return "nothing was raised"

    for told in rd.run(be_rank, 2, "threads"):
        assert "optimizer.scale(loss).backward()" in told


def test_gradients_that_overflow_at_every_scale_end_in_an_error() -> None:
    def be_rank(comm: Any) -> tuple[int, str]:
        model, optimizer = prepared(comm, net(), strategy="ddp", precision="fp16")
        for step in range(100):
            loss = model(torch.ones(1, 5)).float().sum() * float("nan")
            optimizer.scale(loss).backward()
            try:
                optimizer.step()
            except NotFiniteError as error:
                return step, str(error)
            optimizer.zero_grad()
        return 100, "nothing was raised"

    for step, told in rd.run(be_rank, 2, "threads"):
        assert step == 30  # 2^16 to 2^-14
        assert "0.weight" in told


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(
    ("precision", "loose"),
    [("fp32", 1e-6), ("bf16", 2e-2), (Precision(torch.float16, loss_scale=256.0), 2e-3)],
    ids=["fp32", "bf16", "fp16"],
)
def test_a_weighted_backward_scales_by_itself_and_clips_what_the_optimizer_sees(
    name: str, precision: Any, loose: float
) -> None:
    x, y = data(2)

    def be_rank(comm: Any) -> tuple[float, float]:
        model, optimizer = prepared(comm, net(), strategy=name, precision=precision)
        rows = 2 + 3 * comm.rank
        part = model(x[comm.rank, 0, 0, :rows]).float() - y[comm.rank, 0, 0, :rows]
        rd.backward((part**2).mean(1).sum(), weight=rows, model=model)
        return optimizer.clip_grad_norm_(0.01), optimizer.clip_grad_norm_(1.0)

    alone = net()
    both = torch.cat([x[0, 0, 0, :2], x[1, 0, 0, :5]]), torch.cat([y[0, 0, 0, :2], y[1, 0, 0, :5]])
    loss_of(alone, *both).backward()
    expected = float(torch.nn.utils.get_total_norm([one.grad for one in alone.parameters()]))
    for before, after in rd.run(be_rank, 2, "threads"):
        assert before == pytest.approx(expected, rel=loose)
        assert after == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "refused"),
    [("bf16", False), ("fp16", True), (Precision(torch.bfloat16, reduce=torch.float32), True)],
)
def test_torchs_own_clipping_is_right_or_refused(precision: Any, *, refused: bool) -> None:
    x, y = data(2)

    def be_rank(comm: Any) -> Any:
        model, optimizer = prepared(comm, net(), strategy="ddp", precision=precision)
        optimizer.scale(loss_of(model, x[comm.rank, 0, 0], y[comm.rank, 0, 0])).backward()
        if refused:
            with pytest.raises(InvalidArgumentError, match="clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            return None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return optimizer.clip_grad_norm_(1.0)

    for norm in rd.run(be_rank, 2, "threads"):
        assert norm is None or norm == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("word", HALVES)
def test_a_second_backward_adds_up_or_is_refused(word: str) -> None:
    x, y = data(2)

    def be_rank(comm: Any) -> Any:
        model, optimizer = prepared(comm, net(), strategy="ddp", precision=word)
        optimizer.scale(loss_of(model, x[comm.rank, 0, 0], y[comm.rank, 0, 0])).backward()
        once = optimizer.clip_grad_norm_(1e9)
        try:
            optimizer.scale(loss_of(model, x[comm.rank, 0, 0], y[comm.rank, 0, 0])).backward()
        except InvalidArgumentError as error:
            return str(error)
        return optimizer.clip_grad_norm_(1e9) / once

    for told in rd.run(be_rank, 2, "threads"):
        if word == "fp16":
            assert "rd.accumulate" in told
        else:
            assert told == pytest.approx(2, rel=1e-2)


# ---- what the model gets and gives


class Nested(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[Any] = []

    def forward(self, batch: Any, *, extra: Any) -> Any:
        self.seen = [batch["x"].dtype, batch["ids"].dtype, extra[0].dtype, self.mean.dtype]
        return self.inner(batch["x"]) + extra[0] + self.mean, batch["ids"]


@pytest.mark.parametrize("buffers", [None, torch.bfloat16])
@pytest.mark.parametrize("output", [None, torch.float32])
def test_floating_inputs_are_cast_however_nested(buffers: Any, output: Any) -> None:
    def be_rank(comm: Any) -> tuple[list[Any], list[Any]]:
        precision = Precision(torch.bfloat16, buffers=buffers, output=output)
        model, _ = prepared(comm, Nested(), strategy="ddp", precision=precision)
        result = model(
            {"x": torch.ones(2, 3), "ids": torch.arange(2)}, extra=(torch.ones(2, 2).double(), "a")
        )
        return model.seen, [one.dtype for one in (*result, model.count)]

    half, whole = torch.bfloat16, torch.int64
    for seen, given in rd.run(be_rank, 1, "threads"):
        assert seen == [half, whole, half, buffers or torch.float32]  # as it was
        assert given == [output or (half if buffers is half else torch.float32), whole, whole]


def test_loading_a_state_reaches_the_masters_unrounded() -> None:
    state = {name: torch.full_like(one, 1 + 1e-6) for name, one in net().state_dict().items()}

    def be_rank(comm: Any) -> Any:
        model, _ = prepared(comm, net(), strategy="ddp", precision="bf16")
        model.load_state_dict(state)
        return [torch.equal(one, state[name]) for name, one in rd.full_state_dict(model).items()]

    assert all(rd.run(be_rank, 1, "threads")[0])


@pytest.mark.parametrize("word", HALVES)
def test_closures_see_the_masters_weights_or_are_refused(word: str) -> None:
    x, y = data(1)

    def be_rank(comm: Any) -> Any:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        model, optimizer = rd.prepare(model, optimizer, comm=comm, strategy="ddp", precision=word)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, x[0, 0, 0], y[0, 0, 0])
            optimizer.scale(loss).backward()
            return loss

        if word == "fp16":
            with pytest.raises(InvalidArgumentError, match="closure"):
                optimizer.step(closure)
            return None
        first = closure().item()
        for _ in range(3):
            optimizer.step(closure)
        return closure().item() / first

    ratio = rd.run(be_rank, 1, "threads")[0]
    assert ratio is None or ratio < 0.7


@pytest.mark.parametrize("word", HALVES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ledger_has_two_and_two_and_twelve_bytes_a_parameter(word: str, size: int) -> None:
    x, y = data(size)

    def be_rank(comm: Any) -> Any:
        model, optimizer = rd.prepare(
            one := net(), torch.optim.Adam(one.parameters()), comm=comm, strategy="ddp",
            precision=word,
        )  # fmt: skip
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, x[comm.rank, step, 0], y[comm.rank, step, 0])
            optimizer.scale(loss).backward()
            optimizer.step()
        return rd.ledger(model).entries

    count = sum(one.numel() for one in net().parameters())
    for entry in rd.run(be_rank, size, "threads")[0]:
        for held in (entry.predicted, entry.measured):
            assert (held.parameters, held.gradients, held.optimizer, held.transient) == (
                2 * count, 2 * count, 12 * count, 0,
            )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"compute": torch.int8},
        {"compute": "bf16"},
        {"compute": torch.float16, "loss_scale": 0.0},
        {"compute": torch.float16, "loss_scale": float("inf")},
        {"compute": torch.float16, "growth_interval": 0},
        {"loss_scale": 8.0},
        {"compute": torch.bfloat16, "reduce": torch.int32},
    ],
)
def test_options_that_make_no_sense_are_named(options: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=list(options)[-1]):
        Precision(**options)


def test_a_loss_that_is_scaled_twice_is_refused() -> None:
    def be_rank(comm: Any) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(model, optimizer, precision="fp16", comm=comm)
        scaled = optimizer.scale(model(torch.ones(1, 2)).float().sum())
        for again in (
            lambda: optimizer.scale(scaled),
            lambda: optimizer.scale(scaled / 2 + 1),
            lambda: rd.backward(scaled, weight=1),
        ):
            with pytest.raises(InvalidArgumentError, match="scaled already"):
                again()
        both = scaled + optimizer.scale(model(torch.ones(1, 2)).float().mean())  # each once
        both.backward()
        optimizer.step()

    rd.run(be_rank, 1, "threads")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "ps"])
def test_what_is_written_into_the_groups_of_the_optimizer_is_trained_on(strategy: str) -> None:
    """Into master weights, in place or anew; what is written into both is refused."""

    def be_rank(comm: Any) -> None:
        model = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        model, optimizer = rd.prepare(
            model, optimizer, strategy=strategy, precision="bf16", comm=comm
        )

        def step() -> Any:
            optimizer.zero_grad()
            model(torch.ones(1, 3)).float().sum().backward()
            optimizer.step()
            return rd.full_state_dict(model)["weight"].mean().item()

        assert step() == 0.875
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].clamp_(max=0.5)
        assert rd.full_state_dict(model)["weight"].mean().item() == 0.5
        assert step() == 0.375
        optimizer.param_groups[0]["params"][0].data = torch.full((2, 3), 2.0)
        assert step() == 1.875
        if strategy in ("ddp", "ps"):
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].fill_(0.25)
                model.weight.fill_(0.75)
            with pytest.raises(InvalidArgumentError, match="weight and its master"):
                step()

    rd.run(be_rank, 2, "threads")
