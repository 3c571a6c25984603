"""Several nodes of Ray: a cluster on one host, and hosts that are network namespaces."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import RankFailed

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'roundelay[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers have no tests

HERE = Path(__file__).parent
PORT = "6390"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def work(comm: rd.Communicator) -> Any:
    node = ray.get_runtime_context().get_node_id()
    nodes = comm.all_gather_object(node)
    total = comm.all_reduce(np.full(1000, comm.rank + 1.0))[-1]
    return nodes, float(total), type(comm._engine).__name__


def test_nodes_of_one_host_share_memory_and_ranks_of_a_node_stand_together(cluster: Any) -> None:
    del cluster
    found = rd.ray.run(work, 5)
    assert found == [(found[0][0], 15.0, "SharedMemory")] * 5
    nodes = found[0][0]
    assert len(set(nodes)) == 3
    assert sum(one != other for one, other in pairwise(nodes)) == 2


def test_a_node_that_is_lost_ends_the_run_and_not_the_next_one(cluster: Any) -> None:
    extra = cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
    flag = Path(os.environ["TMPDIR"]) / "ranks"
    flag.mkdir()

    def wait_for_ever(comm: rd.Communicator) -> None:
        comm.barrier()
        (flag / str(comm.rank)).touch()
        time.sleep(300 * comm.rank)
        comm.barrier()

    def lose() -> None:
        while len(list(flag.iterdir())) < 7:
            time.sleep(0.1)
        cluster.remove_node(extra, allow_graceful=False)

    from threading import Thread  # noqa: PLC0415 - for this one

    losing = Thread(target=lose)
    losing.start()
    with pytest.raises(RankFailed, match=r"rank \d died with no Python error\. Ray says: "):
        rd.ray.run(wait_for_ever, 7)
    losing.join()
    assert [total for _, total, _ in rd.ray.run(work, 5)] == [15.0] * 5


@pytest.fixture(scope="module")
def hosts(rays: Any) -> Iterator[Any]:
    pytest.importorskip("torch", reason="Gloo joins hosts, and that is torch's")
    rays.end()
    path = HERE.parents[1] / "engines" / "two_hosts.py"
    spec = importlib.util.spec_from_file_location("two_hosts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.Hosts() as made:
        if made.why_not:
            pytest.skip(made.why_not)
        yield made


@pytest.fixture(scope="module")
def ray_on_hosts(hosts: Any) -> Iterator[Any]:
    """`ray start` on every host; they end with their launchers, which are ours.

    It leaves a note of where it runs, which every later Ray in that folder would follow.
    """
    common = ["--num-cpus", "2", "--object-store-memory", "100000000", "--block"]
    head = ["--head", "--port", PORT, "--include-dashboard", "false"]
    joining = ["--address", f"{hosts.addresses[0]}:{PORT}"]
    folder = Path(os.environ["TMPDIR"]) / "hosts"
    environment = {
        **os.environ, "RAY_AUTH_MODE": "disabled", "ROUNDELAY_TIMEOUT": "30",
        "RAY_TMPDIR": str(folder),
    }  # fmt: skip
    folder.mkdir()
    started = []
    try:
        for host, (words, address) in enumerate(zip((head, joining), hosts.addresses, strict=True)):
            command = hosts.inside(host, *RAY, "start", *words, *common)
            started.append(subprocess.Popen(
                [*command, "--node-ip-address", address], env=environment, start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            ))  # fmt: skip
            time.sleep(8 if host == 0 else 0)  # until the head can be asked
        yield lambda *words: driven(hosts, environment, *words)
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def driven(hosts: Any, environment: dict[str, str], *words: str) -> Any:
    """Run the driver of a case on the first host, and return what it found."""
    address = f"{hosts.addresses[0]}:{PORT}"
    done = subprocess.run(
        hosts.inside(0, sys.executable, str(HERE / "drive.py"), address, *words),
        env=environment, capture_output=True, encoding="utf-8", check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_hosts_are_joined_by_gloo_and_told_of_failures(ray_on_hosts: Any) -> None:
    found = ray_on_hosts("run")
    assert found["surface"] == [["Hierarchical", 10.0, True]] * 4
    assert found["hosts"] == [[0, 1], [2, 3]]
    assert found["failed"] == "rank 3 raised ValueError: bad row"
    assert "CollectiveMismatch: The ranks made different calls" in found["differ"]
    assert found["killed"].startswith("rank 3 died with no Python error")
    assert found["others"]  # of them, told by Gloo and by the store
    assert found["left"] == []


def test_trainers_and_groups_go_over_hosts(ray_on_hosts: Any, tmp_path: Path) -> None:
    found = ray_on_hosts("train", str(tmp_path))
    assert found["trained"] == ["Hierarchical", 4, 10.0]
    assert found["collective"] == [[4.0, [0.0, 1.0, 2.0, 3.0]]] * 4
    assert found["left"] == []
