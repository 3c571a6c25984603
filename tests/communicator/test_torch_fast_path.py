"""CPU tensors take the fast path: they get the bits of arrays, and autograd is told of writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from roundelay import _core
from roundelay.reductions import DTYPES, LOGICAL, REDUCTIONS, Located

torch = pytest.importorskip("torch", reason="torch is not installed")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 without ml_dtypes")
KNOWN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
if not KNOWN and _core.tensor_shape(torch.ones(1)) is None:
    pytest.skip("tensors of this torch take the long way", allow_module_level=True)

COUNTS = (1, 7, 3000)
Call = Callable[[Any, Any, Any, str], Any]  # of a communicator, x, what makes one like it, and op

REDUCING: dict[str, Call] = {
    "all_reduce": lambda comm, x, _, op: comm.all_reduce(x, op),
    "all_reduce out": lambda comm, x, new, op: comm.all_reduce(x, op, out=new(x.shape)),
    "reduce": lambda comm, x, _, op: comm.reduce(x, op, comm.size - 1),
    "reduce out": lambda comm, x, new, op: comm.reduce(x, op, out=new(x.shape)),
    "scan": lambda comm, x, _, op: comm.scan(x, op),
    "exscan": lambda comm, x, _, op: comm.exscan(x, op),
    "scan out": lambda comm, x, new, op: comm.scan(x, op, out=new(x.shape)),
    "reduce_scatter": lambda comm, x, _, op: comm.reduce_scatter(x, op),
    "reduce_scatter axis": lambda comm, x, _, op: comm.reduce_scatter(x, op, axis=0),
    "reduce_scatter out": lambda comm, x, new, op: comm.reduce_scatter(x, op, out=new(x.shape[1:])),
}
MOVING: dict[str, Call] = {
    "broadcast": lambda comm, x, _, __: comm.broadcast(x, comm.size - 1),
    "all_gather": lambda comm, x, _, __: comm.all_gather(x),
    "all_gather axis": lambda comm, x, _, __: comm.all_gather(x, axis=0),
    "all_gather out": lambda comm, x, new, __: comm.all_gather(x, out=new((comm.size, *x.shape))),
    "gather": lambda comm, x, _, __: comm.gather(x, 1),
    "gather out": lambda comm, x, new, __: comm.gather(x, out=new((comm.size, *x.shape))),
    "all_to_all": lambda comm, x, _, __: comm.all_to_all(x),
    "all_to_all axis": lambda comm, x, new, __: comm.all_to_all(x, axis=0, out=new(x.shape)),
}
CELLS = [*product(DTYPES, REDUCING, REDUCTIONS), *product(DTYPES, MOVING, ["sum"])]


class Watched:
    """A communicator's fast path, and whether it took the last call."""

    def __init__(self, comm: Any) -> None:
        self.real, self.took = comm._fast_path, False
        comm._fast_path = self

    def __call__(self, *call: Any) -> bool:
        self.took = self.real(*call)
        return self.took


def bits(found: Any) -> Any:
    """Return what can be compared: the kind, the dtype, the shape and every bit."""
    if isinstance(found, Located):
        return bits(found.values), bits(found.locations)
    if isinstance(found, torch.Tensor):
        name = str(found.dtype).removeprefix("torch.")
        flat = found.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return name, tuple(found.shape), flat.tobytes()
    return found if found is None else (found.dtype.name, found.shape, found.tobytes())


def outcome(call: Callable[[], Any]) -> Any:
    """Return the bits of a result, or what was raised."""
    try:
        return bits(call())
    except Exception as error:  # noqa: BLE001 - which one is what the test asks
        return type(error).__name__, str(error)


def sample(rank: int, dtype: str, shape: tuple[int, ...]) -> Any:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rng = np.random.default_rng([rank, *shape])
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(kind)
    made = rng.integers(1, 120, shape)
    return (made / 7 if np.dtype(kind).kind not in "iu" else made).astype(kind)


def as_tensor(array: Any) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def differences(comm: Any, cells: list[tuple[str, str, str]]) -> list[str]:
    fast, wrong = Watched(comm), []
    for dtype, name, op in cells:
        call = (REDUCING | MOVING)[name]
        for count in COUNTS:
            array = sample(comm.rank, dtype, (comm.size, count))

            def new_array(shape: Any, kind: Any = array.dtype) -> Any:
                return np.zeros(shape, kind)

            def new_tensor(shape: Any, kind: Any = array.dtype) -> Any:
                return as_tensor(np.zeros(shape, kind))

            for _ in range(2):  # the first may have to make the program
                due = outcome(lambda: call(comm, array.copy(), new_array, op))  # noqa: B023 - at once
            took = fast.took or dtype == "bfloat16"
            got = outcome(lambda: call(comm, as_tensor(array.copy()), new_tensor, op))  # noqa: B023
            if got != due:
                wrong.append(f"{dtype} {name} {op} {count}: {got} instead of {due}")
            part = "scan" in name and op in LOGICAL  # go the long way
            if dtype == "bfloat16" and (op not in TAKEN or part):
                continue
            if fast.took is not took:
                wrong.append(f"{dtype} {name} {op} {count}: the fast path took {fast.took}")
    return wrong


#: What floats have a meaning for, and goes the fast way; bfloat16 of numpy never does.
TAKEN = ("sum", "prod", "min", "max", *LOGICAL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_get_the_bits_of_arrays(dtype: str, threads: Any) -> None:
    cells = [cell for cell in CELLS if cell[0] == dtype]
    for found in threads(3, lambda comm: differences(comm, cells)):
        assert found == []


def test_so_they_do_in_processes(processes: Any) -> None:
    cells = [cell for cell in CELLS if cell[2] == "sum"]
    for found in processes(2, lambda comm: differences(comm, cells)):
        assert found == []


def test_who_writes_a_tensor_is_counted_once(threads: Any) -> None:
    def work(comm: Any) -> None:
        x, out = torch.ones(comm.size, 2), torch.ones(comm.size, 2)
        for times in (1, 2, 3):
            comm.all_reduce(x)
            assert (x._version, out._version) == (times, 0)
        for times in (1, 2, 3):
            comm.all_reduce(x, out=out)
            assert (x._version, out._version) == (3, times)
        for root in (0, 0, 1, 1):
            before = x._version
            comm.broadcast(x, root)
            assert x._version - before == (comm.rank != root)
            comm.reduce(x, root=root)
            assert x._version - before == 1
        before = x._version
        for _ in range(2):
            comm.all_gather(x)
            comm.reduce_scatter(x)
        assert x._version == before

    threads(2, work)


def test_a_tensor_may_let_go_of_its_memory_during_a_call(threads: Any) -> None:
    """The call keeps the memory it has begun with, and writes nothing else."""

    def work(comm: Any) -> None:
        comm.all_reduce(torch.ones(1 << 16))
        x = torch.ones(1 << 16)
        kept = x.detach()
        if comm.rank:
            threading.Timer(0.2, lambda: x.set_(torch.zeros(1 << 16))).start()
            comm.all_reduce(x)
            assert x.sum() == 0
        else:
            time.sleep(0.5)
            comm.all_reduce(x)
        assert kept.unique().tolist() == [2.0]

    threads(2, work)


@pytest.mark.parametrize("size", [2, 3])
def test_compiled_functions_make_their_calls(size: int, ranks: Any) -> None:
    """torch.compile must bind methods as Python does, though it can't look into them."""

    def work(comm: Any) -> list[float]:
        out = torch.empty(size, 3)

        def step(x: Any) -> Any:
            y = x * 2
            comm.all_reduce(y)
            comm.all_gather(y, out=out)
            comm.barrier()
            return out.sum() + y.sum()

        compiled = torch.compile(step, backend="eager")
        return [float(compiled(torch.ones(3))) for _ in range(2)]

    assert ranks(size, work) == [[6.0 * size * (size + 1)] * 2] * size
