"""`be_rank`: a rank for the time of a block, where Python's hooks would not be called."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.communicator.selection import Selection
from roundelay.engines import Engine
from roundelay.engines.shared_memory import SharedMemory
from roundelay.errors import CommunicationError, InvalidArgumentError, RoundelayError
from roundelay.launch.script import be_rank
from roundelay.processes.death import ServerFinished
from roundelay.rendezvous.one_host import Job


@pytest.fixture
def joining(tmp_path: Path) -> Callable[[int, int], Callable[[], Engine]]:
    job = secrets.token_hex(8)

    def joining(rank: int, size: int, attempt: int = 0) -> Callable[[], Engine]:
        at = Job(f"{job} {attempt}", size, tmp_path)
        return lambda: SharedMemory.of_host(at, rank, select=Selection, timeout=20)

    return joining


def test_init_gives_the_communicator_of_the_block_and_only_there(joining: Any) -> None:
    with be_rank(joining(0, 1)) as comm:
        assert rd.init() is comm is rd.init()
    with pytest.raises(InvalidArgumentError, match="closed"):
        comm.barrier()
    with be_rank(joining(0, 1)) as other:
        assert rd.init() is other is not comm


def test_a_process_is_one_rank_at_a_time(joining: Any) -> None:
    def never() -> Engine:
        raise AssertionError("joined")

    with (
        be_rank(joining(0, 1)),
        pytest.raises(InvalidArgumentError, match="is rank 0 of 1 already"),
        be_rank(never),
    ):
        pass
    with pytest.raises(ZeroDivisionError), be_rank(lambda: 1 // 0):  # type: ignore[arg-type,return-value]
        pass
    with be_rank(joining(0, 1)):
        assert rd.init().size == 1


@pytest.mark.parametrize("error", [ValueError("bad row"), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_is_told_to_the_others_and_the_ranks_can_meet_again(
    joining: Any, error: BaseException
) -> None:
    def work(outer: rd.Communicator) -> Any:
        def fails() -> None:
            with be_rank(joining(outer.rank, 2)) as comm:
                if comm.rank == 1:
                    raise error
                comm.barrier()

        with pytest.raises(CommunicationError if outer.rank == 0 else type(error)) as caught:
            fails()
        with be_rank(joining(outer.rank, 2, attempt=1)) as comm:
            return str(caught.value), comm.all_reduce(np.ones(1)).item()

    (told, sum_0), (_, sum_1) = rd.run(work, 2)
    assert "ank 1" in told
    assert ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__) in told
    assert sum_0 == sum_1 == 2


def test_a_server_that_is_done_ends_as_if_it_had_returned(joining: Any) -> None:
    def work(outer: rd.Communicator) -> str:
        with be_rank(joining(outer.rank, 2)) as comm:
            if comm.rank == 0:
                raise ServerFinished
        return "went on"

    assert rd.run(work, 2) == ["went on", "went on"]


def test_ranks_that_made_different_calls_are_told_the_function(joining: Any) -> None:
    def work(outer: rd.Communicator) -> str:
        try:
            with be_rank(joining(outer.rank, 2), work) as comm:
                if comm.rank == 0:
                    comm.barrier()
        except RoundelayError as error:
            return f"{type(error).__name__} {error}"
        return ""

    for said in rd.run(work, 2):
        assert said.startswith("CollectiveMismatch")
        assert f"returned from its function at {__file__}" in said
