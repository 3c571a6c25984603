"""Odd tensors: whether one may take the fast path or not, the same is seen of every call on it."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest

from roundelay.engines import no_fast_path
from roundelay.errors import InvalidArgumentError

torch = pytest.importorskip("torch", reason="torch is not installed")


class Mine(torch.Tensor):  # type: ignore[misc, name-defined] # torch is Any here
    """A tensor that is more than its memory."""


class Doubling(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined] # likewise
    """Sees every call of torch's, and has its own idea of some."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.Tensor.detach else found


def fake_mode() -> Any:
    from torch._subclasses import FakeTensorMode  # noqa: PLC0415 - slow to import

    return FakeTensorMode(allow_non_fake_inputs=True)


def shrunk(tensor: Any, elements: int) -> Any:
    tensor.untyped_storage().resize_(elements * tensor.element_size())
    return tensor


def functional() -> Any:
    return torch._to_functional_tensor(torch.ones(4))


def product_of_leaf() -> Any:
    return torch.ones(4, requires_grad=True) * 2


@contextlib.contextmanager
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


ODD: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.ones(4),
    "scalar": lambda: torch.tensor(2.0),
    "empty": lambda: torch.ones(0, 4),
    "part": lambda: torch.arange(12.0)[3:7],
    "row": lambda: torch.arange(12.0).view(3, 4)[1:2],
    "column": lambda: torch.arange(12.0).view(3, 4)[:, 1],
    "transposed": lambda: torch.arange(12.0).view(3, 4).T,
    "channels last": lambda: torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(1).expand(4),
    "expanded once": lambda: torch.ones(1).expand(1, 1),
    "leaf": lambda: torch.ones(4, requires_grad=True),
    "of a leaf": product_of_leaf,
    "parameter": lambda: torch.nn.Parameter(torch.ones(4)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(4), requires_grad=False),
    "subclass": lambda: torch.ones(4).as_subclass(Mine),
    "fake": lambda: fake_mode().from_tensor(torch.ones(4)),
    "functional": functional,
    "zero": lambda: torch._efficientzerotensor(4),
    "meta": lambda: torch.ones(4, device="meta"),
    "sparse": lambda: torch.ones(4).to_sparse(),
    "sparse rows": lambda: torch.ones(2, 2).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.quint8),
    "conjugated": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
    "negated and packed": lambda: torch._neg_view(torch.ones(4)),
    "negated integers": lambda: torch._neg_view(torch.ones(4, dtype=torch.int64)),
    "float8": lambda: torch.ones(4).to(torch.float8_e5m2),
    "complex half": lambda: torch.ones(4, dtype=torch.complex32),
    "bits": lambda: torch.ones(4, dtype=torch.uint8).view(torch.bits8),
    "shrunk": lambda: shrunk(torch.ones(4), 3),
    "shrunk before it": lambda: shrunk(torch.ones(8)[4:], 4),
    "shrunk to nothing": lambda: shrunk(torch.ones(4), 0),
    "shrunk beside it": lambda: shrunk(torch.ones(8)[:4], 4),
    "lazily cloned": lambda: torch._lazy_clone(torch.ones(4)),
    "of inference": lambda: torch.ones(4),
    "list": lambda: [1.0, 2.0],
    "nothing": lambda: None,
}
CONTEXTS: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "without grad": torch.no_grad,
    "inference": inference,
    "function mode": Doubling,
    "dispatch mode": fake_mode,
    "default device": lambda: torch.device("meta"),
}
USES: dict[str, Callable[[Any, Any], Any]] = {
    "in place": lambda comm, x: comm.all_reduce(x),
    "into it": lambda comm, x: comm.all_reduce(torch.ones(4), out=x),
    "beside": lambda comm, x: comm.all_reduce(x, out=torch.zeros(4)),
    "gathered": lambda comm, x: comm.all_gather(x),
    "broadcast": lambda comm, x: comm.broadcast(x, 1),
    "shared": lambda comm, x: comm.reduce_scatter(x, axis=0),
}


def seen(use: Callable[[], Any], x: Any) -> Any:
    """Return all that a user can see of a call: what it gives or raises, and what became of x."""

    def version() -> int:
        with torch.inference_mode(mode=False):
            try:
                return int(x._version)
            except (AttributeError, RuntimeError):
                return 0

    before = version()
    try:
        given = use()
        found: Any = (type(given).__name__, given is x, getattr(given, "requires_grad", None))
        with contextlib.suppress(Exception):  # not all of them can be looked at
            found += (str(given.dtype), given.tolist())
    except Exception as error:  # noqa: BLE001 - which one is what the test asks
        found = type(error).__name__, re.sub("0x[0-9a-f]+", "", str(error))
    return found, version() - before


def both_ways(comm: Any, made: Callable[[], Any], use: Any, around: Any) -> tuple[Any, Any]:
    """Return what is seen of a call that may take the fast path, and of one that may not."""
    found = []
    for way in (comm._engine.fast_path, no_fast_path):
        comm._fast_path = way
        x = made()
        with around():
            found.append(seen(partial(use, comm, x), x))
    return found[0], found[1]


@pytest.mark.filterwarnings("ignore")  # torch's, of kinds of tensors that may yet change
@pytest.mark.parametrize("context", CONTEXTS)
def test_odd_tensors_are_taken_or_refused_as_the_long_way_does(context: str, threads: Any) -> None:
    def work(comm: Any) -> list[str]:
        for use in USES.values():  # so that plain ones take the fast path from now on
            use(comm, torch.ones(4))
        found = [
            f"{kind}, {use}: {fast} instead of {slow}"
            for kind, use in product(ODD, USES)
            if (kind, use)
            != ("expanded", "broadcast")  # which the root may send, and no other take
            for fast, slow in [both_ways(comm, ODD[kind], USES[use], CONTEXTS[context])]
            if fast != slow
        ]
        comm._fast_path = comm._engine.fast_path
        assert comm.all_reduce(torch.ones(4)).tolist() == [2.0] * 4  # no rank has waited in vain
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in threads(2, work):
            assert found == []


@pytest.mark.parametrize("use", USES)
def test_what_has_no_memory_is_refused(use: str, threads: Any) -> None:
    """A functionalized tensor's own memory was given back, and its value lies elsewhere."""

    def work(comm: Any) -> list[str]:
        found = []
        wrapped: Callable[[Any], Any] = torch.func.functionalize(lambda x: USES[use](comm, x))
        calls: list[Callable[[], Any]] = [
            lambda: USES[use](comm, functional()),
            lambda: wrapped(torch.ones(4)),
        ]
        for call in calls:
            try:
                found.append(str(call()))
            except InvalidArgumentError as error:
                found.append("refused" if "functionalized" in str(error) else str(error))
        return found

    assert threads(2, work) == [["refused"] * 2] * 2


@pytest.mark.parametrize("count", [0, 1, 7, 40_003])
def test_to_rank_0_nothing_comes_in_an_exscan(count: int, threads: Any) -> None:
    def work(comm: Any) -> list[tuple[bool, int]]:
        seen = []
        for _ in range(3):
            x, out = torch.ones(count), torch.ones(2 * count)[::2]
            same = comm.exscan(x) is x and comm.exscan(torch.ones(count), out=out) is out
            seen.append((same, x._version + out._version))
        return seen

    first, *others = threads(3, work)
    assert first == [(True, 0)] * 3
    assert others == [[(True, 2)] * 3] * 2


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_under_a_transform_nothing_is_read_behind_its_back(transform: str, threads: Any) -> None:
    def work(comm: Any) -> None:
        comm.all_reduce(torch.ones(4))
        outer = torch.ones(4)
        found: list[Any] = []

        def body(x: Any) -> Any:
            for way in (comm._engine.fast_path, no_fast_path):
                comm._fast_path = way
                found.extend(seen(partial(comm.all_reduce, one), one) for one in (x, outer, x + 1))
            return x.sum()

        getattr(torch.func, transform)(body)(torch.ones(2, 4) if transform == "vmap" else outer)
        assert found[:3] == found[3:]

    threads(1, work)
