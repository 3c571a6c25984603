"""A driver on one of several hosts, for `test_nodes.py`: prints what it found as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.util.collective as col
from ray import train
from ray.experimental import internal_kv

import roundelay as rd
from roundelay.errors import CommunicationError, RankFailed

FOLDER = Path(tempfile.gettempdir())


def surface(comm: rd.Communicator) -> Any:
    total = comm.all_reduce(np.full(20_000, comm.rank + 1.0))[-1]
    sums = comm.reduce_scatter(np.ones((comm.size, 3)))
    comm.barrier()
    return type(comm._engine).__name__, float(total), sums.tolist() == [comm.size] * 3


def hosts_of(comm: rd.Communicator) -> Any:
    return comm._engine._places.hosts  # type: ignore[attr-defined]


def fail(comm: rd.Communicator) -> None:
    if comm.rank == 3:
        raise ValueError("bad row")
    comm.barrier()


def differ(comm: rd.Communicator) -> None:
    comm.all_reduce(np.ones(5000 + (comm.rank == 3)))


def die(comm: rd.Communicator) -> None:
    if comm.rank == 3:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(np.ones(20_000))
    except CommunicationError as error:
        (FOLDER / f"told-{comm.rank}").write_text(str(error))
        raise


def failure(work: Any) -> str:
    try:
        rd.ray.run(work, 4)
    except RankFailed as error:
        return str(error)
    return "nothing failed"


def run() -> dict[str, Any]:
    return {
        "surface": rd.ray.run(surface, 4),
        "hosts": rd.ray.run(hosts_of, 4)[0],
        "failed": failure(fail),
        "differ": failure(differ),
        "killed": failure(die),
        "others": [path.read_text() for path in sorted(FOLDER.glob("told-*"))],
    }


def loop() -> Any:
    comm = rd.init()
    total = comm.all_reduce(np.full(20_000, comm.rank + 1.0))[-1]
    return type(comm._engine).__name__, comm.size, float(total)


class Actor:
    def work(self, rank: int) -> Any:
        rd.ray.register()
        col.init_collective_group(4, rank, "roundelay", "hosts")
        x, rows = np.ones(5000), [np.zeros(1) for _ in range(4)]
        col.allreduce(x, "hosts")
        col.allgather(rows, np.array([float(rank)]), "hosts")
        col.destroy_collective_group("hosts")
        return float(x[-1]), [float(row[0]) for row in rows]


def trained(folder: str) -> dict[str, Any]:
    found = rd.ray.RoundelayTrainer(
        loop,
        scaling_config=train.ScalingConfig(num_workers=4),
        run_config=train.RunConfig(storage_path=folder),
    ).fit()
    actors = [ray.remote(Actor).options(num_cpus=1).remote() for _ in range(4)]
    calls = [actor.work.remote(rank) for rank, actor in enumerate(actors)]
    return {"trained": found.return_value, "collective": ray.get(calls)}


if __name__ == "__main__":
    address, what, *words = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    result = run() if what == "run" else trained(*words)
    left = internal_kv._internal_kv_list("", namespace="roundelay")
    print(json.dumps({**result, "left": [name.decode() for name in left]}))  # noqa: T201
    ray.shutdown()
