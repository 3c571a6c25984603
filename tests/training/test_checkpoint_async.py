"""Saves beside training: the same checkpoints, in order, and every error reaches every rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

import roundelay as rd  # noqa: E402 - only with torch
from checkpoints import STRATEGIES, small  # noqa: E402
from roundelay.errors import CheckpointError, RankFailed  # noqa: E402
from roundelay.training.checkpoint import save as checkpoint  # noqa: E402

FULL = "No space left on device"


def weight_at(path: Path) -> float:
    weights = rd.read_checkpoint(path).weights["weight"]
    assert (weights == weights[0, 0]).all()
    return float(weights[0, 0])


def beside(act: Callable[[int, int, str], object]) -> dict[int, int]:
    """Have `act` called before every call to the disk of a thread beside training.

    It gets the rank, the number of the call on that rank, and what is done. Returns the numbers.
    """
    counts: dict[int, int] = {}

    def heard(what: str) -> None:
        name = threading.current_thread().name
        if name.startswith("roundelay-save-"):
            rank = int(name.removeprefix("roundelay-save-"))
            counts[rank] = counts.get(rank, 0) + 1
            act(rank, counts[rank], what)

    checkpoint.DISK.before = heard
    return counts


def full(*_: object) -> None:
    raise OSError(28, FULL, "the file")


# ---- the same checkpoints


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_saved_beside_training_is_what_was_there_at_the_call(
    awkward: Any, tmp_path: Path, name: str
) -> None:
    """Training goes on while nothing is written yet; the files have what it was before."""
    model, batches = awkward.model(torch.float32), awkward.batches(4)
    go_on = threading.Event()
    beside(lambda *_: go_on.wait(60))

    def be_rank(comm: Any) -> None:
        mine = awkward.copy(model)
        own = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        mine, own = rd.prepare(mine, own, strategy=STRATEGIES[name], comm=comm)
        extra = {"ema": torch.ones(3)}
        for turn, (tokens, targets) in enumerate(batches):
            if turn == 2:
                comm_of_workers = mine._roundelay_run.run.comm
                comm_of_workers.barrier()
                rd.save(tmp_path / "now", mine, own, extra=extra)
                saving = rd.save(tmp_path / "beside", mine, own, extra=extra, wait=False)
                assert not saving.done()
                extra["ema"].zero_()
                comm_of_workers.barrier()
            awkward.loss(mine, tokens, targets).backward()
            own.step()
            own.zero_grad()
        go_on.set()
        saving.wait()
        assert saving.done()

    rd.run(be_rank, 3, "threads")
    one, other = rd.read_checkpoint(tmp_path / "now"), rd.read_checkpoint(tmp_path / "beside")
    assert one.steps == other.steps == 2
    assert other.extra["ema"].tolist() == [1, 1, 1]
    assert list(one.weights) == list(other.weights)
    states = [each.optimizers()[0]["state"] for each in (one, other)]
    assert states[0].keys() == states[1].keys() >= {"layers.0.weight", "seldom"}
    if not STRATEGIES[name].synchronous:
        return  # somebody's gradients may come between the two
    assert all(torch.equal(one.weights[key], other.weights[key]) for key in one.weights)
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert states[0]["layers.0.weight"]["step"] == 2


@pytest.mark.parametrize("engine", ["threads", "shared_memory"])
def test_a_function_that_returns_waits_and_saves_are_in_order(tmp_path: Path, engine: str) -> None:
    def be_rank(comm: Any) -> None:
        first, second = small(comm, 0.0), small(comm, -1.0)
        for number in range(4):
            with torch.no_grad():
                first[0].weight.fill_(number)
            rd.save(tmp_path / "one", *first, wait=False)
            rd.save(tmp_path / "one", *second, wait=False)  # another model, to the same place
        rd.save(tmp_path / "two", *first, wait=False)
        rd.save(tmp_path / "one", *first, wait=False)

    rd.run(be_rank, 3, engine)
    assert weight_at(tmp_path / "one") == weight_at(tmp_path / "two") == 3
    assert len(list((tmp_path / "one").iterdir())) == 2


# ---- errors


def test_an_error_at_any_moment_is_raised_on_all_ranks_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "it"

    def be_rank(comm: Any, weight: float) -> str:
        saving = rd.save(path, *small(comm, weight), wait=False)
        told = []
        for _ in range(2):  # as often as one asks
            try:
                saving.wait()
            except CheckpointError as error:
                told.append(str(error))
        return told[0] if told and told[0] == told[1] else ""

    counts = beside(lambda *_: None)
    rd.run(be_rank, 2, "threads", args=(1.0,))
    for rank in range(2):
        for at in range(1, counts[rank] + 1):
            beside(lambda *place, at=(rank, at): full() if place[:2] == at else None)
            for told in rd.run(be_rank, 2, "threads", args=(2.0,)):
                assert f"rank {rank}: {FULL}: the file" in told, (rank, at)
            if weight_at(path) == 2.0:  # it failed after the stroke
                checkpoint.DISK.before = None
                rd.run(be_rank, 2, "threads", args=(1.0,))
            assert weight_at(path) == 1.0
            assert len(list(path.iterdir())) == 2


def test_a_slow_disk_and_another_working_folder_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    go_on = threading.Event()
    beside(lambda *_: go_on.wait(60))

    def be_rank(comm: Any) -> float:
        model, optimizer = small(comm, 1.0)
        comm.timeout = 5.0
        rd.save("it", model, optimizer, wait=False)
        monkeypatch.chdir("/")
        go_on.set()
        return float(model._roundelay_run.run.saves.beside().timeout)

    assert rd.run(be_rank, 1, "threads")[0] > 1000  # for the others, until this rank has written
    assert weight_at(tmp_path / "it") == 1.0


@pytest.mark.parametrize("way", ["wait", "save", "load", "close", "return"])
def test_what_went_wrong_is_raised_once_wherever_one_looks_next(tmp_path: Path, way: str) -> None:
    beside(lambda rank, _, what: full() if rank == 1 and what == "write" else None)

    def be_rank(comm: Any) -> str:
        pair = small(comm, 1.0)
        saving = rd.save(tmp_path / "old", *pair)
        assert saving.done()
        saving = rd.save(tmp_path / "it", *pair, wait=False)
        try:
            if way == "wait":
                saving.wait()
            elif way == "save":
                rd.save(tmp_path / "new", *pair)
            elif way == "load":
                rd.load(tmp_path / "old", *pair)
            elif way == "close":
                comm.close()
        except CheckpointError as error:
            assert "failed" in repr(saving)
            if way != "close":
                rd.save(tmp_path / "new", *pair)
            return str(error)
        return "nothing was raised"

    if way == "return":
        with pytest.raises(CheckpointError, match=FULL):
            rd.run(be_rank, 2, "threads")
    else:
        for told in rd.run(be_rank, 2, "threads"):
            assert f"Could not save to {tmp_path / 'it'}:\n  rank 1: {FULL}: the file" in told
    assert not (tmp_path / "it" / "checkpoint.json").exists()
    assert weight_at(tmp_path / "old") == 1.0


def test_killed_at_any_moment_the_old_one_or_the_new_one_is_there_whole(tmp_path: Path) -> None:
    def be_rank(comm: Any, weight: float) -> None:
        rd.save(tmp_path / f"{weight:.0f}", *small(comm, weight), keep=1, wait=False).wait()

    counts = beside(lambda *_: None)
    rd.run(be_rank, 2, "threads", args=(1.0,))
    rd.run(be_rank, 2, "threads", args=(2.0,))
    old, seen = 2.0, set()
    for rank in range(2):
        for at in range(1, counts[0], 2) if rank == 0 else (2, 99):

            def kill(who: int, number: int, _: str, rank: int = rank, at: int = at) -> None:
                if (who, number) == (rank, at):
                    os.kill(os.getpid(), signal.SIGKILL)

            beside(kill)
            try:
                rd.run(be_rank, 2, "shared_memory", args=(old + 1,))
                done = True
            except RankFailed as error:
                assert error.rank == rank
                done = False
            latest = rd.latest_checkpoint(tmp_path)
            assert latest is not None
            found = weight_at(latest)
            assert found in ((old + 1,) if done else (old, old + 1)), (rank, at)
            seen.add((done, found - old))
            if done:
                break
            old = found
    assert seen == {(False, 0.0), (False, 1.0), (True, 1.0)}


SCRIPT = f"""
import sys, torch, roundelay as rd
from roundelay.training.checkpoint import save as checkpoint
comm = rd.init()
model = torch.nn.Linear(3, 1)
pair = rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
rd.save(sys.argv[1], *pair, wait=False).wait()
def full(what):
    raise OSError(28, {FULL!r}, "the file")
handle = rd.save(sys.argv[2], *pair, wait=False)
handle.wait()
del model, pair, handle
model = torch.nn.Linear(3, 1)
pair = rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
make, checkpoint.DISK.before = checkpoint.Commit.make_folder, None
def then_full(self):
    made = make(self)
    checkpoint.DISK.before = full
    return made
checkpoint.Commit.make_folder = then_full
rd.save(sys.argv[2], *pair, wait=False)
del model, pair
print("the last line")
"""


def test_a_script_that_ends_waits_and_fails_by_what_went_wrong(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "one"), str(tmp_path / "two")],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ended.stdout == "the last line\n"
    assert f"Could not save to {tmp_path / 'two'}" in ended.stderr
    assert FULL in ended.stderr
    assert ended.returncode == 1
    for name in ("one", "two"):
        assert rd.read_checkpoint(tmp_path / name).steps == 0


def test_a_fork_does_not_wait_for_the_thread_of_its_parent(tmp_path: Path) -> None:
    def be_rank(comm: Any) -> str:
        go_on = threading.Event()
        beside(lambda *_: go_on.wait(60))
        saving = rd.save(tmp_path / "it", *small(comm, 1.0), wait=False)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                saving.wait()
            except CheckpointError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        go_on.set()
        return os.read(read, 10_000).decode()

    assert "of which this one is a fork" in rd.run(be_rank, 1, "shared_memory")[0]
    assert weight_at(tmp_path / "it") == 1.0
