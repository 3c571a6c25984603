"""What can't be passed to `hvd` is refused by name, before anything is sent."""

# What is wrong is the point.
# mypy: disable-error-code="arg-type, list-item, dict-item, call-arg, misc, no-untyped-call"

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roundelay.horovod.torch as hvd
from roundelay.errors import RoundelayError
from roundelay.horovod import run

X, MODEL = torch.ones(4), torch.nn.Linear(2, 2)
ODD_TENSORS: dict[str, Any] = {
    "None": None, "a word": "x", "a list": [1, 2], "an array": X.numpy(),
    "a sparse one": X.to_sparse(), "one without data": X.to("meta"),
}  # fmt: skip
TAKES_A_TENSOR: dict[str, Callable[[Any], Any]] = {
    "allreduce": hvd.allreduce, "allreduce_": hvd.allreduce_,
    "allreduce_async": hvd.allreduce_async, "allgather": hvd.allgather,
    "allgather_async": hvd.allgather_async, "alltoall": hvd.alltoall,
    "reducescatter": hvd.reducescatter, "broadcast": lambda x: hvd.broadcast(x, 0),
    "broadcast_": lambda x: hvd.broadcast_(x, 0),
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([X, x]),
    "grouped_allreduce_": lambda x: hvd.grouped_allreduce_([X, x]),
    "grouped_allgather": lambda x: hvd.grouped_allgather([x]),
    "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([x]),
    "SyncBatchNorm": hvd.SyncBatchNorm(2),
}  # fmt: skip


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


def wrapped(**options: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(), **options)


OTHERS: dict[str, Callable[[], Any]] = {
    **{f"op={op!r}": lambda op=op: hvd.allreduce(X, op=op) for op in ("sum", [1], 9, -1, 1.5)},
    "average": lambda: hvd.allreduce(X, average="yes"),
    **{f"name={name!r}": lambda name=name: hvd.allreduce(X, name=name) for name in (3, ["a"])},
    **{f"prescale_factor={one!r}": lambda one=one: hvd.allreduce(X, prescale_factor=one)
       for one in (None, "2", [2])},
    **{f"process_set={one!r}": lambda one=one: hvd.allreduce(X, process_set=one)
       for one in (None, [0], 0)},
    "barrier": lambda: hvd.barrier(3),
    "compression": lambda: hvd.allreduce(X, compression=None),
    **{f"{call.__name__}({one!r})": lambda call=call, one=one: call(one)
       for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_async_, hvd.grouped_allgather,
                    hvd.grouped_reducescatter)
       for one in (None, 5, "ab")},
    **{f"root_rank={root!r}": lambda root=root: hvd.broadcast(X, root)
       for root in (None, "0", -1, 0.0, False, [0], 7)},
    **{f"splits={splits!r}": lambda splits=splits: hvd.alltoall(X, splits)
       for splits in ("a", [None, 1], [True, True], [-1, 1], [1.0, 1.0], [9, 9], 2)},
    "sparse": lambda: hvd.sparse_allreduce_async(X, "n", hvd.Sum),
    "poll": lambda: hvd.poll(None),
    "synchronize": lambda: hvd.synchronize(3),
    **{f"ProcessSet({one!r})": lambda one=one: hvd.ProcessSet(one) for one in (None, "01", [-1])},
    **{f"add_process_set({one!r})": lambda one=one: hvd.add_process_set(one)
       for one in (None, 3, "0", [], [0, 0], [9])},
    **{f"remove_process_set({one!r})": lambda one=one: hvd.remove_process_set(one)
       for one in (None, [0])},
    **{f"init(process_sets={one!r})": lambda one=one: hvd.init(process_sets=one)
       for one in (3, {0})},
    "init(comm=…)": lambda: hvd.init(comm="x"),
    **{f"broadcast_parameters({one!r})": lambda one=one: hvd.broadcast_parameters(one, 0)
       for one in (None, 3, [("a", X, 3)], {"c": 3}, {"c": 2.5, "t": X}, [("a", "text")], [X, 3])},
    "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(None, 0),
    "broadcast_object from None": lambda: hvd.broadcast_object(3, None),
    "broadcast_object from 7": lambda: hvd.broadcast_object(3, 7),
    "allgather_object of a function": lambda: hvd.allgather_object(lambda: 3),
    "an optimizer of None": lambda: hvd.DistributedOptimizer(None),
    **{f"{word}={one!r}": lambda word=word, one=one: wrapped(**{word: one})
       for word, some in {
           "named_parameters": (3, [("a", MODEL.weight, 3)], [(1, MODEL.weight)]),
           "backward_passes_per_step": ("2", None, 1.5, 0, -1),
           "op": ("avg", 9),
           "gradient_predivide_factor": (0, "2", -1.0),
           "groups": ("ab", -1, [3], [[MODEL.weight], [MODEL.weight]]),
           "compression": (None,),
           "process_set": (None, 3),
       }.items() for one in some},
    "start_timeline": lambda: hvd.start_timeline(None),
    "elastic.run": lambda: hvd.elastic.run(print),
    "elastic.TorchState": lambda: hvd.elastic.TorchState(model=MODEL),
    "elastic.ObjectState": lambda: hvd.elastic.ObjectState(step=1),
}  # fmt: skip
EVERY: dict[str, Callable[[], Any]] = {
    f"{call} of {odd}": lambda call=call, odd=odd: TAKES_A_TENSOR[call](ODD_TENSORS[odd])
    for call in TAKES_A_TENSOR
    for odd in ODD_TENSORS
} | OTHERS


def all_of_them() -> dict[str, str]:
    """Make every call on this rank; return what came of those that were not refused by name."""
    hvd.init()
    found = {}
    for what, call in EVERY.items():
        try:
            found[what] = f"was not refused, but gave {call()}"
        except RoundelayError:
            pass
        except Exception as error:  # noqa: BLE001 - what must not be
            found[what] = f"raised {error!r}"
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()  # all is as it was
    return found | ({} if total == hvd.size() else {"the end": f"gave {total}"})


def test_odd_arguments_are_refused_by_name() -> None:
    for found in run(all_of_them, np=2):
        assert not found, "\n".join(f"{what} {came}" for what, came in found.items())


def size() -> int:
    hvd.init()
    return int(hvd.size())


def test_run_is_called_as_horovods() -> None:
    """By `num_proc` or its older name `np`, and with options that say how other hosts are found."""
    assert run(size, (), {}, 2) == run(size, num_proc=2) == run(size, np=2) == [2, 2]
    assert run(size) == run(size, num_proc=2, np=1) == [1]
    how = {"use_gloo": True, "use_mpi": False, "start_timeout": 60, "verbose": 1, "slots": None}
    assert run(size, np=2, hosts=None, **how) == [2, 2]
    assert run(size, num_proc=2, hosts="localhost:1,127.0.0.1:3", ssh_port=12) == [2, 2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hosts": "elsewhere:2"}, "`roundelay run`"),
        ({"hosts": "localhost:1"}, "localhost:2"),
        ({"hosts": 2}, "localhost:2"),
        ({"hosts": "local host"}, "local host"),
        ({"min_num_proc": 1}, "min_num_proc=1"),
        ({"hostfile": "hosts"}, "hostfile='hosts'"),
        ({"output_filename": "out"}, "output_filename='out'"),
        ({"use_gluon": None}, "use_gluon"),
        ({"num_proc": 0}, "0"),
        ({"num_proc": "2"}, "'2'"),
    ],
)
def test_run_refuses_what_it_would_not_do(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RoundelayError, match=re.escape(says)):
        run(size, **{"num_proc": 2, **options})


def test_run_refuses_what_is_no_function() -> None:
    with pytest.raises(RoundelayError, match="needs a function to call, not 3"):
        run(3, np=2)
