"""Records in the form of torch's flight recorder, read by torch's own analyzer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir

import roundelay as rd
from roundelay.communicator import Communicator
from roundelay.records import read_run
from roundelay.view.flight_recorder import flight_recorder


def work(comm: Communicator) -> None:
    x, rows = np.ones(6, np.float32), np.ones((comm.size, 3))
    for _ in range(3):
        comm.all_reduce(x)
    comm.broadcast(x, root=comm.size - 1)
    comm.reduce(x)
    comm.gather(x)
    comm.scan(x)
    comm.reduce_scatter(rows)
    comm.all_gather(x)
    comm.all_to_all(rows)
    comm.scatter(rows if comm.rank == 0 else None, out=np.empty(3))
    comm.start.all_reduce(np.ones(1000)).wait()
    half = comm.split(comm.rank % 2)
    if half is not None:
        half.all_reduce(x)
    comm.barrier()


def analyzed(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> Any:
    """Return the database that torch's analyzer makes of a run."""
    monkeypatch.setenv("RD_TRACE", str(folder / "trace"))
    rd.run(work, size)
    flight_recorder(read_run(folder / "trace"), folder / "recorder")
    config = JobConfig()
    args = config.parse_args([str(folder / "recorder")])
    details, version = read_dir(args)
    return build_db(details, args, version)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_torch_s_analyzer_matches_all_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    database = analyzed(tmp_path, monkeypatch, size)
    assert {group.size for group in database.groups} >= {size}
    assert len(database.collectives) > 10
    assert [one.collective_name for one in database.collectives if not one.pass_check] == []
    names = {one.collective_name.removeprefix("gloo:") for one in database.collectives}
    assert {"all_reduce", "broadcast", "reduce", "gather", "scatter", "reduce_scatter",
            "all_gather", "all_to_all", "barrier"} <= names  # fmt: skip


def test_it_names_the_rank_that_did_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RD_TRACE", str(tmp_path / "trace"))

    def leaves(comm: Communicator) -> None:
        comm.all_reduce(np.ones(3))
        if comm.rank != 1:
            (tmp_path / f"came_{comm.rank}").touch()
            comm.all_reduce(np.ones(3))
        while len([*tmp_path.glob("came_*")]) < 2:  # who leaves at once breaks the others' call
            time.sleep(0.01)
        time.sleep(0.3)

    with pytest.raises(rd.RoundelayError):
        rd.run(leaves, 3, timeout=20)
    flight_recorder(read_run(tmp_path / "trace"), tmp_path / "recorder")
    config = JobConfig()
    args = config.parse_args([str(tmp_path / "recorder")])
    details, version = read_dir(args)
    database = build_db(details, args, version)
    wrong = [one for one in database.collectives if not one.pass_check or one.missing_ranks]
    assert [one.missing_ranks for one in wrong] == [{1}]
