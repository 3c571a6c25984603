"""What goes wrong is told by our errors, through torch's calls, with the user's line."""
# mypy: disable-error-code="attr-defined,no-any-return,no-untyped-call,union-attr,operator"

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from roundelay.engines.hierarchical import join
from roundelay.errors import RendezvousError
from roundelay.torch import _members

HERE = Path(__file__).name


def line_of(word: str) -> int:
    """The line of this file that has the comment `# word`."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {word}"))


def different_shapes() -> None:
    dist.all_reduce(torch.ones(dist.get_rank() + 1))  # shapes


def different_dtypes() -> None:
    kinds = (torch.float32, torch.float64)
    dist.all_reduce(torch.ones(3, dtype=kinds[dist.get_rank()]), async_op=True).wait()  # dtypes


def different_calls() -> None:
    if dist.get_rank():
        dist.broadcast(torch.ones(3), 0)  # broadcast
    else:
        dist.all_reduce(torch.ones(3))  # all_reduce


def different_shapes_in_the_background() -> None:
    rank = dist.get_rank()
    out, given = torch.empty(2 + rank), torch.empty(2 + rank)
    dist.all_to_all_single(out, given, [1 + rank, 1], [1 + rank, 1], async_op=True).wait()  # splits


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (different_shapes, ["shapes"]),
        (different_dtypes, ["dtypes"]),
        (different_calls, ["broadcast", "all_reduce"]),
        (different_shapes_in_the_background, []),
    ],
)
def test_a_mismatch_names_the_lines(worlds: Any, fn: Any, words: list[str]) -> None:
    world = worlds.fresh(2)
    found = world.outcomes(fn)
    for one in found:
        assert one.kind in ("CollectiveMismatch", "InvalidArgumentError"), one
        for word in words:
            assert f"{HERE}:{line_of(word)}" in one.text
    world.close()


def dies() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(3))  # lost
    except RuntimeError as error:
        first = f"{type(error).__name__}: {error}"
    began = time.monotonic()
    try:
        dist.barrier()
    except RuntimeError:
        assert time.monotonic() - began < 5
        return first
    return "passed"


def test_a_dead_rank_is_named_on_all_others(worlds: Any) -> None:
    world = worlds.fresh(3)
    found = world.outcomes(dies)
    assert found[1] is None
    for one in (found[0], found[2]):
        assert re.match(r"PeerLost: Rank 1 \(process \d+\) died", one), one
    world.close()


def dies_in_backward() -> str:
    net = DistributedDataParallel(nn.Linear(4, 4))
    loss = net(torch.ones(2, 4)).sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "passed"


def test_a_rank_that_dies_in_backward_is_named(worlds: Any) -> None:
    world = worlds.fresh(2)
    assert "died" in world.outcomes(dies_in_backward)[0]
    world.close()


def fails_in_the_background() -> list[str]:
    told: list[str] = []
    ran = threading.Event()
    work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)

    def then(future: Any) -> None:
        try:
            future.value()
        except RuntimeError as error:
            told.append(str(error))
        ran.set()

    work.get_future().then(then)
    assert ran.wait(30)
    for _ in range(2):  # again, and the same
        try:
            work.wait()
        except RuntimeError as error:
            told.append(f"{type(error).__name__}: {error}")
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is not None
    return told


def destroyed_before_anybody_waited() -> str:
    work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
    try:
        dist.destroy_process_group()
    except RuntimeError as error:
        return f"{type(error).__name__} {work.is_completed()}"
    return "silence"


def test_an_error_that_nobody_waited_for_is_raised_when_the_group_is_destroyed(worlds: Any) -> None:
    world = worlds.fresh(2)
    assert world(destroyed_before_anybody_waited) == ["CollectiveMismatch True"] * 2
    world.close()


def test_an_error_in_the_background_is_in_the_future_and_in_every_wait(worlds: Any) -> None:
    world = worlds.fresh(2)
    for first, second, third in world(fails_in_the_background):
        assert "CollectiveMismatch" in first
        assert second.startswith("CollectiveMismatch")
        assert second == third
    world.close()


def timed_out() -> str:
    group = dist.new_group([1, 2], timeout=timedelta(seconds=3))  # in which both must have come
    if dist.get_rank() == 1:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    time.sleep(5)
    return ""


def test_a_timeout_says_whose_it_is_and_which_ranks_are_meant(worlds: Any) -> None:
    world = worlds.fresh(3)
    found = world(timed_out)[1]
    assert found.startswith("CollectiveTimeout: Rank 0 waited 3 s for rank 1")
    assert "init_process_group and new_group" in found
    assert "Ranks 0 to 1 of this group are ranks [1, 2] of all" in found
    world.close()


def refused() -> list[str]:
    size = dist.get_world_size()
    group: Any = dist.group.WORLD
    told = []
    x = torch.ones(4)
    for call in (
        lambda: dist.all_reduce(torch.empty(3, device="meta")),
        lambda: dist.broadcast(torch.empty(3, device="meta"), 0),
        lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX),
        lambda: dist.broadcast(torch.ones(3).to_sparse(), 0),
        lambda: dist.all_reduce(torch.eye(3).to_sparse_csr()),
        lambda: dist.all_reduce(torch.eye(3).to_sparse_csc()),
        lambda: dist.all_reduce(torch.eye(4).to_sparse_bsr((2, 2))),
        lambda: dist.all_reduce(torch.eye(4).to_sparse_csr(), dist.ReduceOp.MAX, async_op=True),
        lambda: dist.all_reduce(torch.nested.nested_tensor([x, x[:2]])),
        lambda: dist.all_reduce(torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)),
        lambda: dist.all_gather([x], x),
        lambda: dist.all_gather_single(torch.empty(5), x),
        lambda: dist.all_gather_single(torch.empty(4 * size).double(), x),
        lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3)),
        lambda: dist.all_to_all_single(torch.empty(4), x, [1] * size, [1] * size),
        lambda: dist.all_to_all_single(torch.empty(4), x, [4], [4]),
        lambda: group._get_backend(torch.device("cuda")),
        lambda: group.allreduce([x], "sum"),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("passed")
    dist.barrier()  # nobody was left waiting
    return told


def test_what_can_not_be_done_is_refused_with_the_way_out(worlds: Any) -> None:
    expected = [
        r"tensor on meta.*tensor\.cpu\(\).*nccl", r"broadcast got a tensor on meta",
        r"Unsupported.*float8.*tensor\.float\(\)", r"Unsupported.*avg",
        r"sparse tensors has sum only", r"to_dense",
        r"not torch.sparse_csr.*to_dense", r"not torch.sparse_csc", r"not torch.sparse_bsr",
        r"not torch.sparse_csr", r"nested", r"nested",
        r"a list of 2 tensors, not of 1", r"4 and 5", r"one dtype", r"divide by the 2 ranks",
        r"add up to the 4 rows", r"2 split sizes", r"nothing for cuda.*nccl", r"'sum' is neither",
    ]  # fmt: skip
    for found in worlds.of(2)(refused):
        for told, pattern in zip(found, expected, strict=True):
            assert re.search(pattern, told), (pattern, told)


def apart() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    usual = _members.host_identity
    _members.host_identity = join.host_identity = lambda: f"host {rank % 2}"
    try:
        group = dist.new_group(timeout=timedelta(seconds=60))
    finally:
        _members.host_identity = join.host_identity = usual
    x = torch.arange(1000.0) + rank
    dist.all_reduce(x, group=group)
    rows = [torch.empty(1) for _ in range(size)]
    dist.all_gather(rows, torch.tensor([float(rank)]), group=group)
    y = torch.tensor([7.0 if rank == 1 else 0.0])
    dist.broadcast(y, src=1, group=group)
    dist.barrier(group=group)
    return [float(x[0]), float(x[-1]), *(float(row) for row in rows), float(y)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_on_several_hosts_are_joined(worlds: Any, size: int) -> None:
    first = float(sum(range(size)))
    for found in worlds.of(size)(apart):
        assert found == [first, first + 999 * size, *map(float, range(size)), 7.0]


def alone() -> str:
    if dist.get_rank() == 1:
        return ""
    group: Any = dist.group.WORLD
    try:
        group.split_group([0, 1], timeout=timedelta(seconds=0.5), group_name="one is missing")
    except RendezvousError as error:
        return str(error)
    return "passed"


def test_a_rank_that_does_not_come_to_a_group_is_named(worlds: Any) -> None:
    world = worlds.fresh(2)
    assert "waited 0.5 s, but rank 1 did not reach" in world(alone)[0]
    world.close()


def test_without_torch_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['torch'] = None; import roundelay.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'roundelay[torch]'" in done.stderr.splitlines()[-1]


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    (found,) = entry_points(group="torch.distributed.backends", name="roundelay")
    found.load()()  # what torch does; again does no harm
    assert "roundelay" in dist.Backend.backend_list
    assert dist.is_backend_available("roundelay")


def test_a_job_whose_last_calls_differ_does_not_end_well(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("roundelay")
dist.broadcast(torch.ones(2), src=dist.get_rank())
"""
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "roundelay", "run", "-n", "2", "script.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "CollectiveMismatch: The ranks made different calls" in done.stderr
    assert "script.py:4" in done.stderr
