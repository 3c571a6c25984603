"""`import roundelay.horovod.torch as hvd`: what Horovod documents, on three ranks of one world."""

# Some of torch has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import roundelay.horovod.torch as hvd
from roundelay.errors import InvalidArgumentError
from roundelay.horovod import run

RANKS = 3
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
          torch.uint8]  # fmt: skip
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def each(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return what all ranks have: small whole numbers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 9, (RANKS, *shape), generator=generator).to(dtype)


def refused(kind: type[Exception], word: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"not refused: {word}")


@case
def places() -> None:
    rank = hvd.rank()
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (RANKS, RANKS, 1)
    assert (hvd.local_rank(), hvd.cross_rank()) == (rank, 0)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert hvd.allgather(torch.tensor([rank])).tolist() == [0, 1, 2]


@case
def averages_of_whole_numbers_are_exact() -> None:
    ends = {torch.uint8: [255, 254, 1], torch.int8: [-128, 127, -1], torch.uint16: [65535, 2, 1],
            torch.int64: [2**62 + 1, -(2**63), -7]}  # fmt: skip
    for dtype, numbers in ends.items():
        every = [[number, numbers[(at + 1) % 3]] for at, number in enumerate(numbers)]
        mine = torch.tensor(every[hvd.rank()]).to(dtype)
        want = []
        for column in zip(*every, strict=True):
            total = sum(column)
            want.append(abs(total) // RANKS * (1 if total >= 0 else -1))
        assert hvd.allreduce(mine).tolist() == want, (dtype, want)
        rows = torch.stack([mine] * RANKS)
        assert hvd.reducescatter(rows, op=hvd.Average).tolist() == [want], dtype
    refused(
        InvalidArgumentError, "takes no torch.bool", lambda: hvd.allreduce(torch.tensor([True]))
    )


@case
def objects_without_a_name_need_no_type_in_common() -> None:
    assert hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None) == {"epoch": 3}
    found = hvd.allgather_object(hvd.rank() or "first")
    assert found == ["first", *range(1, RANKS)]


@case
def names_are_free_once_their_operation_is_done() -> None:
    hvd.allreduce_async(torch.ones(2), name="given up")  # nobody waits for it
    hvd.barrier()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="given up").tolist() == [RANKS, RANKS]


@case
def sparse_tensors_of_other_shapes_fail_as_one_operation() -> None:
    rank = hvd.rank()
    mine = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (3 + rank,),
                                   check_invariants=True)  # fmt: skip
    wait = hvd.sparse_allreduce_async(mine, "other", hvd.Sum)
    refused(hvd.HorovodInternalError, "needs one shape on every rank", wait)
    assert hvd.allreduce(torch.ones(()), op=hvd.Sum) == RANKS


@case
def an_optimizers_state_comes_as_it_is() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.1 + hvd.rank(), momentum=0.9)
    state = {"kind": "warm", "half": torch.ones(2, dtype=torch.bfloat16),
             "flag": torch.tensor(data=True), "many": torch.tensor([2**53 + 1])}  # fmt: skip
    if hvd.rank() == 0:
        optimizer.state[p] = state
    hvd.broadcast_optimizer_state(optimizer, 0)
    found = optimizer.state[p]
    assert found["kind"] == "warm"
    assert all(found[key].dtype == state[key].dtype for key in ("half", "flag", "many"))  # type: ignore[attr-defined]
    assert found["many"].item() == 2**53 + 1
    assert optimizer.param_groups[0]["lr"] == 0.1


@case
def allreduce_of_every_dtype_and_reduction() -> None:
    for dtype in DTYPES:
        whole = each(dtype, 4, 2)
        mine = whole[hvd.rank()]
        exact = whole.double()
        want = {
            hvd.Sum: exact.sum(0), hvd.Min: exact.amin(0), hvd.Max: exact.amax(0),
            hvd.Product: exact.prod(0),
        }  # fmt: skip
        if dtype.is_floating_point:
            want[hvd.Average] = exact.mean(0).to(dtype).double()
        else:
            want[hvd.Average] = (exact.sum(0) / RANKS).trunc()
        for op, expected in want.items():
            kept = mine.clone()
            result = hvd.allreduce(mine, op=op)
            assert torch.equal(mine, kept)
            assert result.dtype == dtype
            assert torch.equal(result, expected.to(dtype)), (dtype, op)
            assert hvd.allreduce_(kept, op=op) is kept
            assert torch.equal(kept, result)
            assert torch.equal(hvd.synchronize(hvd.allreduce_async(mine, op=op)), result)


@case
def factors_before_and_after() -> None:
    for dtype in (torch.float64, torch.int64):
        whole = each(dtype, 6)
        scaled = (whole.double() * 0.5).to(dtype)
        before = hvd.allreduce(whole[hvd.rank()], op=hvd.Sum, prescale_factor=0.5)
        assert torch.equal(before, scaled.sum(0))
        after = hvd.allreduce(whole[hvd.rank()], op=hvd.Sum, postscale_factor=0.5)
        assert torch.equal(after, (whole.sum(0).double() * 0.5).to(dtype))


@case
def groups_strides_and_compression() -> None:
    whole = each(torch.float32, 4, 6)
    mine = whole[hvd.rank()]
    first, second = hvd.grouped_allreduce([mine, mine[0]], op=hvd.Sum)
    assert torch.equal(first, whole.sum(0))
    assert torch.equal(second, whole.sum(0)[0])
    turned = mine.clone().t()  # not contiguous
    hvd.allreduce_(turned, op=hvd.Sum)
    assert torch.equal(turned.t(), whole.sum(0))
    half = hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32
    assert torch.equal(half, whole.sum(0))


@case
def uneven_rows_are_gathered_and_scattered() -> None:
    rank = hvd.rank()
    for dtype in DTYPES:
        rows = torch.full((rank + 1, 2), rank, dtype=dtype)
        gathered = hvd.allgather(rows)
        assert gathered[:, 0].tolist() == [0, 1, 1, 2, 2, 2]
        assert hvd.grouped_allgather([rows, rows[:1]])[1][:, 1].tolist() == [0, 1, 2]
        whole = each(dtype, 7)
        share = hvd.reducescatter(whole[rank], op=hvd.Sum)
        assert torch.equal(share, whole.sum(0).to(dtype).split([3, 2, 2])[rank])


@case
def everybody_sends_to_everybody() -> None:
    rank = hvd.rank()
    # Rank r sends q + 1 rows to rank q, all with its own number.
    rows, splits = torch.full((6,), rank), torch.tensor([1, 2, 3], dtype=torch.int32)
    came, told = hvd.alltoall(rows, splits)
    assert told.tolist() == [rank + 1] * RANKS
    assert came.tolist() == sorted(list(range(RANKS)) * (rank + 1))
    assert hvd.alltoall(torch.arange(RANKS)).tolist() == [rank] * RANKS


@case
def broadcasts_from_every_root() -> None:
    whole = each(torch.float32, 3)
    for root in range(RANKS):
        mine = whole[hvd.rank()].clone()
        assert torch.equal(hvd.broadcast(mine, root), whole[root])
        hvd.broadcast_(mine, root, name=f"root {root}")
        assert torch.equal(mine, whole[root])
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=2) == {"rank": 2}
    assert hvd.allgather_object(("from", hvd.rank())) == [("from", rank) for rank in range(RANKS)]


@case
def gradients_flow_back() -> None:
    rank = hvd.rank()
    weights = each(torch.float64, RANKS, 2)[rank]

    def grad(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.ones(RANKS, 2, dtype=torch.float64, requires_grad=True)
        result = call(x)
        (result * weights[: len(result)].reshape(-1, 2)[: len(result)]).sum().backward()
        assert x.grad is not None
        return x.grad

    total = each(torch.float64, RANKS, 2).sum(0)
    assert torch.equal(grad(lambda x: hvd.allreduce(x, op=hvd.Sum)), total)
    mean = hvd.allreduce(weights)
    assert torch.equal(grad(lambda x: hvd.broadcast(x, 1)), mean if rank == 1 else mean * 0)
    back = hvd.alltoall(weights)
    assert torch.equal(grad(hvd.alltoall), back)
    gathered = hvd.allgather(weights[:1] * RANKS)
    assert torch.equal(grad(lambda x: hvd.reducescatter(x, op=hvd.Sum)), gathered)


@case
def sparse_tensors_add_up() -> None:
    rank = hvd.rank()
    dense = torch.zeros(5, 2)
    dense[rank] = dense[4] = rank + 1.0
    total = hvd.allreduce(dense, op=hvd.Sum)
    wait = hvd.sparse_allreduce_async(dense.to_sparse(1), name="sparse", op=hvd.Sum)
    assert torch.equal(wait().to_dense(), total)
    wait = hvd.sparse_allreduce_async(dense.to_sparse(1), name="sparse", op=hvd.Average)
    assert torch.allclose(wait().to_dense(), total / RANKS)


@case
def a_barrier_and_other_names_overtake_what_is_pending() -> None:
    x = torch.ones(2)
    late = hvd.allreduce_async(x, name="late", op=hvd.Sum) if hvd.rank() == 0 else None
    hvd.barrier()
    assert hvd.allreduce(x, op=hvd.Sum, name="early").tolist() == [RANKS] * 2
    if late is None:
        late = hvd.allreduce_async(x, name="late", op=hvd.Sum)
    else:
        assert not hvd.poll(late)
    assert hvd.synchronize(late).tolist() == [RANKS] * 2
    assert hvd.poll(late)


@case
def names_in_any_order_find_one_another() -> None:
    names = [f"tensor {number}" for number in range(12)]
    mine = names[hvd.rank() :] + names[: hvd.rank()]
    begun = {name: hvd.allreduce_async(torch.tensor([float(names.index(name))]), name=name)
             for name in mine}  # fmt: skip
    assert [hvd.synchronize(begun[name]).item() for name in names] == list(range(12))


@case
def a_mismatch_fails_that_operation_and_not_the_group() -> None:
    rank = hvd.rank()
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("same shape on every rank, but rank 0 has (2,), rank 1 has (3,), rank 2 has (4,)",
         lambda: hvd.allreduce(torch.ones(2 + rank))),
        ("same dtype", lambda: hvd.allreduce(torch.ones(2).to(DTYPES[rank]))),
        ("same op", lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if rank else hvd.Min)),
        ("prescale_factor", lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + rank)),
        ("same root_rank", lambda: hvd.broadcast(torch.ones(2), rank)),
        ("shape but the first dim", lambda: hvd.allgather(torch.ones(2, rank + 1))),
        ("same dtype", lambda: hvd.alltoall(torch.ones(RANKS).to(DTYPES[rank]))),
        ("same shape", lambda: hvd.reducescatter(torch.ones(RANKS + rank))),
    ]  # fmt: skip
    for word, call in wrong:
        refused(hvd.HorovodInternalError, word, call)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == RANKS


@case
def what_is_wrong_here_is_refused_here() -> None:
    x = torch.ones(RANKS)
    refused(InvalidArgumentError, "at least one dim", lambda: hvd.allgather(torch.ones(())))
    refused(InvalidArgumentError, "divide by", lambda: hvd.alltoall(torch.ones(RANKS + 1)))
    refused(InvalidArgumentError, "whole numbers", lambda: hvd.alltoall(x, torch.ones(RANKS)))
    more = torch.full((RANKS,), 2)
    refused(InvalidArgumentError, "more than the 3 rows", lambda: hvd.alltoall(x, more))
    refused(InvalidArgumentError, "no root_rank 9", lambda: hvd.broadcast(x, 9))
    refused(InvalidArgumentError, "not both", lambda: hvd.allreduce(x, average=True, op=hvd.Sum))
    refused(RuntimeError, "hvd.Sum", lambda: hvd.reducescatter(x, op=hvd.Adasum))
    refused(NotImplementedError, "2, 4, 8", lambda: hvd.allreduce(x, op=hvd.Adasum))
    refused(NotImplementedError, "checkpoint", lambda: hvd.elastic.run(print))
    hvd.barrier()  # or a rank that is quick would be done before the second call
    begun = hvd.allreduce_async(x, name="twice")
    refused(ValueError, "already under way", lambda: hvd.allreduce_async(x, name="twice"))
    hvd.synchronize(begun)
    hvd.allreduce(x, name="twice")


@case
def process_sets_come_and_go() -> None:
    rank = hvd.rank()
    pair, last = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([1]))
    assert (pair.size(), pair.rank(), pair.included()) == (2, [0, None, 1][rank], rank != 1)
    x = torch.tensor([10.0**rank])
    if rank != 1:
        assert hvd.allreduce(x, op=hvd.Sum, process_set=pair).item() == 101
        assert hvd.allgather(x, process_set=pair).tolist() == [1, 100]
        assert hvd.broadcast(x, 2, process_set=pair).item() == 100
        refused(InvalidArgumentError, "no root_rank 1",
                lambda: hvd.broadcast(x, 1, process_set=pair))  # fmt: skip
    else:
        refused(InvalidArgumentError, "Rank 1 is not in process set",
                lambda: hvd.allreduce(x, process_set=pair))  # fmt: skip
        hvd.barrier(last)
    refused(InvalidArgumentError, "already", lambda: hvd.add_process_set([0, 2]))
    assert hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(hvd.global_process_set)
    refused(InvalidArgumentError, "not known", lambda: hvd.allreduce(x, process_set=pair))
    hvd.remove_process_set(last)


@case
def joined_ranks_bring_zeros() -> None:
    for first in range(RANKS):
        if hvd.rank() != first:
            mean = hvd.allreduce(torch.full((2,), 3.0))  # without a name: all count alike again
            assert mean.tolist() == [2.0, 2.0]
            refused(hvd.HorovodInternalError, "joined", lambda: hvd.allgather(torch.ones(2)))
        last = hvd.join()
        assert last != first
        assert hvd.allgather(torch.tensor([last])).tolist() == [last] * RANKS


@case
def sync_batch_norm_is_that_of_one_device() -> None:
    torch.manual_seed(0)
    ours, whole = hvd.SyncBatchNorm(4).double(), torch.nn.BatchNorm1d(4).double()
    x = torch.randn(RANKS, 5, 4, 3, dtype=torch.float64)
    mine, everything = x[hvd.rank()].clone().requires_grad_(), x.flatten(0, 1).requires_grad_()
    out, expected = ours(mine), whole(everything)
    assert torch.allclose(out, expected.view(x.shape)[hvd.rank()])
    assert ours.running_var is not None
    assert whole.running_var is not None
    assert torch.allclose(ours.running_var, whole.running_var)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert mine.grad is not None
    assert everything.grad is not None
    assert torch.allclose(mine.grad, everything.grad.view(x.shape)[hvd.rank()])
    assert torch.allclose(ours.eval()(mine), whole.eval()(everything).view(x.shape)[hvd.rank()])


@case
def init_may_follow_shutdown() -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    refused(ValueError, "hvd.init()", hvd.size)
    hvd.init(process_sets=[pair := hvd.ProcessSet([0, 1])])
    assert pair.size() == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == RANKS
    hvd.barrier()


def all_cases() -> dict[str, str]:
    """Run every case on this rank; return what went wrong in which."""
    torch.set_num_threads(1)
    hvd.init()
    wrong = {}
    for name, function in CASES.items():
        try:
            function()
        except Exception:  # noqa: BLE001 - told to the test of that name
            wrong[name] = traceback.format_exc()
    return wrong


@pytest.fixture(scope="module")
def wrong() -> Iterator[list[dict[str, str]]]:
    yield run(all_cases, np=RANKS)


@pytest.mark.parametrize("name", CASES)
def test_on_three_ranks(name: str, wrong: list[dict[str, str]]) -> None:
    told = [f"rank {rank}: {one[name]}" for rank, one in enumerate(wrong) if name in one]
    assert not told, "\n".join(told)


def test_run_gives_what_each_rank_returns() -> None:
    def body(base: int, *, factor: int) -> int:
        hvd.init()
        return factor * (base + hvd.rank())

    assert run(body, (10,), {"factor": 2}, np=2) == [20, 22]


def test_a_rank_that_never_submits_is_named() -> None:
    def body() -> str:
        hvd.init()
        try:
            return str(hvd.allreduce(torch.ones(1), name="lonely")) if hvd.rank() else "ended"
        except hvd.HorovodInternalError as error:
            return str(error)

    first, second = run(body, np=2)
    assert first == "ended"
    assert second == "allreduce 'lonely': rank 0 has shut down and will not submit it."
