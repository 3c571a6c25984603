"""Two network namespaces as hosts: `rd.init` finds them, joins them, and tells what goes wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.engines.hierarchical import Hierarchical
from roundelay.engines.shared_memory import SharedMemory
from roundelay.rendezvous.by_store import UNSIGNED
from roundelay.rendezvous.hosts import host_identity

torch = pytest.importorskip("torch")
TESTS = Path(__file__).parent.parent
EXAMPLE = TESTS.parent / "examples" / "14_two_hosts.py"


def loaded(name: str) -> Any:
    path = TESTS / "engines" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    with loaded("two_hosts").Hosts() as made:
        if made.why_not:
            pytest.skip(made.why_not)
        yield made


def results(started: list[Any]) -> list[Any]:
    found = [rank.result() for rank in started]
    assert [said for good, said in found if not good] == []
    return [said for _, said in found]


def test_a_namespace_of_the_network_is_another_host(hosts: Any) -> None:
    told = results(hosts.start((2, 1), host_identity))
    assert told[0] == told[1] != told[2]
    assert host_identity() not in told


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1)])
def test_the_whole_surface(hosts: Any, ranks: tuple[int, int], sample: Any) -> None:
    surface = loaded("surface")
    reduced = sample.cells(surface.REDUCED, 5)

    def work() -> Any:
        comm = rd.init()
        found = surface.failures(comm, reduced)
        comm.close()
        return type(comm._engine).__name__, found

    due: tuple[str, list[str]] = (Hierarchical.__name__, [])
    assert results(hosts.start(ranks, work)) == [due] * sum(ranks)


def test_one_host_by_its_address_is_joined_by_the_store_and_shares_memory(hosts: Any) -> None:
    def work() -> Any:
        del os.environ["LOCAL_WORLD_SIZE"]  # so that only the store can tell
        comm = rd.init()
        total = comm.all_reduce(np.ones(1))[0]
        comm.close()
        return type(comm._engine).__name__, float(total)

    assert results(hosts.start((2, 0), work)) == [(SharedMemory.__name__, 2.0)] * 2


def test_gloo_alone_joins_them_too(hosts: Any) -> None:
    def work() -> float:
        comm = rd.init("gloo")
        total = float(comm.all_reduce(np.ones(1000))[-1])
        comm.close()
        return total

    assert results(hosts.start((1, 1), work)) == [2.0, 2.0]


def test_shared_memory_alone_is_refused(hosts: Any) -> None:
    def work() -> str:
        with pytest.raises(rd.RoundelayError) as caught:
            rd.init("shared_memory")
        return str(caught.value)

    for told in results(hosts.start((1, 1), work)):
        assert "joins the ranks of one host, but this job has several" in told


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_dies_is_noticed_on_both_hosts(hosts: Any, victim: int) -> None:
    def work() -> Any:
        comm = rd.init(timeout=60)
        comm.barrier()
        if comm.rank == victim:
            os.kill(os.getpid(), 9)
        start = time.monotonic()
        try:
            comm.all_reduce(np.ones(100_000))
            comm.barrier()
            told = "nothing"
        except rd.RoundelayError as error:
            told = type(error).__name__
        return told, time.monotonic() - start < 20

    found = [rank.result() for rank in hosts.start((2, 2), work)]
    assert found.pop(victim) == (False, "ended with -9")
    assert found == [(True, ("PeerLost", True))] * 3


HERE = 3  # seconds that a call waits for the others


def looping(rank: int, ready: Path) -> str:
    """Make calls until one of them fails, and return how."""
    comm = rd.init(timeout=HERE)
    comm.barrier()
    (ready / str(rank)).touch()
    try:
        for _ in range(10_000):
            comm.all_reduce(np.ones(30_000))
            time.sleep(0.01)
    except rd.RoundelayError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        comm.close()
    return "nothing"


@pytest.mark.parametrize(("how", "host"), [("cut", 0), ("cut", 2), ("freeze", 0), ("freeze", 1)])
def test_a_host_that_is_cut_off_or_frozen_is_an_error_on_every_rank(
    how: str, host: int, tmp_path: Path
) -> None:
    ranks = (1, 2, 1)
    of_host = [number for number, count in enumerate(ranks) for _ in range(count)]
    with loaded("two_hosts").Hosts(len(ranks)) as made:
        if made.why_not:
            pytest.skip(made.why_not)
        started = made.start(ranks, lambda: looping(int(os.environ["RANK"]), tmp_path))
        while len(list(tmp_path.iterdir())) < sum(ranks):
            time.sleep(0.05)
        stopped = [rank for rank, where in enumerate(of_host) if how == "freeze" and where == host]
        for rank in stopped:
            os.kill(started[rank].pid, signal.SIGSTOP)
        if how == "cut":
            made.cut(host)
        awake = [rank for rank in range(sum(ranks)) if rank not in stopped]
        told = {rank: started[rank].result() for rank in awake}
        for rank in stopped:
            os.kill(started[rank].pid, signal.SIGCONT)
            told[rank] = started[rank].result()
    assert all(good for good, _ in told.values()), told
    for rank, (_, said) in sorted(told.items()):
        assert said.startswith(("CollectiveTimeout: ", "PeerLost: ")), said
        elsewhere = of_host[rank] != host
        if elsewhere and host != 0:  # the store tells who is silent
            assert f"({made.addresses[host]})" in said
        elif elsewhere or how == "cut":
            assert "no sign of life" in said or f"the store at {made.addresses[0]}:" in said


@pytest.mark.parametrize("secret", ["", "known to all of the ranks"])
def test_several_hosts_without_a_secret_say_so_once(hosts: Any, secret: str) -> None:
    def work() -> str:
        os.environ["ROUNDELAY_SECRET"] = secret
        with contextlib.redirect_stderr(io.StringIO()) as said:
            rd.init().close()
        return said.getvalue()

    said = results(hosts.start((1, 2), work))
    assert said[1:] == ["", ""]
    assert said[0] == ("" if secret else UNSIGNED)


def test_hosts_with_different_secrets_do_not_join(hosts: Any) -> None:
    def work() -> str:
        os.environ["ROUNDELAY_SECRET"] = "the secret of rank " + os.environ["RANK"]
        with pytest.raises(rd.RoundelayError) as caught:
            rd.init(timeout=20)
        time.sleep(2)  # so that the other can still read the store
        return str(caught.value)

    for rank, told in enumerate(results(hosts.start((1, 1), work))):
        assert f"told/{1 - rank} does not carry the signature of this job" in told
        assert "ROUNDELAY_SECRET is not the same on all hosts" in told


def on_pods(hosts: Any, script: Path, folder: Path) -> list[str]:
    """Return what a script's ranks print, two on each host, once all have ended well."""
    started = []
    for host in range(2):
        environ = {
            **os.environ, "TMPDIR": str(folder),
            # The five that Kubeflow's Trainer sets; PyTorchJob adds a RANK that is the pod's.
            "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(host),
            "PET_MASTER_ADDR": "10.213.77.1", "PET_MASTER_PORT": "29533",
            **({"RANK": "1", "WORLD_SIZE": "4"} if host else {}),
        }  # fmt: skip
        command = hosts.inside(host, sys.executable, "-m", "roundelay", "run", str(script))
        started.append(
            subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    ended = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    return [output for output, _ in ended]


def test_pods_that_are_told_their_place_by_variables_alone_run_one_job(
    hosts: Any, tmp_path: Path
) -> None:
    ended = on_pods(hosts, EXAMPLE, tmp_path)
    # torchrun's ranks share an output and print unbuffered: the ends of lines may come late.
    printed = sorted(
        line for output in ended for line in re.findall(r"rank \d of.*?on rank \d", output)
    )
    text = EXAMPLE.read_text(encoding="utf-8")
    said = [line.split("] ", 1)[1] for line in text.splitlines() if line.strip().startswith("[")]
    assert printed == said != []


def test_a_script_may_close_before_it_ends_and_twice(hosts: Any, tmp_path: Path) -> None:
    script = tmp_path / "closes.py"
    script.write_text(
        "import roundelay as rd\n"
        "comm = rd.init()\n"
        "comm.barrier()\n"
        "comm.close()\n"
        "comm.close()\n"
        "print('closed')\n"
    )
    assert sum(output.count("closed") for output in on_pods(hosts, script, tmp_path)) == 4
