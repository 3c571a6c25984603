"""Under ZeRO-3 backward finds every weight, however it is reached; ranks that differ are told."""

from __future__ import annotations

import copy
import importlib
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, RankFailed  # noqa: E402

nn = torch.nn
checkpoint = torch.utils.checkpoint.checkpoint

WIDTH = 6


class Block(nn.Module):  # type: ignore[misc, name-defined]
    """Has a side loss, of activations and weights, that leaves it by `side`; a weight is unused."""

    def __init__(self, side: Callable[[Any], None]) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 13),
            nn.Linear(13, WIDTH),
        )
        self.head = nn.Linear(WIDTH, 2)
        self.unused = nn.Parameter(torch.ones(3))
        self.side = side

    def forward(self, x: Any) -> Any:
        y = x + self.down(torch.tanh(self.up(self.norm(x))))
        penalty = self.up.weight.square().sum() + (self.down.weight.T @ self.down.weight).sum()
        self.side(self.head(y).square().mean() + 1e-3 * penalty)
        return y


class Stack(nn.Module):  # type: ignore[misc, name-defined]
    """Blocks that are called in some way, and what they left by the side."""

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.kept: Any = UserDict(left=[])
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(self.keep) for _ in range(4))
        self.call = call

    def keep(self, tensor: Any) -> None:
        self.kept["left"].append(tensor)

    def forward(self, x: Any) -> Any:
        self.kept["left"].clear()
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)


def hooked(pack: Any, unpack: Any) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def with_context(make: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    def call(block: Any, x: Any) -> Any:
        with make():
            return block(x)

    return call


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "plainly": lambda block, x: block(x),
    "twice": lambda block, x: block(block(x)),
    "checkpointed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "parts": lambda block, x: checkpoint(
        lambda y: y + block.down(torch.tanh(block.up(y))), x, use_reentrant=False
    ),
    "saved elsewhere": with_context(torch.autograd.graph.save_on_cpu),
    "hooks of their own": with_context(lambda: hooked(lambda t: t.detach(), lambda t: t)),
}


def output_alone(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def side_alone(model: Any, x: Any) -> Any:
    model(x)
    return sum(model.kept["left"])


def both(model: Any, x: Any) -> Any:
    return model(x).square().mean() + sum(model.kept["left"])


def gradient_penalty(model: Any, x: Any) -> Any:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().sum() + both(model, x)


def features(model: Any, x: Any) -> Any:
    """Take what a hook saw in the middle, as deep supervision and distillation do."""

    @dataclass
    class Seen:
        tensor: Any

    seen: list[Seen] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: seen.append(Seen(out)))
        for block in model.blocks
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return sum(one.tensor.square().mean() for one in seen[:-1])


def backward_twice(model: Any, x: Any) -> Any:
    loss = both(model, x)
    loss.backward(retain_graph=True)
    return loss


LOSSES = (output_alone, side_alone, both, gradient_penalty, features, backward_twice)
#: Where blocks are not called whole, or give gradients to what they return alone.
FEWER = {"parts": (output_alone, gradient_penalty, backward_twice), "reentrant": (output_alone,)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_zero3_is_ddp_however_backward_comes_to_a_unit(stacks: Any, call: str, size: int) -> None:
    model = stacks.make(lambda: Stack(CALLS[call]), torch.float64)
    for block in model.blocks:
        object.__setattr__(block, "side", model.keep)

    def be_rank(comm: Any, strategy: str, loss: Any) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        for block in mine.blocks:
            block.side = mine.keep
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy=strategy, comm=comm)
        for step in range(2):
            x, _ = (
                part.tensor_split(size)[comm.rank] for part in stacks.batch_of(step, torch.float64)
            )
            x.requires_grad_(call == "reentrant")
            loss(mine, x).backward()
            own.step()
            own.zero_grad()
        if strategy == "zero3":
            own_bytes, *units = (one.nbytes for one in own.run.state.partition.units)
            # Nothing tells when side losses are done with a unit: one more may stay.
            assert own.run.state.peak <= own_bytes + 3 * max(units)
            assert own.run.state.partition.scheduler.in_flight == 0
        return {key: one.detach().numpy() for key, one in rd.full_state_dict(mine).items()}

    for loss in FEWER.get(call, LOSSES):
        found, expected = (
            rd.run(be_rank, size, "threads", (name, loss)) for name in ("zero3", "ddp")
        )
        for one, other in zip(found, expected, strict=True):
            for key in other:
                assert abs(one[key] - other[key]).max() <= 1e-12, (loss.__name__, key)


def test_unused_parameters_hold_no_unit(stacks: Any) -> None:
    model = stacks.make(lambda: Stack(CALLS["plainly"]))

    def be_rank(comm: Any) -> tuple[int, list[int]]:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy="zero3", comm=comm)
        for step in range(3):
            stacks.loss_on(comm, mine, step).backward()
            own.step()
        return own.run.state.peak, [one.nbytes for one in own.run.state.partition.units]

    for peak, (own, *units) in rd.run(be_rank, 2, "threads"):
        assert peak <= own + sum(sorted(units)[-2:])


@pytest.mark.filterwarnings("default")  # the compiler has its own
@pytest.mark.parametrize("when", ["before", "after"])
def test_zero3_goes_with_the_compiler(stacks: Any, when: str) -> None:
    importlib.import_module("torch._dynamo")  # once, and not in every rank
    model = stacks.make(lambda: stacks.Stack(layers=2), torch.float64)

    def be_rank(comm: Any, strategy: str) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        optimizer = stacks.adam(mine)
        called = torch.compile(mine, backend="aot_eager") if strategy == "zero3" else mine
        prepared = called if when == "before" else mine
        _, own = rd.prepare(prepared, optimizer, strategy=strategy, comm=comm)
        for step in range(2):
            stacks.loss_on(comm, called, step, torch.float64).backward()
            own.step()
            own.zero_grad()
        whole = rd.full_state_dict(called)
        return {key.removeprefix("_orig_mod."): one.detach().numpy() for key, one in whole.items()}

    found = rd.run(be_rank, 2, "shared_memory", ("zero3",))
    expected = rd.run(be_rank, 2, "threads", ("ddp",))  # not compiled
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(abs(one[key] - other[key]).max() <= 1e-12 for key in other)


# ---- what is refused


def test_weights_that_changed_since_forward_are_refused(stacks: Any) -> None:
    model = stacks.make(stacks.Stack)

    def be_rank(comm: Any) -> str:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy="zero3", comm=comm)
        old = stacks.loss_on(comm, mine, 0)
        stacks.loss_on(comm, mine, 1).backward()
        own.step()
        own.zero_grad()
        with pytest.raises(InvalidArgumentError) as error:
            old.backward()
        return str(error.value)

    for told in rd.run(be_rank, 2, "threads"):
        assert "changed since" in told
        assert "unit" in told


def test_activations_that_changed_in_place_are_refused_as_by_torch(stacks: Any) -> None:
    class Careless(Block):
        def forward(self, x: Any) -> Any:
            y = torch.tanh(self.up(torch.cat([x, x[:, :2]], 1)))
            z = self.down(y)
            with torch.no_grad():
                y.mul_(2)
            return z

    model = stacks.make(lambda: nn.Sequential(Careless(lambda _: None), nn.Linear(WIDTH, 3)))

    def be_rank(comm: Any, strategy: str) -> bool:
        mine = copy.deepcopy(model)
        mine, _ = rd.prepare(mine, stacks.adam(mine), strategy=strategy, comm=comm)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stacks.loss_on(comm, mine, 0).backward()
        return True

    for strategy in ("ddp", "zero3"):
        assert all(rd.run(be_rank, 2, "threads", (strategy,)))


def choose_by_rank(comm: Any, experts: Any, x: Any) -> Any:
    return experts[comm.rank % len(experts)](x)


def skip_by_rank(comm: Any, experts: Any, x: Any) -> Any:
    for at, one in enumerate(experts):
        x = x if at == comm.rank else one(x)
    return x


@pytest.mark.parametrize("engine", ["threads", "gloo"])
@pytest.mark.parametrize("route", [choose_by_rank, skip_by_rank])
def test_ranks_that_call_different_units_are_told_which(route: Any, engine: str) -> None:
    class Experts(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, comm: Any) -> None:
            super().__init__()
            self.comm = comm
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Any) -> Any:
            return route(self.comm, self.experts, x)

    def be_rank(comm: Any) -> None:
        model = Experts(comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(model, optimizer, strategy="zero3", comm=comm)
        model(torch.ones(2, 4)).sum().backward()

    with pytest.raises((CollectiveMismatch, RankFailed)) as error:
        rd.run(be_rank, 2, engine, timeout=20)
    for word in (
        "CollectiveMismatch",
        "unit 'experts.0'",
        "unit 'experts.1'",
        "test_zero_saved.py",
    ):
        assert word in f"{type(error.value).__name__} {error.value}"


@pytest.mark.parametrize("held", ["nothing", "a view", "a storage", "numbers"])
def test_units_come_to_memory_that_nobody_holds(stacks: Any, held: str) -> None:
    """Rows are used again, but never under somebody who looks at an old one."""
    take: dict[str, Callable[[Any], Any]] = {
        "nothing": lambda _: None,
        "a view": lambda weight: weight.detach()[1:],
        "a storage": lambda weight: weight.untyped_storage(),
        "numbers": lambda weight: weight.detach().numpy(),
    }

    def list_of(one: Any) -> Any:
        return one.tolist()

    def be_rank(comm: Any) -> tuple[bool, int]:
        mine = stacks.make(stacks.Stack)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy="zero3", comm=comm)
        places: list[int] = []
        found: list[tuple[Any, list[float]]] = []

        def look(block: Any, _: Any) -> None:
            weight = next(block.parameters())
            places.append(weight.untyped_storage().data_ptr())
            one = take[held](weight)
            if one is not None and len(found) < 3:
                found.append((one, list_of(one)))

        for block in mine.blocks:
            block.register_forward_pre_hook(look)
        with torch.inference_mode():  # whose tensors are of no use to others
            mine(torch.ones(2, 4))
        found.clear()
        for step in range(4):
            places.clear()
            stacks.loss_on(comm, mine, step).backward()
            own.step()
            own.zero_grad()
        assert len(found) == (0 if held == "nothing" else 3)
        for one, before in found:
            assert list_of(one) == before
        return len(set(places)) < len(places), len(own.run.state.partition.scheduler.row_pool.rows)

    for again, left in rd.run(be_rank, 2, "threads"):
        assert again
        assert left == 0  # between steps


@pytest.mark.parametrize("size", [2, 3])
def test_transforms_of_torch_func_run_on_whole_weights_only(size: int) -> None:
    """They save what no hook sees: right inside rd.whole or with weights of one's own, or told."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)

    def of_input(model: Any) -> Any:
        return torch.func.grad(lambda rows: model(rows).square().mean())(x)

    def of_weights(model: Any, weights: Any) -> Any:
        def loss(given: Any) -> Any:
            return torch.func.functional_call(model, given, (x,)).square().mean()

        return torch.func.grad(loss)(weights)["0.weight"]

    weights = {name: one.detach().clone() for name, one in plain.named_parameters()}
    expected = [of_input(plain), of_weights(plain, weights)]

    def be_rank(comm: Any) -> list[Any]:
        mine = copy.deepcopy(plain)
        sgd = torch.optim.SGD(mine.parameters(), lr=0.1)
        mine, own = rd.prepare(mine, sgd, strategy="zero3", comm=comm)
        with pytest.raises(InvalidArgumentError, match=r"torch\.func .*with rd\.whole"):
            of_input(mine)
        with rd.whole(mine):
            found = [of_input(mine), of_weights(mine, weights)]
        found.append(of_weights(mine, weights))
        mine(x).sum().backward()  # it goes on as before
        own.step()
        return found

    for found in rd.run(be_rank, size, "threads"):
        for value, other in zip(found, [*expected, expected[1]], strict=True):
            torch.testing.assert_close(value, other, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("size", [2, 3])
def test_the_encoder_of_torch_takes_its_quick_way_in_evaluation(size: int) -> None:
    """It looks at the first layer's weights before that is called; padded rows are zeros there."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    plain = nn.TransformerEncoder(layer, 2).double()
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8)
    padding = torch.tensor([[False, False, True]] * 2)

    def evaluate(model: Any) -> Any:
        model.eval()
        with torch.no_grad():
            return model(x, src_key_padding_mask=padding)

    expected = evaluate(copy.deepcopy(plain))

    def be_rank(comm: Any) -> Any:
        mine = copy.deepcopy(plain)
        sgd = torch.optim.SGD(mine.parameters(), lr=0.1)
        mine, own = rd.prepare(mine, sgd, strategy="zero3", comm=comm)
        found = evaluate(mine)
        mine.train()(x).sum().backward()
        own.step()
        assert own.run.state.partition.scheduler.in_flight == 0
        return found

    for found in rd.run(be_rank, size, "threads"):
        assert bool((found[:, 2] == 0).all())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
