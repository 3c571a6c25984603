"""Several hosts: shared memory inside, Gloo between. Here hosts are groups of ranks of one host."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.algorithms import algorithms
from roundelay.communicator.selection import Selection
from roundelay.engines import run_schedule
from roundelay.engines.gloo import Gloo
from roundelay.engines.hierarchical import Hierarchical
from roundelay.engines.hierarchical import _calls as hierarchical_calls
from roundelay.engines.shared_memory import SharedMemory
from roundelay.errors import CollectiveMismatch
from roundelay.processes.reports import run_forked
from roundelay.processes.wire import decode, encode
from roundelay.rendezvous.by_store import StoreRendezvous
from roundelay.rendezvous.hosts import address_towards, host_identity, ranks_by_host
from roundelay.rendezvous.store import open_store
from roundelay.rendezvous.topology import HostTopology

torch = pytest.importorskip("torch")

#: Even, uneven, out of order, one rank each, one host: rank numbers by host.
HOSTS = [
    ((0, 1), (2, 3)),
    ((3, 0, 4), (1, 2)),
    ((0, 2), (1,)),
    ((0,), (1,), (2,)),
    ((0, 1),),
]


def surface(name: str = "surface") -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_hosts(
    hosts: tuple[tuple[int, ...], ...], work: Callable[[rd.Communicator], Any], timeout: float = 60
) -> list[Any]:
    """Run `work` on every rank of these hosts; return what each gave."""
    size = sum(map(len, hosts))
    with tempfile.TemporaryDirectory() as folder:

        def body(world: Any, rank: int) -> bytes:
            whole = SharedMemory(world, rank, Selection(world.size), timeout=timeout)
            inside = whole.group(next(list(there) for there in hosts if rank in there))
            assert inside is not None
            everyone = None
            if len(hosts) > 1:
                make = partial(torch.distributed.FileStore, f"{folder}/store", size)
                store = open_store(make, "the store of this test", b"", timeout)
                meeting = StoreRendezvous(store, rank, size, "127.0.0.1")
                everyone = Gloo(meeting, Selection, timeout=timeout)
            comm = rd.Communicator(Hierarchical(HostTopology(hosts, rank), inside, everyone))
            result = encode(work(comm))
            comm.close()
            return result

        return [decode(result) for result in run_forked(size, body)]


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_whole_surface(hosts: tuple[tuple[int, ...], ...], sample: Any) -> None:
    size, whole = sum(map(len, hosts)), surface()
    work = partial(whole.failures, reduced=sample.cells(whole.REDUCED, 5))
    assert on_hosts(hosts, work) == [[]] * size


@pytest.mark.parametrize("hosts", HOSTS)
def test_what_travels_as_bfloat16_keeps_its_laws(hosts: tuple[tuple[int, ...], ...]) -> None:
    """Over hosts a sum is rounded once more: that of each host, before it travels."""
    roundings = 2 if len(hosts) == 1 else 3
    work = partial(surface("wire_laws").failures, roundings=roundings)
    assert on_hosts(hosts, work) == [[]] * sum(map(len, hosts))


def test_floats_are_added_as_the_schedule_says() -> None:
    """Bit for bit what `all_reduce_hierarchical` does, which `explain` shows."""
    rng = np.random.default_rng(0)
    for count in (40_000, 40_001):
        inputs = [rng.standard_normal(count).astype(np.float32) for _ in range(4)]
        due = run_schedule(algorithms.load("all_reduce_hierarchical").schedule(4, group=2), inputs)
        found = on_hosts(HOSTS[0], _summing(inputs))
        for rank in range(4):
            np.testing.assert_array_equal(found[rank], due[rank])


def _summing(inputs: list[Any]) -> Callable[[rd.Communicator], Any]:
    return lambda comm: comm.all_reduce(inputs[comm.rank].copy())


@pytest.mark.parametrize("hosts", HOSTS)
def test_parts_that_travel_while_others_are_reduced_change_nothing(
    hosts: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(comm: rd.Communicator) -> list[bytes]:
        rng = np.random.default_rng(comm.rank)
        found = []
        for count in (20_000, 20_003):
            # Whole numbers: over three hosts Gloo's order depends on where a part begins.
            x = rng.integers(-99, 99, count).astype(np.float32)
            for op in ("sum", "avg"):
                out = np.empty_like(x)
                comm.all_reduce(x, op, out=out)
                found += [out.tobytes(), comm.start.all_reduce(x.copy(), op).wait().tobytes()]
            for root in (0, comm.size - 1):
                total = comm.reduce(x.copy(), "sum", root)
                found.append(b"" if total is None else total.tobytes())
                found.append(comm.broadcast(x.copy(), root).tobytes())
        return found

    whole = on_hosts(hosts, work)
    monkeypatch.setattr(hierarchical_calls, "PART", 8192)
    monkeypatch.setattr(hierarchical_calls, "MOST_PARTS", 5)
    assert on_hosts(hosts, work) == whole


def test_an_algorithm_that_is_asked_for_runs_over_all_ranks() -> None:
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal(100) for _ in range(4)]
    due = run_schedule(algorithms.load("all_reduce_ring").schedule(4), inputs)
    work = lambda comm: comm.all_reduce(inputs[comm.rank].copy(), algorithm="ring")  # noqa: E731
    np.testing.assert_array_equal(on_hosts(HOSTS[0], work)[0], due[0])


def test_the_mean_of_halves_does_not_overflow() -> None:
    for value, kind in ((60000.0, torch.float16), (3e37, torch.bfloat16)):

        def work(comm: rd.Communicator, kind: Any = kind, value: float = value) -> list[float]:
            tensor = torch.full((20_000,), value, dtype=kind)
            return [float(comm.all_reduce(tensor, "avg")[0]), float(tensor[-1])]

        one = float(torch.tensor(value, dtype=kind))
        assert on_hosts(HOSTS[0], work) == [[one, one]] * 4


def test_trouble_on_one_host_is_told_on_all() -> None:
    def work(comm: rd.Communicator) -> str:
        try:
            comm.barrier()  # from which some return while others are told already
            if comm.rank == 3:
                comm.close()
            else:
                comm.all_reduce(np.ones(100_000))
        except rd.RoundelayError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    for text in on_hosts(HOSTS[0], work, timeout=30):
        assert text.startswith("CollectiveMismatch: ")


#: What most ranks call, and what others call at the same time; in the words of the error.
CALLS: dict[str, Callable[[rd.Communicator], Any]] = {
    "all_reduce float64[3] op=sum": lambda comm: comm.all_reduce(np.ones(3)),
    "all_reduce float64[3] op=max": lambda comm: comm.all_reduce(np.ones(3), "max"),
    "all_reduce float64[20000] op=sum": lambda comm: comm.all_reduce(np.ones(20_000)),
    "all_reduce float64[20001] op=sum": lambda comm: comm.all_reduce(np.ones(20_001)),
    "all_reduce int64[20000] op=sum": lambda comm: comm.all_reduce(np.ones(20_000, np.int64)),
    "broadcast float64[20000] root=0": lambda comm: comm.broadcast(np.ones(20_000), 0),
    "broadcast float64[20000] root=1": lambda comm: comm.broadcast(np.ones(20_000), 1),
    "all_gather float64[20000]": lambda comm: comm.all_gather(np.ones(20_000)),
    "all_to_all float64[20000]": lambda comm: comm.all_to_all(np.ones((comm.size, 20_000))),
    "reduce_scatter float64[3] op=sum": lambda comm: comm.reduce_scatter(np.ones((comm.size, 3))),
    "barrier": lambda comm: comm.barrier(),
    "scan float64[3] op=sum": lambda comm: comm.scan(np.ones(3)),
}


def differs(pair: tuple[str, str], host: tuple[int, ...]) -> Callable[[rd.Communicator], str]:
    """Make one call on the ranks of one host and another one elsewhere."""

    def work(comm: rd.Communicator) -> str:
        try:
            CALLS[pair[comm.rank in host]](comm)
        except CollectiveMismatch as error:
            return str(error)
        return "nothing"

    return work


@pytest.mark.parametrize("hosts", [HOSTS[0], HOSTS[2], HOSTS[3]])
@pytest.mark.parametrize("pair", [*pairwise(CALLS), ("barrier", "all_reduce float64[3] op=sum")])
def test_hosts_that_call_differently_are_told_who_called_what(
    hosts: tuple[tuple[int, ...], ...], pair: tuple[str, str]
) -> None:
    found = on_hosts(hosts, differs(pair, hosts[-1]), timeout=60)
    assert len(set(found)) == 1
    title, *lines = found[0].splitlines()
    assert title == "The ranks made different calls:"
    others = sorted(rank for there in hosts[:-1] for rank in there)
    for ranks, call, line in zip((others, hosts[-1]), pair, lines, strict=True):
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        assert line.startswith(f"  {who}: {call} at ")
        assert "test_hierarchical.py:" in line


def test_ranks_of_one_host_have_one_identity_and_an_address() -> None:
    own = host_identity()
    assert rd.run(lambda _: host_identity(), 2) == [own, own]
    assert ranks_by_host([own, "elsewhere", own]) == [[0, 2], [1]]
    assert address_towards("no-such-host.invalid") == address_towards("127.0.0.1")
