"""`rd.ray.run` on a real local Ray: results, failures, and what is refused."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import (
    InvalidArgumentError,
    RankFailed,
    RendezvousError,
    RoundelayError,
    UnsendableError,
)

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'roundelay[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers have no tests


@pytest.mark.usefixtures("one_node")
def test_results_come_in_rank_order_by_shared_memory_and_without_torch() -> None:
    given = np.arange(3.0)

    def work(comm: rd.Communicator, factor: int) -> Any:
        same = rd.init() is comm is rd.init()
        total = comm.all_reduce(given + comm.rank * factor)
        return comm.rank, total.tolist(), same, type(comm._engine).__name__, "torch" in sys.modules

    due = (given * 3 + 30).tolist()
    found = rd.ray.run(work, 3, (10,))
    assert found == [(rank, due, True, "SharedMemory", False) for rank in range(3)]


def fail(comm: rd.Communicator) -> None:
    if comm.rank == 1:
        raise ValueError("bad row")
    comm.barrier()


def die(comm: rd.Communicator) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def differ(comm: rd.Communicator) -> None:
    comm.all_reduce(np.ones(comm.rank + 1))


def leave_early(comm: rd.Communicator) -> None:
    if comm.rank == 1:
        comm.barrier()


def never_come(comm: rd.Communicator) -> None:
    if comm.rank == 1:
        time.sleep(60)
    comm.barrier()


def give_a_lock(comm: rd.Communicator) -> Any:
    return threading.Lock() if comm.rank == 1 else comm.barrier()


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize(
    ("work", "said"),
    [
        (fail, r"^rank 1 raised ValueError: bad row$"),
        (die, r"^rank 1 died with no Python error\. Ray says: "),
        (differ, r"CollectiveMismatch: .*\n.*float64\[1\].*test_run.py:\d+\n.*float64\[2\]"),
        (leave_early, r"CollectiveMismatch: .*\n.*rank 0: returned .*test_run.py:\d+\n.*barrier"),
        (never_come, r"^rank 0 raised CollectiveTimeout: .*[Rr]ank 1"),
        (give_a_lock, r"^rank 0 raised CollectiveMismatch"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_failure_is_raised_by_the_name_of_its_rank(work: Any, said: str) -> None:
    with pytest.raises(RankFailed) as caught:
        rd.ray.run(work, 2, timeout=2 if work is never_come else None)
    assert re.search(said, str(caught.value), re.DOTALL), str(caught.value)
    if work is fail:
        assert "in fail" in caught.value.traceback


@pytest.mark.usefixtures("one_node")
def test_a_result_that_cannot_be_pickled_is_told() -> None:
    said = r"can't bring back what rank 0 returned: .*pickle '_thread.lock'"
    for wrap in (lambda one: one, lambda one: [1, {"a": one}]):
        with pytest.raises(UnsendableError, match=said):
            rd.ray.run(lambda comm, wrap=wrap: wrap(threading.Lock()) if comm.rank == 0 else 3, 2)


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"ranks": 8}, InvalidArgumentError,
         r"8 ranks of num_cpus=1 needs 8 CPUs, .* has 4, .*ranks=4, or num_cpus=0.5 .*wait=600"),
        ({"ranks": 1, "num_cpus": 5}, InvalidArgumentError, r"needs 5 CPUs.*less num_cpus"),
        ({"num_gpus": 1}, InvalidArgumentError, r"of num_gpus=1 needs 4 GPUs, .* has 0"),
        ({"ranks": 0}, InvalidArgumentError, "ranks is a whole number from 1"),
        ({"num_cpus": -1}, InvalidArgumentError, "num_cpus of a rank is a number from 0"),
        ({"num_cpus": "1"}, InvalidArgumentError, "num_cpus is a number"),
        ({"timeout": 0}, InvalidArgumentError, "timeout is a positive number"),
        ({"wait": 0}, InvalidArgumentError, "wait is a positive number"),
        ({"args": "word"}, InvalidArgumentError, "args is a tuple"),
        ({"fn": 3}, InvalidArgumentError, "run needs a function"),
        ({"runtime_env": "A=1"}, InvalidArgumentError, "runtime_env of rd.ray.run is a dict"),
        ({"ranks": 1, "runtime_env": {"env_vars": {"A": 1}}}, InvalidArgumentError,
         r"Ray refuses runtime_env=\{'env_vars': \{'A': 1\}\} of rd.ray.run: .*Dict\[str, str\]"),
        ({"ranks": 1, "runtime_env": {"working_dir": "/none"}}, InvalidArgumentError,
         "Ray refuses runtime_env=.*/none is not a valid path"),
        ({"args": (threading.Lock(),)}, UnsendableError,
         r"can't send the arguments \(args\[0\]\) to .*lock"),
        ({"args": (1, [threading.Lock()], 2, threading.RLock())}, UnsendableError,
         r"can't send the arguments \(args\[1\], args\[3\]\) to .*lock"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    options: dict[str, Any], error: type[RoundelayError], said: str
) -> None:
    with pytest.raises(error, match=said):
        rd.ray.run(**{"fn": lambda comm: comm.rank, **options})


@pytest.mark.usefixtures("one_node")
def test_a_closure_that_cannot_be_pickled_names_the_variable() -> None:
    my_lock = threading.Lock()

    def work(_: rd.Communicator) -> Any:
        return my_lock.locked()

    with pytest.raises(UnsendableError, match=r"the function \(.*my_lock.*\).*cannot pickle"):
        rd.ray.run(work, 2)


@pytest.mark.usefixtures("one_node")
def test_room_that_others_use_is_waited_for_and_no_longer() -> None:
    held = ray.util.placement_group([{"CPU": 3}])
    assert held.wait(30)
    try:
        with pytest.raises(RendezvousError, match="no room for 2 ranks of 1 CPU each within 1 s"):
            rd.ray.run(lambda comm: comm.rank, 2, wait=1)
    finally:
        ray.util.remove_placement_group(held)
    states = {each["state"] for each in ray.util.placement_group_table().values()}
    assert states == {"REMOVED"}


@pytest.mark.usefixtures("one_node")
def test_ranks_may_share_cpus_and_start_ranks_of_their_own() -> None:
    def outer(comm: rd.Communicator) -> Any:
        def inner(mine: rd.Communicator) -> Any:
            return comm_rank, mine.all_reduce(np.array([1])).item(), rd.init().size

        comm_rank = comm.rank
        return rd.ray.run(inner, 2, num_cpus=0) if comm.rank == 0 else []

    assert rd.ray.run(outer, 5, num_cpus=0.5) == [[(0, 2, 2), (0, 2, 2)], [], [], [], []]


@pytest.mark.usefixtures("one_node")
def test_a_process_is_a_rank_of_one_job() -> None:
    def work(_: rd.Communicator) -> str:
        from roundelay.fronts.ray.store import join  # noqa: PLC0415 - in the rank
        from roundelay.launch.script import be_rank  # noqa: PLC0415

        try:
            with be_rank(lambda: join("another", 0, 1)):
                return "went in"
        except InvalidArgumentError as error:
            return str(error)

    [said] = rd.ray.run(work, 1)
    assert said.startswith("This process is rank 0 of 1 already")


def test_where_ray_is_not_initialised_it_starts_and_stays(
    rays: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rays.end()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        assert rd.ray.run(lambda comm: comm.size, 1) == [1]
        assert ray.is_initialized()
    finally:
        rays.end()
