"""An asynchronous job goes on without workers that are lost: exactly, and it names them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay import _core  # noqa: E402
from roundelay.errors import InvalidArgumentError, PeerLost, RankFailed  # noqa: E402
from roundelay.launch.ending import Ending, RankEnd  # noqa: E402
from roundelay.launch.spared import SpareLine  # noqa: E402
from roundelay.processes.launcher_line import tell_launcher  # noqa: E402

PS = rd.ParameterServer
STEPS, LAST = 9, 4  # steps of each worker, and those of who is lost
MODES = [{"mode": "async"}, {"mode": "ssp", "staleness": 0}]


class Plane(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Parameters whose gradient is the input; all sums of whole numbers are exact in any order."""

    def __init__(self, length: int = 3) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(length, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: float) -> Any:
        return self.weight.sum() * x + self.bias.sum() * x


def lose(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    raise ValueError("bad row")


def prepared(comm: Any, strategy: Any, length: int = 3) -> tuple[Any, Any]:
    model = Plane(length)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return rd.prepare(model, optimizer, strategy=strategy, comm=comm)


def step(model: Any, optimizer: Any, rank: int) -> None:
    """Push a gradient that tells whose it is: 1, 10, 100, …"""
    model(10.0**rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def worker(comm: Any, strategy: Any, victims: tuple[int, ...], how: str) -> Any:
    model, optimizer = prepared(comm, strategy)
    for number in range(STEPS):
        if comm.rank in victims and number == LAST:
            lose(how)
        step(model, optimizer, comm.rank)
    state = rd.full_state_dict(model)
    found = {float(-one) for tensor in state.values() for one in tensor}
    return sorted(found), optimizer.run.comm.size, rd.staleness(model).total


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    ("size", "options", "victims"),
    [
        (2, {}, (1,)),
        (3, {"servers": 2}, (2,)),
        (4, {"servers": [3]}, (0, 2)),
        (4, {"dedicated": True}, (0,)),
        (7, {"dedicated": True, "servers": 2}, (1, 4)),
    ],
    ids=str,
)
def test_the_others_train_on_as_if_it_had_only_stopped(
    capfd: Any, size: int, options: Any, victims: Any, mode: Any
) -> None:
    strategy = PS(**mode, **options, lost_workers="allow")
    workers = strategy.places(size)[1]
    total = sum(10.0**rank * (LAST if rank in victims else STEPS) for rank in workers)
    left = len(workers) - len(victims)
    for engine, how in (("threads", "raise"), ("shared_memory", "kill")):
        found = rd.run(worker, size, engine, args=(strategy, victims, how))
        for rank in range(size):
            gone = rank in victims or rank not in workers
            assert found[rank] == (None if gone else ([total], left, left * STEPS))
        told = capfd.readouterr().err
        for victim in victims:
            line = rf"Rank {victim} .*in step {LAST}.* {LAST} of its gradients were applied"
            assert len(re.findall(line, told)) == 1, told


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
def test_the_job_fails_in_the_end_unless_losses_are_allowed(how: str, tmp_path: Path) -> None:
    def be_rank(comm: Any) -> None:
        found = worker(comm, PS(mode="async"), (1,), how)
        (tmp_path / str(comm.rank)).write_text(str(found[0]))

    words = {"kill": "was killed by SIGKILL", "exit": "ended with exit code 3",
             "raise": "raised ValueError: bad row"}  # fmt: skip
    with pytest.raises(RankFailed, match=f"rank 1 in step {LAST} {words[how]}") as failed:
        rd.run(be_rank, 3)
    assert (failed.value.rank, failed.value.step) == (1, LAST)
    total = f"[{101.0 * STEPS + 10 * LAST}]"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"0": total, "2": total}
    if how == "raise":
        with pytest.raises(ValueError, match="bad row") as raised:
            rd.run(be_rank, 3, "threads")
        assert raised.value.__notes__ == [f"Raised on rank 1 of 3, in step {LAST}."]


@pytest.mark.parametrize("servers", [[0], [0, 2]], ids=str)
def test_the_rank_of_a_server_is_missed_by_all(servers: list[int], tmp_path: Path) -> None:
    """Also where workers that are not needed wait for it, and where one of several dies."""

    def be_rank(comm: Any) -> None:
        model, optimizer = prepared(comm, PS(mode="async", servers=servers, lost_workers="allow"))
        try:
            for number in range(10**6):
                if comm.rank == servers[-1] and number == LAST:
                    lose("kill")
                step(model, optimizer, 0)
        except PeerLost as error:
            (tmp_path / str(comm.rank)).write_text(str(error))
            raise

    last = servers[-1]
    with pytest.raises(RankFailed, match=f"rank {last} in step {LAST} was killed"):
        rd.run(be_rank, 3)
    for rank in {0, 1, 2} - {last}:
        told = (tmp_path / str(rank)).read_text()
        assert re.match(rf"Rank {last} \(process \d+\) died in step {LAST}", told)


CALLS: dict[str, Callable[[Any], Any]] = {
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(np.ones(100_000)),
    "objects": lambda comm: comm.all_gather_object("here"),
    "group": lambda comm: comm.group([0, 1]),
    "send": lambda comm: comm.send(np.ones(1_000_000), 2),
    "recv": lambda comm: comm.recv(np.ones(3), 2),
    "later": lambda comm: comm.start.all_reduce(np.ones(3)).wait(),
    "prepare": lambda comm: prepared(comm, "ddp"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_need_a_lost_rank_name_it(call: str) -> None:
    def be_rank(comm: Any, how: str) -> Any:
        model, optimizer = prepared(comm, PS(mode="async", lost_workers="allow"))
        step(model, optimizer, comm.rank)
        if comm.rank == 2:
            lose(how)
        rd.full_state_dict(model)
        told = comm.lost()
        with pytest.raises(PeerLost) as lost:
            CALLS[call](comm)
        return list(told), str(lost.value).startswith(told[2].removesuffix("."))

    for engine, how in (("threads", "raise"), ("shared_memory", "kill")):
        assert rd.run(be_rank, 3, engine, args=(how,)) == [([2], True), ([2], True), None]


def test_messages_between_the_others_go_on() -> None:
    def be_rank(comm: Any) -> float:
        model, optimizer = prepared(comm, PS(mode="async", lost_workers="allow"))
        step(model, optimizer, comm.rank)
        if comm.rank == 2:
            lose("kill")
        rd.full_state_dict(model)
        try:
            comm.recv(np.ones(1), 2)
        except PeerLost:
            found = comm.sendrecv(np.array([comm.rank + 1.0]), 1 - comm.rank, np.zeros(1), rd.ANY)
        return float(found[0])

    assert rd.run(be_rank, 3) == [2.0, 1.0, None]


@pytest.mark.parametrize("points", [1, 9, 31, 60])
def test_half_a_gradient_is_no_gradient(points: int) -> None:
    """Killed in the midst of its messages, which are longer than what can be under way."""
    length = 100_000

    def be_rank(comm: Any) -> Any:
        model, optimizer = prepared(comm, PS(mode="ssp", lost_workers="allow"), length)
        for number in range(6):
            if comm.rank == 1 and number == 2:
                _core.set_kill_point(points)
            step(model, optimizer, comm.rank)
        found = set((-rd.full_state_dict(model)["weight"]).tolist())
        if comm.rank == 1:
            lose("kill")
        return sorted(found), optimizer.run.state.applied()

    first, _, third = rd.run(be_rank, 3)
    assert first == third
    [total], [counts] = first
    assert counts[0] == counts[2] == 6
    assert counts[1] >= 2
    assert total == sum(10.0**rank * count for rank, count in enumerate(counts))


def test_what_is_left_can_be_saved_and_goes_on(tmp_path: Path) -> None:
    def be_rank(comm: Any) -> Any:
        model, optimizer = prepared(comm, PS(mode="async", servers=2, lost_workers="allow"))
        step(model, optimizer, comm.rank)
        if comm.rank == 3:
            lose("raise")
        rd.save(tmp_path / "1", model, optimizer)
        saving = rd.save(tmp_path / "2", model, optimizer, wait=False)
        saving.wait()
        if comm.rank == 2:
            lose("raise")
        step(model, optimizer, comm.rank)
        rd.load(tmp_path / "2", model, optimizer)
        with rd.whole(model):
            before = -model.weight[0].item()
        ledger = rd.ledger(model)
        optimizer.load_state_dict(optimizer.state_dict())
        model, optimizer = rd.unprepare(model)
        return before, len(ledger.entries), -model.weight[0].item()

    found = rd.run(be_rank, 4, "threads")
    assert found == [(1111.0, 2, 1111.0)] * 2 + [None] * 2


def test_when_all_workers_are_lost_the_servers_end() -> None:
    def be_rank(comm: Any) -> None:
        model, optimizer = prepared(comm, PS(mode="async", dedicated=True))
        step(model, optimizer, comm.rank)
        raise ValueError(f"bad row on {comm.rank}")

    with pytest.raises(ValueError, match="bad row on"):
        rd.run(be_rank, 3, "threads")
    with pytest.raises(RankFailed, match=r"rank [01] in step 1 raised ValueError: bad row on"):
        rd.run(be_rank, 3)


def test_losses_are_not_for_synchronous_jobs() -> None:
    with pytest.raises(InvalidArgumentError, match="every step waits for all workers"):
        PS(lost_workers="allow")
    with pytest.raises(InvalidArgumentError, match="Known: allow, fail"):
        PS(mode="async", lost_workers="ignore")


SCRIPT = """
import sys, torch
import roundelay as rd
comm = rd.init()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
strategy = rd.ParameterServer(mode="async", lost_workers=sys.argv[1])
model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
for step in range(5):
    if comm.rank == 1 and step == 3:
        raise ValueError("bad row")
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
rd.full_state_dict(model)
print("trained")
"""


def test_the_command_goes_on_and_ends_well(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "roundelay", "run", "-n", "2", str(script), "allow"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stdout) == (0, "[0] trained\n"), done.stderr
    assert "Rank 1 failed in step 3: ValueError: bad row. 3 of its gradients" in done.stderr
    last = "roundelay: rank 1 raised ValueError; the job went on without it.\nTraceback"
    assert last in done.stderr


def test_the_command_knows_who_may_be_lost() -> None:
    line = SpareLine()
    for rank, loss in ((3, "passes"), (1, "fails"), (3, "fails"), (0, "ends")):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "environ", line.environment({}))
            tell_launcher(rank, loss)
    assert [line.loss_of(rank) for rank in range(5)] == ["ends", "fails", "ends", "fails", "ends"]
    line.close()
    well, lost = RankEnd(0, 0), RankEnd(1, -signal.SIGKILL)
    assert Ending([lost, well]).code == 128 + signal.SIGKILL
    assert Ending([replace(lost, passes=True), well]).code == 0
    other = RankEnd(0, 1, "PeerLost")
    assert Ending([replace(lost, passes=True), other]).code == 1
