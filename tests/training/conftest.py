"""Models and data that are small and awkward: odd sizes, shared, unused and frozen parameters."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from roundelay.training.checkpoint import save as checkpoint  # noqa: E402 - only with torch

nn = torch.nn

#: Thread ranks share torch's random numbers, whose lock and Python's may hold up each other.
_building = threading.Lock()

SIZES = (1, 2, 3, 4, 7)
ROWS = 21  # divides by 1, 3 and 7, and by 2 and 4 not
EVEN_ROWS = 12  # of models of blocks: divides by 1, 2, 3 and 4


class Awkward(nn.Module):  # type: ignore[misc, name-defined]
    """Odd sizes, a shared matrix, a frozen one, one nobody uses and one that few rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)])
        self.norm = nn.LayerNorm(5)
        self.unused = nn.Linear(3, 3)
        self.seldom = nn.Parameter(torch.full((3,), 0.5))
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(requires_grad=False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight  # shared

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.norm(x + self.frozen(x))
        few = tokens == 0
        if bool(few.any()):  # other ranks don't use it in this step
            x = torch.where(few[:, None], x * self.seldom.sum(), x)
        return self.head(x)


def loss_of(model: Any, tokens: Any, targets: Any) -> Any:
    """The mean over rows."""
    return nn.functional.cross_entropy(model(tokens), targets)


def make_model(dtype: Any = torch.float64) -> Any:
    """The same weights every time, and nobody's random numbers disturbed."""
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Awkward().to(dtype)


def make_batches(steps: int = 10) -> list[tuple[Any, Any]]:
    """Tokens and targets; the first row of every other batch is the seldom one."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for step in range(steps):
        tokens = torch.randint(1, 11, (ROWS,), generator=generator)
        if step % 2:
            tokens[0] = 0
        batches.append((tokens, torch.randint(0, 11, (ROWS,), generator=generator)))
    return batches


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=1e-2)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    yield
    checkpoint.DISK.before = None
    torch.autograd.set_detect_anomaly(False)  # which thread ranks may leave on: each restores


class Late:
    """A communicator whose every call comes a random moment late, other on every rank."""

    def __init__(self, comm: Any, seed: int) -> None:
        self._comm, self._random = comm, random.Random(f"{seed} {comm.rank}")

    def delay(self) -> None:
        time.sleep(self._random.choice([0, 0, 0.001, 0.003]))


def make_late(comm: Any, seed: int) -> Any:
    """Put a delay before everything that a communicator's engine is asked to do."""
    late, engine = Late(comm, seed), comm._engine

    def slow(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            late.delay()
            return own(*args, **options)

        return call

    for name in ("run", "begin", "post"):
        setattr(engine, name, slow(getattr(engine, name)))
    make = engine.group
    comm._fast_path = slow(comm._fast_path)

    def group(ranks: Any) -> Any:
        made = make(ranks)
        if made is not None:
            for name in ("run", "begin", "post"):
                setattr(made, name, slow(getattr(made, name)))
        return made

    engine.group = group
    return comm


@pytest.fixture
def awkward() -> Any:
    """Everything of this file, in one handful."""

    class Hand:
        model = staticmethod(make_model)
        batches = staticmethod(make_batches)
        loss = staticmethod(loss_of)
        adam = staticmethod(adam)
        late = staticmethod(make_late)
        copy = staticmethod(copy.deepcopy)
        sizes = SIZES

    return Hand


class Block(nn.Module):  # type: ignore[misc, name-defined]
    """A residual block, of odd width inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def inner(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


class Stack(nn.Module):  # type: ignore[misc, name-defined]
    """A first and a last layer around blocks; `way` says how the blocks are called."""

    def __init__(self, width: int = 6, layers: int = 3, way: str = "plain") -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.last = nn.Linear(width, 3)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        run = {
            "plain": self.plain, "each": self.each, "pairs": self.pairs, "inside": self.inside,
            "twice": self.twice, "direct": self.direct,
        }[self.way]  # fmt: skip
        return self.last(run(x))

    def plain(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x

    def each(self, x: Any) -> Any:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x

    def pairs(self, x: Any) -> Any:
        def both(y: Any) -> Any:
            return self.blocks[1](self.blocks[0](y))

        return self.blocks[2](torch.utils.checkpoint.checkpoint(both, x, use_reentrant=False))

    def inside(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block.inner, x, use_reentrant=False)
        return x

    def twice(self, x: Any) -> Any:
        return self.plain(torch.sin(self.plain(x)))

    def direct(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(x))) + block.norm.bias
            x = block.norm(x)
        return x


def made(kind: Callable[[], Any], dtype: Any = torch.float32) -> Any:
    """The same weights every time, and nobody's random numbers disturbed."""
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return kind().to(dtype)


def batch_of(step: int, dtype: Any = torch.float32) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(EVEN_ROWS, 4, generator=generator).to(dtype),
            torch.randn(EVEN_ROWS, 3, generator=generator).to(dtype))  # fmt: skip


def loss_on(comm: Any, model: Any, step: int, dtype: Any = torch.float32) -> Any:
    x, y = (part.tensor_split(comm.size)[comm.rank] for part in batch_of(step, dtype))
    return (model(x) - y).square().mean()


def adam_of(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def trained(
    name: Any, size: int, model: Any, *, optimizer: Any = adam_of, steps: int = 3,
    train: Any = None, precision: str = "fp32",
) -> list[dict[str, Any]]:  # fmt: skip
    """Train copies of a model, and return every rank's whole state."""

    def be_rank(comm: Any) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, optimizer(mine), strategy=name, comm=comm, precision=precision)
        for step in range(steps):
            if train is not None:
                train(comm, mine, own, step)
            else:
                own.scale(loss_on(comm, mine, step)).backward()
            own.step()
            own.zero_grad()
        return {key: one.detach().clone().numpy() for key, one in rd.full_state_dict(mine).items()}

    return rd.run(be_rank, size, "threads")


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert (one[key] == other[key]).all(), key


class Gained(Stack):
    """Also has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.gain


class Alone:
    """Stands in for a communicator of one rank."""

    rank, size = 0, 1


def wide() -> Any:
    """Large enough that padding does not matter; all in units, none in the model itself."""
    return nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 64))


@pytest.fixture
def stacks() -> Any:
    """Models of blocks, and what trains them."""

    class Hand:
        Stack, Gained, Block, Alone = Stack, Gained, Block, Alone
        make, wide = staticmethod(made), staticmethod(wide)
        batch_of, loss_on = staticmethod(batch_of), staticmethod(loss_on)
        adam, trained = staticmethod(adam_of), staticmethod(trained)
        assert_same = staticmethod(assert_same)

    return Hand
