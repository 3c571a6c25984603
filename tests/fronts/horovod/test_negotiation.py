"""Operations in any order, from any thread, that nobody waits for, or that a rank never makes."""

from __future__ import annotations

import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import roundelay as rd
import roundelay.horovod.torch as hvd
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod import session
from roundelay.fronts.horovod.turns import Turns

SIZES = (2, 3, 4, 7)
SHAPES = [(), (3,), (0,), (17, 2), (8193,), (5,), (2, 2, 2), (100,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32]


def on_ranks(body: Callable[[], Any], ranks: int, timeout: float = 60.0) -> list[Any]:
    """Run a body after `hvd.init`, with a timeout of its own."""

    def inner(comm: rd.Communicator) -> Any:
        torch.set_num_threads(1)
        session.adopt(comm)
        hvd.init()
        try:
            return body()
        finally:
            session.end()
            session.adopt(None)

    return rd.run(inner, ranks=ranks, timeout=timeout, allow_pickle=True)


def error_of(call: Callable[[], Any]) -> str:
    try:
        return f"no error, but {call()}"
    except (InvalidArgumentError, hvd.HorovodInternalError, RuntimeWarning) as error:
        return str(error)


def many_results(*, mixed: bool) -> list[torch.Tensor]:
    """All-reduce many tensors, each alone, or submitted by every rank in an order of its own."""
    rank = hvd.rank()
    generator = torch.Generator().manual_seed(rank)
    tensors = {
        f"{dtype} {shape} {op}": (torch.randn(shape, generator=generator) * 3).to(dtype)
        for dtype in DTYPES
        for shape in SHAPES
        for op in (hvd.Sum, hvd.Average, hvd.Max)
    }
    turned = torch.arange(6.0).view(2, 3).t() + rank  # not contiguous
    grouped = [turned, torch.ones(4) / (rank + 1), torch.ones(2, dtype=torch.int64)]
    if not mixed:
        results = [hvd.allreduce(x, name=name, op=int(name[-1])) for name, x in tensors.items()]
        return results + [hvd.allreduce(x, op=hvd.Sum) for x in grouped]
    order = list(tensors)
    random.Random(rank).shuffle(order)
    begun = {
        name: hvd.allreduce_async(tensors[name], name=name, op=int(name[-1])) for name in order
    }
    results = [hvd.synchronize(begun[name]) for name in tensors]
    return results + hvd.grouped_allreduce(grouped, op=hvd.Sum)


@pytest.mark.parametrize("ranks", SIZES)
def test_tensors_in_any_order_have_the_bits_of_each_alone(ranks: int) -> None:
    alone = on_ranks(partial(many_results, mixed=False), ranks)
    mixed = on_ranks(partial(many_results, mixed=True), ranks)
    for some in (*alone, *mixed):
        assert all(map(torch.equal, some, alone[0]))


def never_made(lonely: int, before: int) -> list[str]:
    """Make an operation that the other ranks do not, alone or after others; then go on."""
    for _ in range(before):
        hvd.barrier()  # so that who waits listens by itself, and no thread does
    told = []
    if hvd.rank() == lonely:
        told = [error_of(lambda: hvd.allreduce(torch.ones(1), name="lonely"))]
    else:
        time.sleep(4.2)  # later than the timeout, and before that of what comes next
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="all")
    return [*told, str(total.item())]


@pytest.mark.parametrize("before", [0, 20])
@pytest.mark.parametrize("lonely", [0, 1])
def test_what_others_do_not_make_in_time_fails_alone(lonely: int, before: int) -> None:
    found = on_ranks(partial(never_made, lonely, before), 3, timeout=3.0)
    others = [rank for rank in range(3) if rank != lonely]
    told = f"allreduce 'lonely': ranks {others[0]}, {others[1]} have not submitted it within 3 s"
    assert found[lonely][0].startswith(told)
    assert [one[-1] for one in found] == ["3.0"] * 3


def missed(missing: int) -> str:
    if hvd.rank() != missing:
        return error_of(lambda: hvd.allreduce(torch.ones(1), name="miss"))
    time.sleep(7)
    return ""


@pytest.mark.parametrize("missing", [0, 1])
def test_who_waits_long_says_for_which_rank_and_until_when(
    missing: int, capfd: pytest.CaptureFixture[str]
) -> None:
    on_ranks(partial(missed, missing), 3, timeout=6.5)
    lines = sorted(capfd.readouterr().err.splitlines())
    for line, rank in zip(lines, sorted({0, 1, 2} - {missing}), strict=True):
        assert line.startswith(
            f"roundelay: rank {rank} has waited 5 s in allreduce 'miss' at test_negotiation.py:"
        )
        assert line.endswith(f": rank {missing} has not submitted it; it gives up after 6.5 s.")


def test_an_alarm_that_fails_is_told_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    escaped: list[Any] = []
    told: list[BaseException] = []
    over = threading.Event()

    def fails() -> None:
        raise ConnectionError("rank 0 has gone")

    def broke(error: BaseException) -> None:
        told.append(error)
        over.set()

    monkeypatch.setattr(threading, "excepthook", escaped.append)
    turns = Turns(lambda _: over.wait(0.01), lambda: True, broke)
    turns.take(over.is_set, [(0.02, fails)])
    turns.stop()
    turns.end(60.0)
    assert [str(error) for error in told] == ["rank 0 has gone"]
    assert not escaped


def two_kinds() -> tuple[str, float, float]:
    began, x = time.monotonic(), torch.ones(1)
    call = hvd.allreduce if hvd.rank() == 0 else hvd.allgather
    told = error_of(lambda: call(x, name="x"))
    took = time.monotonic() - began
    return told, took, hvd.allreduce(x, op=hvd.Sum, name="x").item()


def test_one_name_of_two_kinds_is_told_long_before_the_timeout() -> None:
    for told, took, total in on_ranks(two_kinds, 2):
        assert told.startswith("'x' is not one operation: rank 0 waits for allreduce at test_neg")
        assert "rank 1 waits for allgather at test_negotiation.py:" in told
        assert took < 30
        assert total == 2.0


def left_behind() -> list[str]:
    if hvd.rank() == 0:
        hvd.allreduce_async(torch.ones(1), name="left")
    heard = hvd.allreduce_async(torch.ones(1 + hvd.rank()), name="heard")
    assert "needs the same shape" in error_of(lambda: hvd.synchronize(heard))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.shutdown()
    return [str(one.message) for one in caught]


def test_what_never_ran_and_nobody_waited_for_is_warned_of_at_the_end() -> None:
    first, second = on_ranks(left_behind, 2)
    assert len(first) == 1
    assert "allreduce 'left' at test_negotiation.py:" in first[0]
    assert second == []


def shifted(shape: int) -> tuple[str, list[str]]:
    """Make one call without a name more on rank 0 than on others."""
    more = hvd.allreduce_async(torch.ones(shape)) if hvd.rank() == 0 else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if more is None:
            told = error_of(lambda: hvd.allreduce(torch.ones(2)))
        else:
            told = error_of(lambda: hvd.synchronize(more))
    return told, [str(one.message) for one in caught if one.category is RuntimeWarning]


@pytest.mark.parametrize("ranks", SIZES)
def test_calls_without_a_name_on_different_lines_are_told_of(ranks: int) -> None:
    for told, said in on_ranks(partial(shifted, 2), ranks):
        assert told.startswith("no error")
        assert len(said) == 1
        assert (
            "allreduce without a name is made of calls by rank 0 at test_negotiation.py:" in said[0]
        )
        assert said[0].count("test_negotiation.py:") == 2


@pytest.mark.parametrize("ranks", SIZES)
def test_a_mismatch_of_calls_without_a_name_tells_both_lines(ranks: int) -> None:
    for told, said in on_ranks(partial(shifted, 5), ranks):
        assert "needs the same shape on every rank, but rank 0 has (5,), rank 1 has (2,)" in told
        assert told.count("test_negotiation.py:") == 2
        assert not said


def warned_as_error() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        if hvd.rank() == 0:
            told = error_of(lambda: hvd.allreduce(torch.ones(1)))
        else:
            told = error_of(lambda: hvd.allreduce(torch.ones(1)))
        return f"{told} {hvd.allreduce(torch.ones(1), op=hvd.Sum, name='then').item()}"


def test_who_wants_an_error_gets_one_for_that_operation() -> None:
    for told in on_ranks(warned_as_error, 2):
        assert "pair up by their number" in told
        assert told.endswith(" 2.0")


def in_threads() -> list[float]:
    """Wait on several threads, each for an operation of its own, in different orders."""
    found = [0.0] * 6

    def wait(number: int) -> None:
        for turn in range(10):
            x = torch.tensor([float(number + turn)])
            found[number] = hvd.allreduce(x, name=f"{number} {turn}").item()

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(6)]
    for thread in threads if hvd.rank() else reversed(threads):
        thread.start()
    for _ in range(10):
        hvd.barrier()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("ranks", SIZES)
def test_threads_wait_for_operations_of_their_own(ranks: int) -> None:
    assert on_ranks(in_threads, ranks) == [[9.0, 10.0, 11.0, 12.0, 13.0, 14.0]] * ranks


def nobody_waits() -> list[float]:
    """Begin after operations that were waited for, and look whether it ends by itself."""
    for _ in range(20):
        hvd.barrier()
    x = torch.ones(2)
    handle = hvd.allreduce_async_(x, name="alone", op=hvd.Sum)
    until = time.monotonic() + 30
    while not hvd.poll(handle) and time.monotonic() < until:
        time.sleep(0.001)
    return x.tolist()


@pytest.mark.parametrize("ranks", SIZES)
def test_operations_run_though_nobody_waits(ranks: int) -> None:
    assert on_ranks(nobody_waits, ranks) == [[float(ranks)] * 2] * ranks


def in_a_handler() -> list[str]:
    for _ in range(20):
        hvd.barrier()
    told: list[str] = []
    if hvd.rank() == 0:
        call = partial(hvd.allreduce, torch.ones(1), name="inner")
        signal.signal(signal.SIGALRM, lambda *_: told.append(error_of(call)))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        time.sleep(1.0)
    told.append(str(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="outer").item()))
    return told


def test_waiting_inside_of_waiting_is_refused() -> None:
    (inner, outer), other = on_ranks(in_a_handler, 2)
    assert "a signal handler, a finalizer or a hook can't" in inner
    assert [outer] == other == ["2.0"]


def while_it_is_sent() -> list[str]:
    """Wait, and begin something, at the very moment at which a message leaves."""
    told, begun = [], []
    control: Any = session.current("test").negotiation._control
    if hvd.rank() == 1:
        send = control._send_said

        def interrupted() -> None:
            control._send_said = send
            told.append(error_of(lambda: hvd.allreduce(torch.ones(1), name="inner")))
            begun.append(hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="begun"))
            send()

        control._send_said = interrupted
    told.append(str(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="outer").item()))
    begun = begun or [hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="begun")]
    return [*told, str(hvd.synchronize(begun[0]).item())]


def test_waiting_inside_of_sending_is_refused_and_nothing_is_lost() -> None:
    other, (inner, *mine) = on_ranks(while_it_is_sent, 2, timeout=20.0)
    assert "a signal handler, a finalizer or a hook can't" in inner
    assert mine == other == ["2.0", "2.0"]


def removed() -> list[str]:
    """Remove a process set in which an operation still waits."""
    pair = hvd.add_process_set([0, 1])
    told = []
    if hvd.rank() == 1:
        begun = hvd.allreduce_async(torch.ones(1), name="late", process_set=pair)
        hvd.remove_process_set(pair)
        told.append(error_of(lambda: hvd.synchronize(begun)))
    else:
        hvd.remove_process_set(pair)
    return [*told, str(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())]


def test_what_waits_in_a_process_set_fails_with_it() -> None:
    told = "allreduce 'late' in process set 1: its process set was removed."
    assert on_ranks(removed, 3) == [["3.0"], [told, "3.0"], ["3.0"]]
