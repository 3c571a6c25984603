"""A model may have several optimizers: each steps, clips and forgets as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError  # noqa: E402
from roundelay.training.prepare import known_strategies  # noqa: E402

nn = torch.nn
NAMES = [*known_strategies()]
SERVER = rd.ParameterServer(update="server", servers=2)
STEPS = 3


class Ortho(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Muon in the dtype of its parameters, which torch's own rounds to bfloat16."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                kept = self.state[one].setdefault("momentum_buffer", torch.zeros_like(one))
                kept.mul_(group["momentum"]).add_(one.grad)
                x = kept / (kept.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                one.sub_(x, alpha=group["lr"] * max(1, one.size(0) / one.size(1)) ** 0.5)


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """Matrices of odd sizes, vectors, one parameter that nobody uses and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 7), nn.Linear(7, 5), nn.Linear(5, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.frozen(x) * self.norm.weight + self.norm.bias


def make() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return Net().double()


def divided(model: Any) -> tuple[Any, Any]:
    """Matrices to one, the rest to another optimizer; the first has two groups."""
    trained = [one for one in model.parameters() if one.requires_grad]
    matrices = [one for one in trained if one.dim() == 2]
    rest = [one for one in trained if one.dim() != 2]
    groups = [{"params": matrices[:1]}, {"params": matrices[1:], "lr": 0.05}]
    return Ortho(groups), torch.optim.AdamW(rest, lr=0.01)


class Plain:
    """One device, with the words of a prepared model."""

    def __init__(self, model: Any) -> None:
        self.model, self.rank, self.size = model, 0, 1

    def backward(self, x: Any) -> None:
        self.model(x).square().mean().backward()

    def add(self, x: Any) -> None:
        self.backward(x)

    def clip(self, optimizer: Any, norm: float) -> None:
        mine = [one for group in optimizer.param_groups for one in group["params"]]
        nn.utils.clip_grad_norm_(mine, norm)

    def cut(self, optimizer: Any, value: float) -> None:
        mine = [one for group in optimizer.param_groups for one in group["params"]]
        nn.utils.clip_grad_value_(mine, value)


class Ranks(Plain):
    """The same on ranks, whose losses weigh as much as they have rows."""

    def __init__(self, model: Any, comm: Any, *, weighs: bool) -> None:
        super().__init__(model)
        self.comm, self.weighs = comm, weighs

    def backward(self, x: Any) -> None:
        mine = x.tensor_split(self.comm.size)[self.comm.rank]
        if self.weighs:
            loss = self.model(mine).square().sum()
            rd.backward(loss, weight=mine.numel())
        else:
            self.model(mine).square().mean().backward()

    def add(self, x: Any) -> None:
        with rd.accumulate(self.model):
            self.backward(x)

    def clip(self, optimizer: Any, norm: float) -> None:
        optimizer.clip_grad_norm_(norm)

    def cut(self, optimizer: Any, value: float) -> None:
        optimizer.clip_grad_value_(value)


def both(at: Any, one: Any, two: Any, x: Any, step: int) -> None:
    del step
    at.backward(x)
    one.step()
    two.step()
    one.zero_grad()
    two.zero_grad()


def the_other_way_round(at: Any, one: Any, two: Any, x: Any, step: int) -> None:
    both(at, two, one, x, step)


def in_turn(at: Any, one: Any, two: Any, x: Any, step: int) -> None:
    at.backward(x)
    (two if step % 2 else one).step()
    one.zero_grad()
    two.zero_grad()


def one_forgets(at: Any, one: Any, two: Any, x: Any, step: int) -> None:
    """The gradients of the other stay, and add up."""
    at.backward(x)
    one.step()
    one.zero_grad()
    if step % 2:
        two.step()
        two.zero_grad()


def one_makes_zeros(at: Any, one: Any, two: Any, x: Any, step: int) -> None:
    del step
    at.backward(x)
    one.zero_grad(set_to_none=False)
    two.step()
    one.step()
    two.zero_grad()
    one.zero_grad()


def clipped(at: Any, one: Any, two: Any, x: Any, step: int) -> None:
    at.backward(x)
    at.clip(one, 0.05)
    one.step()
    at.clip(two, 0.01 + step)
    at.cut(two, 0.003)
    two.step()
    one.zero_grad()
    two.zero_grad()


def frozen_meanwhile(at: Any, one: Any, two: Any, x: Any, step: int) -> None:
    """The other's parameters are frozen while one steps, as GANs do it."""
    later = [each for each in at.model.parameters() if each.dim() == 1 and each.requires_grad]
    if step % 2:
        for each in later:
            each.requires_grad_(requires_grad=False)
        at.backward(x)
        one.step()
        one.zero_grad()
        for each in later:
            each.requires_grad_(requires_grad=True)
    else:
        both(at, one, two, x, step)


def added_up(at: Any, one: Any, two: Any, x: Any, step: int) -> None:
    at.add(x)
    both(at, two, one, x.flip(0) * 2, step)


HABITS: list[Callable[..., None]] = [
    both, the_other_way_round, in_turn, one_forgets, one_makes_zeros, clipped, frozen_meanwhile,
    added_up,
]  # fmt: skip
WEIGHED = [both, in_turn, clipped]
LEAVES = (one_forgets,)  # gradients that the next pass adds to, which servers that update refuse


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(12, 4, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def train(at: Any, habit: Callable[..., None], one: Any, two: Any) -> None:
    slow = torch.optim.lr_scheduler.ExponentialLR(one, 0.9)
    for step, x in enumerate(batches()):
        habit(at, one, two, x, step)
        slow.step()


def expected() -> dict[str, dict[str, Any]]:
    found = {}
    for habit in HABITS:
        model = make()
        train(Plain(model), habit, *divided(model))
        found[habit.__name__] = model.state_dict()
    return found


def assert_close(found: Any, wanted: Any, why: str) -> None:
    for key, one in wanted.items():
        far = float((found[key] - one).abs().max())
        assert far <= 1e-12 * (1 + float(one.abs().max())), (why, key)


GRID = [
    (name, size)
    for size in (1, 2, 3)
    for name in (*NAMES, "server")
    # Asynchronous ones promise it for one worker only.
    if (size == 1) == (name.startswith("ps-") or (name == "ddp" and size == 1))
]


@pytest.mark.parametrize(("name", "size"), GRID)
def test_every_habit_is_one_device_s(name: str, size: int) -> None:
    strategy = SERVER if name == "server" else name
    start, wanted = make(), expected()

    def be_rank(comm: Any) -> None:
        for weighs, habits in ((False, HABITS), (True, WEIGHED)):
            for habit in habits:
                if name == "server" and habit in LEAVES:
                    continue
                model = copy.deepcopy(start)
                model, (one, two) = rd.prepare(model, divided(model), strategy=strategy, comm=comm)
                assert (type(one).__name__, type(two).__name__) == ("Ortho", "AdamW")
                train(Ranks(model, comm, weighs=weighs), habit, one, two)
                why = f"{habit.__name__}, {weighs=}"
                assert_close(rd.full_state_dict(model), wanted[habit.__name__], why)
                rd.unprepare(model)

    rd.run(be_rank, size, "threads")


def pair(model: Any) -> tuple[Any, Any]:
    """Two of one kind."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return (torch.optim.AdamW(trained[::2], lr=0.01), torch.optim.AdamW(trained[1::2], lr=0.01))


def alone(model: Any) -> Any:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_of_a_kind_are_one_to_the_bit(precision: str) -> None:
    """Steps that overflow are skipped by both, and the loss scale is that of one."""
    start = make().float()
    start.norm = nn.LayerNorm(4)
    names = ["ddp", "zero1", "zero2", "zero3", "ps"]
    kind = rd.Precision(compute=torch.float16, loss_scale=2.0**20, growth_interval=2)

    def run(comm: Any, name: str, optimizers: Callable[[Any], Any]) -> tuple[Any, ...]:
        model = copy.deepcopy(start)
        given = kind if precision == "fp16" else precision
        model, own = rd.prepare(model, optimizers(model), strategy=name, comm=comm, precision=given)
        listed = own if isinstance(own, tuple) else (own,)
        for x in [*batches(), *batches()]:
            mine = x.float().tensor_split(comm.size)[comm.rank]
            listed[0].scale(model(mine).square().mean()).backward()
            for one in listed:
                one.clip_grad_value_(0.02)
            for one in reversed(listed):
                one.step()
            for one in listed:
                one.zero_grad()
        skipped = listed[0].run.setup.scaler.skipped if precision == "fp16" else 0
        state = {key: one.clone() for key, one in rd.full_state_dict(model).items()}
        steps = listed[0].run.steps
        rd.unprepare(model)
        return state, skipped, steps

    def be_rank(comm: Any) -> None:
        for name in names:
            (one, *counts), (two, *same) = run(comm, name, alone), run(comm, name, pair)
            assert counts == same, name
            assert counts[1] == 2 * STEPS
            assert counts[0] > 0 or precision == "bf16"
            assert all(torch.equal(one[key], two[key]) for key in one), name

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "ps-async"])
def test_states_go_to_another_strategy_and_back(name: str, tmp_path: Any) -> None:
    start, size = make(), 1 if name == "ps-async" else 2
    model = copy.deepcopy(start)
    train(Plain(model), both, *(device := divided(model)))
    wanted = [copy.deepcopy(one.state_dict()) for one in device]
    train(Plain(model), both, *device)

    def be_rank(comm: Any) -> None:
        mine = copy.deepcopy(start)
        mine, own = rd.prepare(mine, list(divided(mine)), strategy=name, comm=comm)
        assert isinstance(own, list)
        train(Ranks(mine, comm, weighs=False), both, *own)
        states = [one.state_dict() for one in own]
        for found, one in zip(states, wanted, strict=True):
            assert found["param_groups"][0]["params"] == one["param_groups"][0]["params"]
            for at, kept in one["state"].items():
                assert_close(found["state"][at], kept, "state")
        rd.save(tmp_path / name, mine, own)
        with pytest.raises(InvalidArgumentError, match="all of them in their order"):
            rd.save(tmp_path / name, mine, own[::-1])
        again = copy.deepcopy(start)
        again, (one, two) = rd.prepare(again, divided(again), strategy="zero1", comm=comm)
        rd.load(tmp_path / name, again, (one, two))
        two.load_state_dict(states[1])  # each by itself; the other's stays
        train(Ranks(again, comm, weighs=False), both, one, two)
        assert_close(rd.full_state_dict(again), model.state_dict(), "went on")
        plain, back = rd.unprepare(mine)
        assert isinstance(back, list)
        assert [type(one).__name__ for one in back] == ["Ortho", "AdamW"]
        assert back[0].param_groups[1]["params"][0] is plain.layers[1].weight

    rd.run(be_rank, size, "threads")


def test_what_can_t_be_is_refused_on_all_ranks() -> None:
    start = make()

    def be_rank(comm: Any) -> None:
        model = copy.deepcopy(start)
        refused: list[tuple[Any, str]] = [
            ((alone(model), alone(model)), "unused is in two optimizers, numbers 0 and 1"),
            ((), "got none"),
            ((alone(model), "SGD"), "not str"),
            (divided(model)[:1], "does not have the trainable parameters unused"),
        ]
        for wrong, told in refused:
            with pytest.raises(InvalidArgumentError, match=told):
                rd.prepare(model, wrong, strategy="ddp", comm=comm)

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("name", ["ddp", "zero2", "ps", "server"])
def test_ranks_that_step_different_optimizers_are_told_so(name: str) -> None:
    start, strategy = make(), SERVER if name == "server" else name

    def be_rank(comm: Any) -> None:
        model = copy.deepcopy(start)
        model, (one, two) = rd.prepare(model, divided(model), strategy=strategy, comm=comm)
        at = Ranks(model, comm, weighs=True)
        at.add(batches()[0])
        with pytest.raises(InvalidArgumentError, match="weights would count passes"):
            one.zero_grad()
        two.zero_grad()
        one.zero_grad()
        at.backward(batches()[0])
        with pytest.raises(CollectiveMismatch, match=r"different (optimizers|calls)"):
            (two if comm.rank else one).step()
            model.zero_grad()
            at.backward(batches()[0])

    rd.run(be_rank, 2, "threads")


class Gan(nn.Module):  # type: ignore[misc, name-defined]
    """Both in one model."""

    def __init__(self, made: Any, judged: Any) -> None:
        super().__init__()
        self.made, self.judged = made, judged

    def forward(self, x: Any) -> Any:
        return self.judged(self.made(x))


def play(made: Any, judged: Any, whole: Any, one: Any, two: Any, backward: Any) -> None:
    """Steps of a GAN: the judge on what is detached, then the maker through a frozen judge."""
    for x in batches():
        two.zero_grad()
        backward(lambda x: judged(made(x).detach()).square() + (1 - judged(x)).square(), x)
        two.step()
        one.zero_grad()
        judged.requires_grad_(requires_grad=False)
        backward(lambda x: (1 - whole(x)).square(), x)
        one.step()
        judged.requires_grad_(requires_grad=True)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "ps"])
def test_gans_as_one_model_or_two(name: str, size: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        start = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, out)).double()
                 for out in (4, 1)]  # fmt: skip
    lone = copy.deepcopy(start)
    adam = [torch.optim.Adam(one.parameters(), lr=0.01) for one in lone]
    play(lone[0], lone[1], Gan(*lone), adam[0], adam[1], lambda loss, x: loss(x).mean().backward())
    wanted = [one.state_dict() for one in lone]

    def be_rank(comm: Any) -> None:
        def weighed(loss: Any, x: Any) -> None:
            mine = x.tensor_split(comm.size)[comm.rank]
            rd.backward(loss(mine).sum(), weight=len(mine))

        def evenly(loss: Any, x: Any) -> None:
            loss(x.tensor_split(comm.size)[comm.rank]).mean().backward()

        mine = copy.deepcopy(start)
        own = [torch.optim.Adam(one.parameters(), lr=0.01) for one in mine]
        for model, optimizer in zip(mine, own, strict=True):
            rd.prepare(model, optimizer, strategy=name, comm=comm)
        play(mine[0], mine[1], lambda x: mine[1](mine[0](x)), own[0], own[1], weighed)
        for model, one in zip(mine, wanted, strict=True):
            assert_close(rd.full_state_dict(model), one, "two models")
        mine = copy.deepcopy(start)
        gan = Gan(*mine)
        gan, (one, two) = rd.prepare(
            gan, tuple(torch.optim.Adam(one.parameters(), lr=0.01) for one in mine),
            strategy=name, comm=comm,
        )  # fmt: skip
        play(mine[0], mine[1], gan, one, two, evenly)
        found = rd.full_state_dict(gan)
        for part, each in zip(("made", "judged"), wanted, strict=True):
            assert_close({key: found[f"{part}.{key}"] for key in each}, each, "one model")

    rd.run(be_rank, size, "threads")


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "ps", "server", "ps-async", "ps-ssp"])
def test_a_graph_outlives_the_step_of_another_optimizer(strategy: str) -> None:
    """A GAN in one model: the generator's graph is used after the discriminator has stepped."""
    rows = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)
    start = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5)).double()
        for _ in range(2)
    )

    def train(comm: Any) -> Any:
        model: Any = copy.deepcopy(start)
        own: Any = [torch.optim.Adam(part.parameters(), lr=0.01) for part in model]
        if comm is not None:
            kind = rd.ParameterServer(update="server") if strategy == "server" else strategy
            model, own = rd.prepare(model, own, strategy=kind, comm=comm)
        for _ in range(2):
            fake = model[0](rows)
            for part in (1, 0):
                for one in own:
                    one.zero_grad()
                model[1](fake.detach() if part else fake).square().mean().backward()
                own[part].step()
        return model.state_dict() if comm is None else rd.full_state_dict(model)

    expected = train(None)
    size = 1 if strategy in ("ps-async", "ps-ssp") else 2
    for found in rd.run(train, size, "threads"):
        for name, one in found.items():
            assert torch.allclose(one, expected[name], rtol=1e-12), name
