"""A step of a pipeline is taken by all ranks, replicas too, or by none; then the next one is right.

Each world has many cases, one after the other: what one of them left behind would show in the next.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, RankFailed

torch = pytest.importorskip("torch")
nn = torch.nn

ROWS = 8
RATE = 0.1
EXACT = 1e-12
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "ps"]
mse = nn.functional.mse_loss
_building = threading.Lock()


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """Four layers, of which the first and the last may share their weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6).double() for _ in range(4))
        if tied:
            self.d.weight = self.a.weight

    def forward(self, x: Any) -> Any:
        return self.d(self.c(self.b(self.a(x))))


class Trouble:
    """Has one layer raise an error on one rank, at one micro-batch, forward or backward."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.when = pipe, (-1, False)
        layer = next(each for each in pipe.modules() if isinstance(each, nn.Linear))
        layer.register_forward_hook(self._look)

    def _look(self, _: Any, __: Any, output: Any) -> None:
        micro_batch, back = self.when
        if self.pipe.micro_batch != micro_batch:
            return
        if back and output.requires_grad:
            output.register_hook(self._raise)
        elif not back:
            self._raise()

    def _raise(self, *_: Any) -> None:
        self.when = -1, False
        raise ZeroDivisionError("no such luck")


class World:
    """A prepared pipeline on one rank of dp=2, pp=2, beside one device that does the same."""

    def __init__(self, comm: rd.Communicator, model: Any, strategy: str, **options: Any) -> None:
        comm.timeout = 10
        self.comm, self.mesh = comm, rd.Mesh(dp=2, pp=2, comm=comm)
        with _building:
            mine, self.whole = copy.deepcopy(model), copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=self.mesh["pp"], micro_batches=2, loss=mse, **options)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
        self.pipe, self.optimizer = rd.prepare(pipe, optimizer, mesh=self.mesh, strategy=strategy)
        self.alone = torch.optim.SGD(self.whole.parameters(), lr=RATE)
        self._made = torch.Generator().manual_seed(1)

    def batch(self) -> Any:
        """Return another batch of all rows."""
        shape = 2, ROWS, 6
        return torch.randn(shape, generator=self._made, dtype=torch.float64).unbind()

    def mine(self, batch: Any) -> Any:
        """Return this replica's rows of it."""
        return [each.chunk(2)[self.mesh.place["dp"]] for each in batch]

    def step(self) -> None:
        """Take a step that must be right."""
        batch = self.batch()
        self.alone.zero_grad()
        mse(self.whole(batch[0]), batch[1]).backward()
        self.alone.step()
        self.optimizer.zero_grad()
        self.pipe.step(*self.mine(batch))
        self.optimizer.step()

    def check(self) -> None:
        """See that the weights are those of one device."""
        right = self.whole.state_dict()
        for name, value in rd.full_state_dict(self.pipe).items():
            assert float((value - right[name]).abs().max()) <= EXACT, name

    def refused(self, call: Callable[[], Any]) -> Exception:
        """Return what this rank raises, and see that all ranks raise something."""
        caught: Exception | None = None
        try:
            call()
        except Exception as error:  # noqa: BLE001 - which one, its caller asserts
            caught = error
        assert all(self.comm.all_gather_object(caught is not None))
        assert caught is not None
        return caught


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("word", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_error_in_one_replica_reaches_all_and_they_go_on(
    strategy: str, word: str, *, tied: bool
) -> None:
    """Wherever it is raised: on each rank, at each micro-batch, forward and backward."""
    model = Net(tied=tied)
    both = (True,) if strategy == "zero3" else (False, True)  # forward, zero3 has to end
    if strategy == "zero3" and word == "zb-h1":
        pytest.skip("the first half of backward is no pass that ranks end together")

    def body(comm: rd.Communicator) -> None:
        world = World(comm, model, strategy, schedule=word)
        trouble = Trouble(world.pipe)
        world.step()
        for rank in range(comm.size):
            for when in [(at, back) for at in range(2) for back in both]:
                if comm.rank == rank:
                    trouble.when = when
                error = world.refused(lambda: world.pipe.step(*world.mine(world.batch())))
                assert isinstance(error, ZeroDivisionError if comm.rank == rank else RankFailed)
                assert "no such luck" in str(error)
                if isinstance(error, RankFailed):
                    assert error.rank == rank
                with pytest.raises(InvalidArgumentError, match="zero_grad"):
                    world.optimizer.step()
                world.step()
        world.check()

    rd.run(body, 4, "threads")


class Units(nn.Module):  # type: ignore[misc, name-defined]
    """A block of two layers that come and go by themselves under zero3."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()

    def forward(self, x: Any) -> Any:
        return x + self.both(x)


@pytest.mark.parametrize("word", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_under_zero3_a_forward_that_raises_is_told_on_all_ranks(word: str, rank: int) -> None:
    """Units that others still need come no more, so that the job is over; nobody waits."""
    with _building:
        model = nn.Sequential(*(Units() for _ in range(4)))
    for micro_batch in range(2):
        told: dict[int, Exception] = {}

        def body(comm: rd.Communicator, at: int, told: dict[int, Exception]) -> None:
            world = World(comm, model, "zero3", schedule=word)
            trouble = Trouble(world.pipe)
            world.step()
            if comm.rank == rank:
                trouble.when = at, False
            try:
                world.pipe.step(*world.mine(world.batch()))
            except (ZeroDivisionError, RankFailed, CollectiveMismatch) as error:
                told[comm.rank] = error

        rd.run(body, 4, "threads", args=(micro_batch, told))
        assert sorted(told) == [0, 1, 2, 3]
        assert isinstance(told.pop(rank), ZeroDivisionError)
        assert all(isinstance(one, RankFailed | CollectiveMismatch) for one in told.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_that_one_replica_can_not_take_is_refused_on_all(strategy: str) -> None:
    """Nothing is computed, and the next batch is right."""
    model = Net()

    def body(comm: rd.Communicator) -> None:
        world = World(comm, model, strategy)
        for replica in range(2):
            odd = world.mesh.place["dp"] == replica
            for rows, target in ((3, 3), (2, 4)):
                x, y = (torch.ones(n if odd else 4, 6).double() for n in (rows, target))
                error = world.refused(partial(world.pipe.step, x, y))
                assert isinstance(error, InvalidArgumentError if odd else CollectiveMismatch)
                assert "rows" in str(error)
            world.step()
        world.check()

    rd.run(body, 4, "threads")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_one_replica_alone_has_frozen_is_refused_on_all(strategy: str) -> None:
    """One parameter of a stage, or all of them; nothing is computed, and the next step is right."""
    model = Net()

    def body(comm: rd.Communicator) -> None:
        world = World(comm, model, strategy)
        for rank in range(comm.size):
            for count in (1, 4):
                some = [*world.pipe.parameters()][:count] if comm.rank == rank else []
                for each in some:
                    each.requires_grad = False
                error = world.refused(lambda: world.pipe.step(*world.mine(world.batch())))
                assert isinstance(error, CollectiveMismatch)
                assert f"frozen on rank {rank} and not on rank {(rank + 2) % 4}" in str(error)
                for each in some:
                    each.requires_grad = True
                world.step()
        world.check()

    rd.run(body, 4, "threads")


def test_gradients_that_differ_in_one_stage_are_told_to_all_stages() -> None:
    """A rank writes into a parameter: its replicas find out, and the other stages hear of it."""
    model = Net()

    def body(comm: rd.Communicator) -> None:
        world = World(comm, model, "ddp")
        world.step()
        if comm.rank == 2:
            with torch.no_grad():
                world.pipe.get_parameter("a.weight").add_(1)
        error = world.refused(lambda: world.pipe.step(*world.mine(world.batch())))
        assert isinstance(error, CollectiveMismatch)
        assert "a.weight" in str(error)

    rd.run(body, 4, "threads")


def plain(comm: rd.Communicator, model: Any, loss: Any = mse, *, prepared: bool) -> Any:
    """Return a pipeline over all ranks, and its optimizer."""
    mesh = rd.Mesh(pp=comm.size, comm=comm)
    with _building:
        mine = copy.deepcopy(model)
    pipe = rd.Pipeline(mine, comm=mesh["pp"], micro_batches=2, loss=loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
    return rd.prepare(pipe, optimizer, mesh=mesh) if prepared else (pipe, optimizer)


@contextlib.contextmanager
def told_on_all(comm: rd.Communicator, kinds: Any, said: str) -> Iterator[None]:
    comm.timeout = 10
    with pytest.raises(kinds, match=said):
        yield
    comm.barrier()


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_loss_without_a_gradient_is_refused(size: int, *, prepared: bool) -> None:
    model, x = Net(), torch.ones(4, 6).double()
    losses: dict[str, Any] = {
        "detached": lambda out, y: mse(out, y).detach(), "constant": lambda *_: torch.tensor(1.0),
        "integer": lambda out, y: (out - y).long().sum(), "of the target": lambda _, y: y.mean(),
    }  # fmt: skip

    def body(comm: rd.Communicator) -> None:
        for loss in losses.values():
            pipe, _ = plain(comm, model, loss, prepared=prepared)
            with told_on_all(comm, (InvalidArgumentError, RankFailed), "has no gradient"):
                pipe.step(x, x)
            pipe.evaluate(x, x)
        pipe, _ = plain(comm, model, prepared=prepared)
        with torch.inference_mode():
            with told_on_all(comm, InvalidArgumentError, "inference_mode"):
                pipe.step(x, x)
            pipe.evaluate(x, x)
            pipe(x)
        with torch.no_grad():  # which step is not held to
            pipe.step(x, x)
        assert all(each.grad is not None for each in pipe.parameters())
        for each in pipe.parameters():
            each.requires_grad = False
        with told_on_all(comm, (InvalidArgumentError, RankFailed), "has no gradient"):
            pipe.step(x, x)

    rd.run(body, size, "threads")


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("size", [2, 3])
def test_rows_that_differ_between_stages_are_refused(size: int, *, prepared: bool) -> None:
    """In every step: of x, and of the target; ranks that need none may pass None."""
    with _building:
        model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(3)))
    x = torch.randn(4, 700, generator=torch.Generator().manual_seed(0))

    def body(comm: rd.Communicator) -> None:
        pipe, optimizer = plain(comm, model, prepared=prepared)
        for call in (pipe.step, pipe.evaluate):
            for _ in range(2):
                for rank in range(1, comm.size):
                    others = x.flip(0) if comm.rank == rank else x
                    for batch, what in (((others, x), "x"), ((x, others), "target")):
                        with told_on_all(comm, CollectiveMismatch, f"{what} has other rows"):
                            call(*batch)
                optimizer.zero_grad()
                call(x, x)
        ends = x if comm.rank == 0 else None, x if comm.rank == comm.size - 1 else None
        pipe.evaluate(*ends)

    rd.run(body, size, "threads")


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("call", ["step", "evaluate", "forward"])
def test_pipelines_that_look_alike_are_not_mixed_up(call: str, *, prepared: bool) -> None:
    model, x = Net(), torch.ones(4, 6).double()

    def body(comm: rd.Communicator) -> None:
        pipes = [plain(comm, model, prepared=prepared)[0] for _ in range(2)]

        def run(pipe: Any) -> Any:
            return pipe(x) if call == "forward" else getattr(pipe, call)(x, x)

        for at in (0, 1):
            with told_on_all(comm, CollectiveMismatch, "calls number 1, and rank 1 number 2"
                             if not at else "calls number 2, and rank 1 number 1"):  # fmt: skip
                run(pipes[at if comm.rank == 0 else 1 - at])
        for pipe in pipes:
            run(pipe)

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("word", ["1f1b", "zb-h1"])
def test_what_stages_share_may_be_frozen_and_unfrozen(word: str, strategy: str) -> None:
    """On all ranks that have it; on one alone it is refused on all."""
    model = Net(tied=True)

    def body(comm: rd.Communicator) -> None:
        world = World(comm, model, strategy, schedule=word)
        shared = [each for name, each in world.pipe.named_parameters()
                  if name in ("a.weight", "d.weight")]  # fmt: skip
        for frozen in (False, True, False, True):
            for each in (*shared, world.whole.a.weight):
                each.requires_grad_(not frozen)
            world.step()
        world.check()
        if world.mesh.place["pp"] == 1:
            shared[0].requires_grad = True
        error = world.refused(lambda: world.pipe.step(*world.mine(world.batch())))
        assert isinstance(error, CollectiveMismatch)
        assert "has frozen it" in str(error)

    rd.run(body, 4, "threads")
