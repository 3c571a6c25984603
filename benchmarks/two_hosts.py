"""What does shared memory inside hosts gain? Two hosts, against Gloo over all their ranks.

The hosts are network namespaces of this machine with a cable between them, each with its share of
the cores. All contenders reduce float32 buffers in the same processes, in turns; a turn takes as
long as its slowest rank, and the median of all turns counts. Ours run once as they are, and once
with `wire="bf16"`. The cable is as quick as memory, unless `--gbit` gives it the speed of a
network. Needs root, `ip`, `tc` and torch. Writes results/two_hosts.json, or what `--out` says.

    python benchmarks/two_hosts.py
    python benchmarks/two_hosts.py --gbit 1 --ranks 4 --out benchmarks/results/two_hosts_1_gbit.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import roundelay as rd
from roundelay import _core

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
HOSTS = 2
BUDGET_S = 6.0  # for the turns of one size
LEAST_TURNS, MOST_TURNS = 5, 200


def turns(comm: rd.Communicator, nbytes: int) -> dict[str, float]:
    """Return the median seconds of all contenders, the same on every rank."""
    calls: dict[str, Callable[[Any], Any]] = {
        "hierarchical": comm.all_reduce,
        "wire_bf16": partial(comm.all_reduce, wire="bf16"),
        "gloo": dist.all_reduce,
    }
    tensors = {name: torch.ones(nbytes // 4) for name in calls}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(MOST_TURNS):
        for name, call in calls.items():
            tensor = tensors[name].fill_(1)
            comm.barrier()
            start = time.perf_counter()
            call(tensor)
            seconds = time.perf_counter() - start
            taken[name].append(float(comm.all_reduce(np.array([seconds]), "max")[0]))
            if not torch.all(tensor == comm.size):
                raise SystemExit(f"{name}: a wrong sum")
        spent = comm.all_reduce(np.array([time.perf_counter() - began]), "max")[0]
        if turn + 1 >= LEAST_TURNS and spent > BUDGET_S:
            break
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def measured() -> list[dict[str, Any]]:
    """Return a row for every size; runs on every rank."""
    torch.set_num_threads(1)
    here = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[here::HOSTS])
    comm = rd.init(timeout=120)
    host = os.environ["MASTER_ADDR"].rpartition(".")[0]
    os.environ["GLOO_SOCKET_IFNAME"] = _cable(host)
    stores: Any = dist  # which does not list them for type checkers
    store = stores.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=comm.rank == 0,
        multi_tenant=True, wait_for_workers=False,
    )  # fmt: skip
    dist.init_process_group(
        "gloo", store=stores.PrefixStore("flat", store), rank=comm.rank, world_size=comm.size,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    rows = []
    for nbytes in SIZES:
        seconds = turns(comm, nbytes)
        micro = {name: round(each * 1e6, 1) for name, each in seconds.items()}
        ratios = {
            f"gloo_over_{name}": round(seconds["gloo"] / seconds[name], 2)
            for name in seconds
            if name != "gloo"
        }
        rows.append({"bytes": nbytes, "microseconds": micro, **ratios})
    dist.destroy_process_group()
    comm.close()
    return rows


def _cable(network: str) -> str:
    """Return the name of the device that leads to the other host."""
    said = os.popen("ip -o -4 addr").read()  # noqa: S605, S607 - a fixed command
    return next(line.split()[1] for line in said.splitlines() if network in line)


def main() -> None:
    """Measure, write the result and say it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each host (2)")
    parser.add_argument("--gbit", type=int, help="gigabits per second of the cable, each way")
    parser.add_argument("--out", type=Path, default=RESULTS / "two_hosts.json")
    options = parser.parse_args()
    ranks = [options.ranks] * HOSTS
    path = HERE.parent / "tests" / "engines" / "two_hosts.py"
    spec = importlib.util.spec_from_file_location("two_hosts", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} can't be read")
    namespaces = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(namespaces)
    with namespaces.Hosts(HOSTS) as hosts:
        if hosts.why_not:
            sys.exit(hosts.why_not)
        if options.gbit:
            hosts.limit(options.gbit)
        found = [rank.result(seconds=300) for rank in hosts.start(ranks, measured)]
    if not all(good for good, _ in found):
        sys.exit("\n".join(str(said) for good, said in found if not good))
    rows = found[0][1]
    for row in rows:
        print(row)
    result = {
        "command": " ".join(["python benchmarks/two_hosts.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "ranks_per_host": ranks,
        "gbit": options.gbit,
        "all_reduce_float32_sum": rows,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
