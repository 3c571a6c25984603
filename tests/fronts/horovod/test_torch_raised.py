"""A rank of hvd that ends by an exception is told by it, whatever shuts down on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import roundelay.horovod.torch as hvd
from roundelay.errors import RankFailed
from roundelay.horovod import run

Step = Callable[[], None]


def in_finally(step: Step) -> None:
    try:
        step()
    finally:
        hvd.shutdown()


def in_except(step: Step) -> None:
    try:
        step()
    except BaseException:
        hvd.shutdown()
        raise


def not_at_all(step: Step) -> None:
    step()


CLEANED = [in_finally, in_except, not_at_all]

#: What the others wait for, which the rank that is gone does not submit.
WAITED: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: hvd.allreduce(torch.ones(3), name="a"),
    "begun": lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="b")),
    "barrier": hvd.barrier,
    "join": hvd.join,
    "process set": lambda: hvd.add_process_set([0, 1]),
}


@pytest.mark.parametrize("clean", CLEANED)
@pytest.mark.parametrize("waited", WAITED)
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_users_error_is_raised_by_run(
    culprit: int, waited: str, clean: Callable[[Step], None]
) -> None:
    def step() -> None:
        hvd.allreduce(torch.ones(3), name="first")
        if hvd.rank() == culprit:
            raise ValueError("no data")
        WAITED[waited]()

    def body() -> None:
        torch.set_num_threads(1)
        hvd.init()
        clean(step)

    with pytest.raises(RankFailed) as caught:
        run(body, np=3)
    assert str(caught.value) == f"rank {culprit} raised ValueError: no data"


@pytest.mark.parametrize("clean", CLEANED)
def test_an_exception_that_is_handled_shuts_down_in_order(clean: Callable[[Step], None]) -> None:
    def step() -> None:
        hvd.allreduce(torch.ones(3), name="a")
        raise StopIteration

    def body() -> str:
        torch.set_num_threads(1)
        hvd.init()
        try:
            clean(step)
        except StopIteration:
            return "done"
        return "not raised"

    assert run(body, np=3) == ["done"] * 3
