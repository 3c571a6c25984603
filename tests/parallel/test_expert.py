"""A mixture of experts on any number of ranks is the mixture on one: outputs, losses, gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from roundelay.parallel.expert import average_gradients, balance_loss  # noqa: E402 - with torch
from roundelay.parallel.expert.dispatch import planned  # noqa: E402
from roundelay.parallel.functions import counts_of  # noqa: E402
from roundelay.parallel.sharding import sharding_of  # noqa: E402

nn = torch.nn

SIZES = (1, 2, 3, 4, 8)
WIDTH, ROWS = 5, 29
#: How the rows are spread: alike, all on the last rank, or odd numbers and none on the first.
SPREADS = ("even", "one", "odd")


def drawn(seed: int, *shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Expert(nn.Module):  # type: ignore[misc, name-defined]
    """Two layers, the second of which has no bias."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7, dtype=torch.float64)
        self.down = nn.Linear(7, WIDTH, bias=False, dtype=torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(drawn(100 * seed + number, *parameter.shape))

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)))


def parts_of(experts: int, **options: Any) -> tuple[list[Any], Any]:
    router = rd.Router(WIDTH, experts, **options).double()
    with torch.no_grad():
        router.score.weight.copy_(drawn(5, experts, WIDTH))
    return [Expert(number) for number in range(experts)], router


def rows_of(size: int, spread: str) -> list[int]:
    if spread == "even":
        return counts_of(ROWS, size)
    if spread == "one" or size == 1:
        return [0] * (size - 1) + [ROWS]
    return [0, *counts_of(ROWS, size - 1)]


def alone(experts: list[Any], router: Any, x: Any) -> tuple[Any, Any, int]:
    """Say the same in the plainest words: token by token, queue by queue."""
    chances = torch.softmax(x @ router.score.weight.T, -1)
    picks = [
        sorted(range(len(experts)), key=row.__getitem__, reverse=True)[: router.top_k]
        for row in chances.tolist()
    ]
    capacity = math.inf
    if router.capacity_factor is not None:
        capacity = math.ceil(router.capacity_factor * router.top_k * len(x) / len(experts))
    waiting = [0] * len(experts)
    result = [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(len(x))]
    dropped = 0
    for choice in range(router.top_k):
        for token, picked in enumerate(picks):
            expert = picked[choice]
            waiting[expert] += 1
            if waiting[expert] > capacity:
                dropped += 1
                continue
            weight = chances[token, expert]
            if router.normalize:
                weight = weight / chances[token, picked].sum()
            result[token] = result[token] + weight * experts[expert](x[token])
    shares = torch.tensor(waiting, dtype=torch.float64) / (len(x) * router.top_k)
    loss = len(experts) * (shares * chances.mean(0)).sum()
    return torch.stack(result), loss, dropped


def grad_of(module: Any, name: str) -> Any:
    """Return a gradient; that of an expert which nobody wants is zero."""
    parameter = module.get_parameter(name)
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("factor", [None, 0.4, 1.25])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (11, 1), (9, 3), (8, 8)])
@pytest.mark.parametrize("size", SIZES)
def test_ranks_are_one_device(
    size: int, experts: int, top_k: int, factor: float | None, spread: str
) -> None:
    modules, router = parts_of(experts, top_k=top_k, capacity_factor=factor)
    x, weight = drawn(1, ROWS, WIDTH).requires_grad_(), drawn(2, ROWS, WIDTH)
    expected, balance, dropped = alone(modules, router, x)
    ((expected * weight).sum() + 3 * balance).backward()
    assert dropped if factor == 0.4 else factor or not dropped
    counts = rows_of(size, spread)

    def body(comm: rd.Communicator) -> None:
        layer: Any = rd.MoE(copy.deepcopy(modules), copy.deepcopy(router), comm)
        layer.zero_grad()
        start = sum(counts[: comm.rank])
        own = slice(start, start + counts[comm.rank])
        tokens = x.detach()[own].clone().requires_grad_()
        y = layer(tokens)
        # The sum of these losses is the loss of one device; so are the sums of gradients.
        ((y * weight[own]).sum() + 3 * layer.balance_loss / size).backward()
        close(y.detach(), expected.detach()[own])
        close(tokens.grad, x.grad[own])
        close(comm.all_reduce(layer.balance_loss.detach().reshape(1), "avg")[0], balance.detach())
        close(comm.all_reduce(layer.router.score.weight.grad), router.score.weight.grad)
        for name, parameter in layer.experts.named_parameters():
            sharding = sharding_of(parameter)
            assert sharding is not None
            assert (sharding.axis, sharding.dim) == ("ep", 0)
            grads = [grad_of(each, name) for each in modules]
            close(sharding.whole(parameter.grad), torch.stack(grads))
        assert layer.dropped == dropped
        assert int(layer.load.sum()) == ROWS * top_k

    rd.run(body, size, "threads")


@pytest.mark.parametrize("factor", [None, 0.5])
def test_without_ranks_it_is_the_same(factor: float | None) -> None:
    modules, router = parts_of(6, top_k=2, capacity_factor=factor)
    x = drawn(1, 3, 4, WIDTH)
    expected, balance, dropped = alone(modules, router, x.view(-1, WIDTH))
    layer: Any = rd.MoE(copy.deepcopy(modules), router)
    close(layer(x), expected.view(3, 4, WIDTH))
    close(layer.balance_loss, balance)
    assert layer.dropped == dropped
    assert balance_loss(nn.Sequential(layer)) == layer.balance_loss
    assert sharding_of(layer.experts.up.weight) is None
    assert layer.experts.up.weight.shape == (6, 7, WIDTH)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ties_go_to_the_first_expert(size: int) -> None:
    """Scores that are all alike, or alike in pairs: the same experts on every rank, every time."""
    modules, router = parts_of(4, top_k=2)
    with torch.no_grad():
        router.score.weight.zero_()

    def body(comm: rd.Communicator) -> None:
        layer: Any = rd.MoE(copy.deepcopy(modules), copy.deepcopy(router), comm)
        layer(drawn(comm.rank, 10, WIDTH))
        assert layer.load.tolist() == [10 * size, 10 * size, 0, 0]
        with torch.no_grad():
            layer.router.score.weight[2:] += 1.0
        layer(torch.ones(10, WIDTH, dtype=torch.float64))
        assert layer.load.tolist() == [0, 0, 10 * size, 10 * size]

    rd.run(body, size, "threads")


def test_no_tokens_anywhere() -> None:
    modules, router = parts_of(3, top_k=1, capacity_factor=1.0)

    def body(comm: rd.Communicator) -> None:
        layer: Any = rd.MoE(copy.deepcopy(modules), copy.deepcopy(router), comm)
        y = layer(torch.zeros(0, WIDTH, dtype=torch.float64))
        (y.sum() + layer.balance_loss).backward()
        assert y.shape == (0, WIDTH)
        assert layer.balance_loss.item() == 0
        assert all(not parameter.grad.any() for parameter in layer.parameters())

    rd.run(body, 3, "threads")


@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_calls_and_bytes_are_those_of_the_formula(size: int, factor: float | None) -> None:
    """Two all-to-alls there and back, two more in backward; each sends the rows that must move."""
    modules, router = parts_of(8, top_k=2, capacity_factor=factor)

    def body(comm: rd.Communicator) -> None:
        layer: Any = rd.MoE(copy.deepcopy(modules), copy.deepcopy(router), comm)
        x = drawn(comm.rank, 4 + comm.rank, WIDTH).requires_grad_()
        sent: list[list[list[int]]] = []
        plain = comm.all_to_all

        def counted(x: Any, **options: Any) -> Any:
            sent.append(options["counts"])  # rows from each rank to each
            return plain(x, **options)

        layer(x).sum().backward()  # has the memory that ranks share
        comm.all_to_all = counted  # type: ignore[method-assign]
        before = comm.traffic()
        y = layer(x)
        middle = comm.traffic()
        y.sum().backward()
        after = comm.traffic()
        assert before is not None
        assert middle is not None
        assert after is not None
        assert len(sent) == 4
        there, mine = sent[0], comm.rank
        assert sent == [there, [list(column) for column in zip(*there, strict=True)]] * 2
        assert sum(map(sum, there)) == int(layer.load.sum()) - layer.dropped
        away = sum(there[mine][rank] + there[rank][mine] for rank in range(size) if rank != mine)
        row, number = WIDTH * 8, 8  # bytes
        assert after[mine].sent - middle[mine].sent == away * row
        # Beside them, once: the counts of every rank, by choice and expert.
        told = (size - 1) * 2 * 8 * number
        assert middle[mine].sent - before[mine].sent == away * row + told

    rd.run(body, size, "threads")


@pytest.mark.parametrize("size", SIZES)
def test_steps_on_ranks_are_steps_on_one(size: int) -> None:
    """Train a router and experts, with a mean loss on every rank and gradients averaged."""
    rows = 24
    modules, router = parts_of(8, top_k=2)
    x, target = drawn(1, rows, WIDTH), drawn(2, rows, WIDTH)

    def trained(comm: rd.Communicator | None) -> Any:
        layer: Any = rd.MoE(copy.deepcopy(modules), copy.deepcopy(router), comm)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
        ranks, rank = (1, 0) if comm is None else (comm.size, comm.rank)
        own = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(layer(x[own]), target[own]) + 0.1 * layer.balance_loss
            loss.backward()
            if comm is not None:
                average_gradients(layer, comm)
            optimizer.step()
        return layer

    expected = dict(trained(None).named_parameters())

    def body(comm: rd.Communicator) -> None:
        for name, parameter in trained(comm).named_parameters():
            sharding = sharding_of(parameter)
            whole = parameter if sharding is None else sharding.whole(parameter)
            torch.testing.assert_close(
                whole.detach(), expected[name].detach(), rtol=1e-9, atol=1e-9
            )

    rd.run(body, size, "threads")


@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_second_derivative_is_one_devices(size: int, factor: float | None) -> None:
    """A penalty on gradients: of tokens, weights of the router and experts, through both ways."""
    modules, router = parts_of(6, top_k=2, capacity_factor=factor)
    x = drawn(1, 12, WIDTH)

    def penalized(layer: Any, tokens: Any, sums: Any) -> list[Any]:
        tokens = tokens.clone().requires_grad_()
        loss = (layer(tokens) ** 2).sum()
        (first,) = torch.autograd.grad(loss, tokens, create_graph=True)
        (first**2).sum().backward()
        own = layer.experts.up.weight
        cut = sharding_of(own)
        found = own.grad if cut is None else cut.whole(own.grad)
        return [tokens.grad, found, sums(layer.router.score.weight.grad)]

    alike = rd.MoE(copy.deepcopy(modules), copy.deepcopy(router))
    expected = penalized(alike, x, lambda grad: grad)

    def body(comm: rd.Communicator) -> None:
        layer = rd.MoE(copy.deepcopy(modules), copy.deepcopy(router), comm)
        own = slice(comm.rank * 12 // size, (comm.rank + 1) * 12 // size)
        tokens, *others = penalized(layer, x[own], comm.all_reduce)
        close(tokens, expected[0][own])
        for mine, right in zip(others, expected[1:], strict=True):
            close(mine, right)

    rd.run(body, size, "threads")


@pytest.mark.parametrize("shape", [(WIDTH,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_kept_between_calls_changes_nothing(shape: tuple[int, ...], dtype: Any) -> None:
    """Batches that grow and shrink, of other rows: what came before is not seen, nor written."""

    def body(comm: rd.Communicator) -> None:
        kept = []
        for step, count in enumerate((3, 40, 1, 0, 17)):
            x = drawn(step + 10 * comm.rank, count, *shape).to(dtype).requires_grad_()
            experts = (torch.arange(2 * count).view(count, 2) + step) % 5
            counts = comm.all_gather(torch.bincount(experts.reshape(-1), minlength=5))
            plan = planned(experts, None, counts, comm)
            rows = plan.scatter(x)
            ones = torch.ones(count, 2, dtype=dtype)
            kept.append((x, rows, plan.gather(rows, ones), ones))
            assert torch.equal(plan.gather([each.detach() for each in rows], ones), 2 * x)
        for x, rows, y, _ in kept:
            assert torch.equal(y, 2 * x)
            (grad,) = torch.autograd.grad(y.sum() + sum(each.sum() for each in rows), x)
            assert torch.equal(grad, torch.full_like(x, 4))

    for engine in ("threads", "shared_memory"):
        rd.run(body, 3, engine)


def test_a_factory_makes_what_a_list_has() -> None:
    """Every rank makes all experts and keeps its own: they are those of one device."""
    numbers: Sequence[int] = range(7)

    def body(comm: rd.Communicator) -> None:
        pending = iter(numbers)
        modules, router = parts_of(7)
        made = rd.MoE(lambda: Expert(next(pending)), router, comm)
        listed = rd.MoE(modules, parts_of(7)[1], comm)
        for name, parameter in made.named_parameters():
            assert torch.equal(parameter, dict(listed.named_parameters())[name])

    rd.run(body, 3, "threads")


def checkpointed(mixture: Any, x: Any, *, reentrant: bool) -> Any:
    return torch.utils.checkpoint.checkpoint(mixture, x, use_reentrant=reentrant)


WAYS: dict[str, Any] = {
    "checkpoint": lambda mixture, x: checkpointed(mixture, x, reentrant=False),
    "reentrant checkpoint": lambda mixture, x: checkpointed(mixture, x, reentrant=True),
    "compiled": lambda mixture, x: torch.compile(mixture, backend="eager")(x),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("factor", [None, 1.0])
def test_checkpointed_or_compiled_it_is_the_same(way: str, size: int, factor: float | None) -> None:
    def body(comm: rd.Communicator) -> None:
        found = []
        for call in (lambda mixture, x: mixture(x), WAYS[way]):
            mixture = rd.MoE(*parts_of(4, capacity_factor=factor), comm)
            x = drawn(comm.rank, 6, WIDTH).requires_grad_()
            output = call(mixture, x)
            output.square().sum().backward()
            found.append([output, x.grad, *(each.grad for each in mixture.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)

    rd.run(body, size, "threads")
