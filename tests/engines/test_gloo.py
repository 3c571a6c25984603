"""Gloo has the whole communicator, beside whatever else the process does with torch."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.engines.gloo.groups import load_torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, RankFailed
from roundelay.records import read_run

torch = pytest.importorskip("torch")


def surface(name: str = "surface") -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_whole_surface(sample: Any) -> None:
    whole = surface()
    work = partial(whole.failures, reduced=sample.cells(whole.REDUCED, 5))
    for size in (1, 2, 3):
        assert rd.run(work, size, engine="gloo", timeout=60) == [[]] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_travels_as_bfloat16_keeps_its_laws(size: int) -> None:
    work = surface("wire_laws").failures
    assert rd.run(work, size, engine="gloo", timeout=60) == [[]] * size


def test_it_lives_beside_the_users_own_group(tmp_path: Path) -> None:
    def work(comm: rd.Communicator) -> tuple[float, float]:
        dist = torch.distributed
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=comm.rank, world_size=comm.size
        )
        theirs, ours = torch.ones(3), comm.start.all_reduce(np.ones(3))
        dist.all_reduce(theirs)
        total = float(ours.wait()[0])
        dist.destroy_process_group()
        return float(theirs[0]), total

    assert rd.run(work, 2, engine="gloo") == [(2.0, 2.0)] * 2


def seen(work: Callable[[rd.Communicator], Any], size: int, timeout: float) -> list[Any]:
    """Run a part that goes wrong; return what every rank that lived saw, and how soon."""

    def body(comm: rd.Communicator) -> Any:
        comm.barrier()
        start = time.monotonic()
        try:
            work(comm)
            first = "nothing"
        except rd.RoundelayError as error:
            first = f"{type(error).__name__}: {error}"
        taken = time.monotonic() - start
        try:
            comm.barrier()
            again = "nothing"
        except rd.RoundelayError as error:
            again = type(error).__name__
        return first, again, taken

    return rd.run(body, size, engine="gloo", timeout=timeout)


def late(comm: rd.Communicator) -> None:
    if comm.rank == 1:
        time.sleep(2.5)
    comm.all_reduce(np.ones(10))


def late_for_a_message(comm: rd.Communicator) -> None:
    if comm.rank != 1:
        comm.recv(np.zeros(1), 1)


@pytest.mark.parametrize("work", [late, late_for_a_message])
def test_who_does_not_come_in_time_is_told_and_after_it_no_call_blocks(
    work: Callable[[rd.Communicator], Any],
) -> None:
    first, again, taken = seen(work, 3, 1.0)[0]
    assert first.startswith("CollectiveTimeout: Rank ")
    assert "waited 1 s" in first
    assert again == "CollectiveTimeout"
    assert taken < 20


def differing(comm: rd.Communicator) -> None:
    if comm.rank == 1:
        comm.all_reduce(np.ones(30_000, np.float32))
    else:
        comm.all_reduce(np.ones(10))


def differing_in_dtype(comm: rd.Communicator) -> None:
    comm.all_reduce(np.ones(10, np.float32 if comm.rank == 1 else np.int32))


def differing_in_the_call(comm: rd.Communicator) -> None:
    if comm.rank == 1:
        comm.start.barrier().wait()
    else:
        comm.scan(np.ones(10))


def differing_in_axis(comm: rd.Communicator) -> None:
    comm.all_gather(np.ones(10), axis=0 if comm.rank == 1 else None)


def differing_in_function(comm: rd.Communicator) -> None:
    comm.all_reduce(np.ones(10), rd.Op(np.multiply if comm.rank == 1 else np.add))


@pytest.mark.parametrize(
    ("work", "most", "one"),
    [
        (differing, "all_reduce float64[10] op=sum", "all_reduce float32[30000] op=sum"),
        (differing_in_dtype, "all_reduce int32[10] op=sum", "all_reduce float32[10] op=sum"),
        (differing_in_the_call, "scan float64[10] op=sum", "barrier"),
        (differing_in_axis, "all_gather float64[10]", "all_gather float64[10] axis=0"),
        (
            differing_in_function,
            "all_reduce, by all_gather float64[10] op=add (numpy.add)",
            "all_reduce, by all_gather float64[10] op=multiply (numpy.multiply)",
        ),
    ],
)
def test_who_calls_differently_is_told_to_all(
    work: Callable[[rd.Communicator], Any], most: str, one: str
) -> None:
    told = seen(work, 3, 30.0)
    assert len({first for first, _, _ in told}) == 1
    title, others, odd = told[0][0].splitlines()
    assert title == "CollectiveMismatch: The ranks made different calls:"
    assert others.startswith(f"  ranks 0, 2: {most} at ")
    assert odd.startswith(f"  rank 1: {one} at ")
    assert "test_gloo.py" in odd
    assert {again for _, again, _ in told} == {"CollectiveMismatch"}


def left_behind(comm: rd.Communicator) -> None:
    if comm.rank == 1:
        comm.close()
    else:
        comm.all_reduce(np.ones(1000))


def test_a_rank_that_closes_while_others_call_is_told_to_all() -> None:
    told = [first for first, _, _ in seen(left_behind, 3, 30.0)]
    assert told == [told[0]] * 3
    title, others, odd = told[0].splitlines()
    assert title == "CollectiveMismatch: The ranks made different calls:"
    assert others.startswith("  ranks 0, 2: all_reduce float64[1000] op=sum at ")
    assert odd.startswith("  rank 1: closed the communicator at ")


@pytest.mark.parametrize("call", ["all_reduce", "recv", "walk"])
def test_a_rank_that_dies_is_noticed_by_all(call: str, tmp_path: Path) -> None:
    def work(comm: rd.Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), 9)
        try:
            if call == "all_reduce":
                comm.all_reduce(np.ones(100_000))
            elif call == "walk":
                comm.scan(np.ones(100_000))
                comm.barrier()
            else:
                comm.recv(np.zeros(1), 1)
        except rd.RoundelayError as error:
            (tmp_path / str(comm.rank)).write_text(f"{type(error).__name__}: {error.__cause__}")

    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL with no Python error"):
        rd.run(work, 3, engine="gloo", timeout=60)
    assert time.monotonic() - start < 30
    for rank in (0, 2):
        assert (tmp_path / str(rank)).read_text().startswith("PeerLost: ")


def test_what_a_rank_fails_by_is_told_to_the_others(tmp_path: Path) -> None:
    def work(comm: rd.Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            raise ValueError("no such layer")
        try:
            comm.barrier()
        except rd.RoundelayError as error:
            (tmp_path / str(comm.rank)).write_text(f"{type(error).__name__}: {error}")
            raise

    with pytest.raises(RankFailed, match="rank 1 raised ValueError: no such layer"):
        rd.run(work, 3, engine="gloo", timeout=60)
    for rank in (0, 2):
        told = (tmp_path / str(rank)).read_text()
        assert told == "PeerLost: Rank 1 failed: ValueError: no such layer"


@pytest.mark.parametrize("inside", ["all", "group"])
@pytest.mark.parametrize("then", ["calls", "closes"])
def test_who_cleans_up_as_it_fails_is_told_by_its_error(inside: str, then: str) -> None:
    """Unless nobody needs it any more; then only its own error is left."""

    def work(comm: rd.Communicator) -> None:
        used = comm if inside == "all" else comm.split(0)
        assert used is not None
        try:
            used.all_reduce(np.ones(3))
            if comm.rank == 1:
                raise ValueError("no data")
            if then == "calls":
                used.all_reduce(np.ones(3))
        finally:
            used.close()

    with pytest.raises(RankFailed) as caught:
        rd.run(work, 3, engine="gloo", timeout=60)
    assert str(caught.value) == "rank 1 raised ValueError: no data"


def test_what_was_sent_arrives_though_its_sender_has_gone() -> None:
    def work(comm: rd.Communicator) -> float:
        if comm.rank == 0:
            comm.send(np.full(100, 7.0), 1)
            comm.close()
            return 7.0
        time.sleep(0.3)
        return float(comm.recv(np.zeros(100), 0)[99])

    assert rd.run(work, 2, engine="gloo", timeout=30) == [7.0, 7.0]


def test_tensors_of_a_device_are_refused_by_name() -> None:
    def work(comm: rd.Communicator) -> list[str]:
        calls: list[Callable[[], Any]] = [
            lambda: comm.all_reduce(torch.ones(2, device="meta")),
            lambda: comm.start.broadcast(torch.ones(2, device="meta")),
            lambda: comm.send(torch.ones(2, device="meta"), 0),
        ]
        told = []
        for call in calls:
            with pytest.raises(InvalidArgumentError) as caught:
                call()
            told.append(str(caught.value))
        return told

    for engine in ("gloo", "shared_memory"):
        (told,) = rd.run(work, 1, engine=engine)
        for call, text in zip(("all_reduce", "broadcast", "send"), told, strict=True):
            assert text.startswith(f"{call} got a tensor on meta, which has no memory.")


def test_without_torch_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'roundelay\[torch\]'"):
        load_torch("gloo")


def spoke(comm: rd.Communicator) -> None:
    comm.send(np.ones(3), (comm.rank + 1) % comm.size)
    comm.recv(np.empty(3), (comm.rank - 1) % comm.size)


def began(comm: rd.Communicator) -> None:
    comm.start.all_reduce(np.ones(1_000_000))
    comm.start.send(np.ones(100_000), (comm.rank + 1) % comm.size)
    comm.recv(np.empty(100_000), (comm.rank - 1) % comm.size)


def lost(comm: rd.Communicator) -> None:
    if comm.rank == 0:
        comm.start.all_reduce(np.ones(100))  # which no other makes
        with pytest.raises(rd.RoundelayError):
            comm.recv(np.empty(3), 1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("work", [lambda comm: comm.barrier(), spoke, began, lost])
def test_closing_ends_its_threads(work: Callable[[rd.Communicator], None], size: int) -> None:
    # One that is still there when the interpreter ends takes the process down with it.
    def body(comm: rd.Communicator) -> list[str]:
        work(comm)
        with contextlib.suppress(CollectiveMismatch):  # of who made one more call
            comm.close()
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return [name for name in names if "gloo" in name]

    assert rd.run(body, size, engine="gloo", timeout=2) == [[]] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_are_traced_where_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setenv("RD_TRACE", str(tmp_path))

    def work(comm: rd.Communicator) -> None:
        comm.all_reduce(np.ones(100))
        handles = [comm.start.all_reduce(np.ones(10)) for _ in range(2)]
        for handle in handles:
            handle.wait()
        pair = comm.group([0, size - 1])  # of which others know nothing
        half = comm.split(comm.rank % 2)
        for group in (pair, half):
            if group is not None:
                group.barrier()

    rd.run(work, size, "gloo")
    run = read_run(tmp_path)
    assert [record.rank for record in run.ranks] == [*range(size)]
    together: dict[tuple[int, int], set[int]] = {}
    for rank, event in run.calls():
        assert event.ended is not None
        assert event.site.rpartition("/")[2].startswith("test_gloo.py:")
        together.setdefault((event.group, event.call), set()).add(rank)
        if event.collective == "all_reduce":
            assert event.nbytes in (800, 80)
    for (group, _), ranks in together.items():
        assert sorted(ranks) == sorted(run.members(group))
    found = {tuple(sorted(run.members(group))) for group, _ in together}
    halves = [tuple(rank for rank in range(size) if rank % 2 == odd) for odd in (0, 1)]
    assert found == {tuple(range(size)), (0, size - 1), *halves}
