"""`ray.util.collective` by ROUNDELAY: every method, and groups that go wrong or come again."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgumentError,
    PeerLost,
    RendezvousError,
    RoundelayError,
)

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'roundelay[ray]'")
col: Any = pytest.importorskip("ray.util.collective")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers have no tests

RANKS = 3
OPS: dict[str, Any] = {"SUM": np.sum, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}
DTYPES = ("float64", "float32", "float16", "int64", "int32", "uint8")


class Actor:
    def __init__(self) -> None:
        rd.ray.register()
        rd.ray.register()  # which is no harm

    def make(self, size: int, rank: int, name: str = "default") -> None:
        col.init_collective_group(size, rank, "roundelay", name)

    def leave(self, name: str = "default") -> None:
        col.destroy_collective_group(name)

    def do(self, work: Any) -> Any:
        return work()


def each(actors: Any, method: str, *args: Any) -> list[Any]:
    found: list[Any] = ray.get([getattr(actor, method).remote(*args) for actor in actors])
    return found


def made(actors: Any, name: str = "default") -> None:
    ray.get([actor.make.remote(len(actors), rank, name) for rank, actor in enumerate(actors)])


def wait_for(seconds: str) -> None:
    os.environ["ROUNDELAY_TIMEOUT"] = seconds


def errors_of(calls: list[Any]) -> list[Any]:
    """Return what every call raised, and of none that it did not."""
    found: list[Any] = []
    for call in calls:
        try:
            ray.get(call)
            found.append(None)
        except (RoundelayError, ray.exceptions.RayError) as error:
            found.append(error)
    return found


@pytest.fixture(scope="module")
def everyone(rays: Any) -> Iterator[Any]:
    rays.one_node()
    actors = [ray.remote(Actor).options(num_cpus=1).remote() for _ in range(RANKS)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def actors(everyone: Any, one_node: None) -> Iterator[Any]:
    del one_node
    made(everyone)
    yield everyone
    each(everyone, "leave")


def as_kind(kind: str, array: Any) -> Any:
    if kind == "numpy":
        return array
    import torch  # noqa: PLC0415 - only in the actor

    return torch.from_numpy(array)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_method_on_every_dtype(actors: Any, kind: str) -> None:
    def work() -> list[str]:
        rank, size = col.get_rank(), col.get_collective_group_size()
        wrong: list[str] = []

        def see(what: str, found: Any, due: Any) -> None:
            if np.asarray(found).tolist() != np.asarray(due).tolist():
                wrong.append(f"rank {rank} {what}: {found}, not {due}")

        for dtype in DTYPES:
            every = np.array([[1, 2], [3, 1], [2, 2]]).astype(dtype)
            of = partial(as_kind, kind)
            for op, fold in OPS.items():
                due = fold(every, axis=0).astype(dtype)
                x = of(every[rank].copy())
                col.allreduce(x, op=getattr(col.types.ReduceOp, op))
                see(f"allreduce {op} {dtype}", x, due)
                x = of(every[rank].copy())
                col.reduce(x, 1, op=getattr(col.types.ReduceOp, op))
                see(f"reduce {op} {dtype}", x, due if rank == 1 else every[rank])
                x, parts = of(np.zeros(2, dtype)), [of(every[rank] + to) for to in range(size)]
                kept = [np.array(part) for part in parts]
                col.reducescatter(x, parts, op=getattr(col.types.ReduceOp, op))
                see(f"reducescatter {op} {dtype}", x, fold(every + rank, axis=0).astype(dtype))
                see(f"reducescatter's input {op} {dtype}", np.stack(parts), kept)
            x = of(every[rank].copy())
            col.broadcast(x, 2)
            see(f"broadcast {dtype}", x, every[2])
            rows = [of(np.zeros(2, dtype)) for _ in range(size)]
            col.allgather(rows, of(every[rank].copy()))
            see(f"allgather {dtype}", np.stack(rows), every)
            x = of(np.zeros(2, dtype))
            if rank == 0:
                col.send(of(every[0].copy()), 1)
            if rank == 1:
                col.recv(x, 0)
                see(f"recv {dtype}", x, every[0])
            col.barrier()
        return wrong

    assert each(actors, "do", work) == [[]] * RANKS


def test_bfloat16_and_arrays_with_gaps(actors: Any) -> None:
    pytest.importorskip("torch")

    def work() -> Any:
        import torch  # noqa: PLC0415 - only in the actor

        x = torch.full((2,), 1.5, dtype=torch.bfloat16)
        col.allreduce(x)
        rows = [torch.zeros(2, dtype=torch.bfloat16) for _ in range(RANKS)]
        col.allgather(rows, x)
        part = torch.zeros(2, dtype=torch.bfloat16)
        col.reducescatter(part, rows)
        wide = np.ones((3, 4))
        col.allreduce(wide[:, ::2])
        return x.tolist(), part.tolist(), wide.tolist()

    gaps = [[3.0, 1.0, 3.0, 1.0]] * 3
    assert each(actors, "do", work) == [([4.5, 4.5], [13.5, 13.5], gaps)] * RANKS


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: col.allgather([np.zeros(2)] * 2 + [np.zeros(3)], np.zeros(2)),
         r"allgather on rank \d takes a list of 3 .*float64\[2\].* \(2: float64\[3\]\)"),
        (lambda: col.reducescatter(np.zeros(2, "f4"), [np.zeros(2)] * 3), r"float32\[2\]"),
        (lambda: col.get_group_handle().allreduce([np.zeros(2)] * 2, col.types.AllReduceOptions),
         "one tensor for each rank, not 2: .*_multigpu"),
        (lambda: col.allreduce(np.broadcast_to(np.zeros(1), 3)), "read-only"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_the_group_lives_on(
    actors: Any, work: Any, said: str
) -> None:
    for error in errors_of([actor.do.remote(work) for actor in actors]):
        assert isinstance(error, InvalidArgumentError)
        with pytest.raises(InvalidArgumentError, match=said):
            raise error
    each(actors, "do", col.barrier)


def test_different_calls_are_told_with_the_users_lines_and_a_group_can_come_again(
    actors: Any,
) -> None:
    def work() -> None:
        col.allreduce(np.zeros(1 + col.get_rank()))

    for error in errors_of([actor.do.remote(work) for actor in actors]):
        assert isinstance(error, CollectiveMismatch)
        assert str(error).count(f"{__file__}:{work.__code__.co_firstlineno + 1}") >= RANKS
    each(actors, "leave")
    made(actors)
    each(actors, "do", col.barrier)


def test_who_does_not_call_is_named_in_time(actors: Any) -> None:
    def work() -> None:
        group = col.get_group_handle()
        group._comm.timeout = 1
        if col.get_rank() != 1:
            col.barrier()

    found = errors_of([actor.do.remote(work) for actor in actors])
    assert found[1] is None
    for error in (found[0], found[2]):
        assert isinstance(error, CollectiveTimeout)
        assert "ank 1" in str(error)


def test_several_groups_and_those_that_a_driver_declares(actors: Any) -> None:
    from ray.experimental import collective as experimental  # noqa: PLC0415 - ray

    def total(name: str) -> float:
        x = np.ones(1)
        col.allreduce(x, name)
        return float(x[0])

    rd.ray.register()  # the driver, too
    made(actors[:2], "pair")
    assert each(actors[:2], "do", partial(total, "pair")) == [2, 2]
    each(actors[:2], "leave", "pair")
    col.create_collective_group(actors[1:], 2, [1, 0], "roundelay", "declared")
    assert each(actors[1:], "do", partial(total, "declared")) == [2, 2]
    assert each(actors[1:], "do", partial(col.get_rank, "declared")) == [1, 0]
    each(actors[1:], "leave", "declared")
    handle = experimental.create_collective_group(actors, "roundelay", "new")
    assert each(actors, "do", partial(total, "new")) == [RANKS] * RANKS
    experimental.destroy_collective_group(handle)
    assert each(actors, "do", partial(total, "default")) == [RANKS] * RANKS


def test_groups_that_cannot_come_together_are_told_so(everyone: Any, one_node: None) -> None:
    del one_node
    each(everyone, "do", partial(wait_for, "3"))
    sizes = [actor.make.remote(2 + rank, rank, "odd") for rank, actor in enumerate(everyone[:2])]
    for error in errors_of(sizes):
        assert isinstance(error, RendezvousError)
        assert "rank 0 has world_size=2, and rank 1 has world_size=3" in str(error)
    twice = errors_of([everyone[0].make.remote(3, 0, "twice"),
                       *(actor.make.remote(3, 1, "twice") for actor in everyone[1:])])  # fmt: skip
    assert all(isinstance(error, RendezvousError) for error in twice)
    assert any(
        "rank 1 of 3 of the group 'twice' is another process already" in str(error)
        for error in twice
    )
    [late] = errors_of([everyone[0].make.remote(2, 0, "late")])
    assert isinstance(late, RendezvousError)
    assert "rank 0 of 2 of the group 'late' waited 3 s, but rank 1 did not come" in str(late)
    [alone] = errors_of([everyone[1].make.remote(2, 1, "late")])
    assert isinstance(alone, RendezvousError)
    assert "rank 1 of 2 of the group 'late' waited 3 s for rank 0" in str(alone)
    each(everyone, "do", partial(wait_for, "20"))
    made(everyone[:1], "single")
    each(everyone[:1], "do", partial(col.barrier, "single"))
    each(everyone[:1], "leave", "single")


@pytest.mark.usefixtures("one_node")
def test_an_actor_that_dies_is_told_and_another_takes_its_place() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    kind = ray.remote(Actor).options(num_cpus=0)
    pair = [kind.remote(), kind.remote()]
    made(pair, "mortal")
    waiting = pair[0].do.remote(partial(col.barrier, "mortal"))
    pair[1].do.remote(die)
    [told] = errors_of([waiting])
    assert isinstance(told, PeerLost)
    assert "Rank 1" in str(told)
    ray.get(pair[0].leave.remote("mortal"))
    pair[1] = kind.remote()
    made(pair, "mortal")
    each(pair, "do", partial(col.barrier, "mortal"))
    each(pair, "leave", "mortal")
    for actor in pair:
        ray.kill(actor)
    forget_what_the_dead_left()


def forget_what_the_dead_left() -> None:
    """Remove what waits for the last rank to leave, which was killed."""
    from ray.experimental import internal_kv  # noqa: PLC0415 - ray

    left = internal_kv._internal_kv_list("", namespace="roundelay")
    assert len(left) <= 4
    for key in left:
        internal_kv._internal_kv_del(key, namespace="roundelay")
