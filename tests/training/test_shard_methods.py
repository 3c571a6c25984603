"""Every method of a tensor, asked of what is divided: the whole one's answer, or a refusal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError, RoundelayError  # noqa: E402
from roundelay.training.shards.shard import Shard  # noqa: E402

nn = torch.nn
DTYPE = torch.float64

#: Memory that nobody has written, random numbers, and what says nothing of the elements.
APART = {
    "new", "new_empty", "new_empty_strided", "normal_", "random_", "uniform_", "exponential_",
    "cauchy_", "geometric_", "log_normal_", "bernoulli_", "bernoulli", "multinomial", "as_subclass",
    "backward", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
    "retain_grad", "detach_", "is_set_to", "storage_offset", "empty", "reinforce", "rename",
    "rename_", "align_to", "align_as", "refine_names", "has_names", "module_load",
}  # fmt: skip
OTHER = torch.cos(torch.arange(20, dtype=DTYPE)).view(4, 5)
Arguments = Callable[[Any], tuple[Any, ...]]
ARGUMENTS: list[Arguments] = [
    lambda w: (),  # noqa: ARG005
    lambda w: (w,),
    lambda w: (w * 1.5,),
    lambda w: (OTHER.view(w.shape),),
    lambda w: (2,),  # noqa: ARG005
    lambda w: (0, 1),  # noqa: ARG005
    lambda w: (w, w),
    lambda w: (w > 0, 3.0),
    lambda w: (lambda one: one + 1,),  # noqa: ARG005
    lambda w: (w.clone(), lambda one, two: one + two),
    lambda w: (w.clone(), w.clone(), lambda one, two, three: one + two + three),
    lambda w: (0, torch.tensor([1, 2])),  # noqa: ARG005
    lambda w: (0, torch.tensor([1, 2]), 3.0),  # noqa: ARG005
    lambda w: (w.t(),),
    lambda w: ((20,), (1,)),  # noqa: ARG005
]


def whole(value: Any) -> Any:
    """As one device has it, in memory of its own."""
    if isinstance(value, torch.Tensor):
        found = value.detach()
        return found.full() if isinstance(found, Shard) else found.clone()
    return [whole(one) for one in value] if isinstance(value, (list, tuple)) else value


def same(one: Any, two: Any) -> bool:
    one, two = whole(one), whole(two)
    if isinstance(one, torch.Tensor):
        if (one.shape, one.dtype, one.layout) != (two.shape, two.dtype, two.layout):
            return False
        one, two = (each.to_dense() if each.layout != torch.strided else each
                    for each in (one, two))  # fmt: skip
        one, two = (each.to(torch.complex128) for each in (one, two))
        return bool(torch.allclose(one, two, equal_nan=True))
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return type(one).__module__ != "builtins" or isinstance(one, str) or bool(one == two)


def calls() -> list[tuple[str, Arguments]]:
    """Return methods with arguments that torch takes, two at most for each."""
    found = []
    for name in dir(torch.Tensor):
        if name.startswith("_") or name in APART or not callable(getattr(torch.Tensor, name)):
            continue
        mine = []
        for arguments in ARGUMENTS:
            alone = OTHER.clone()
            try:
                getattr(alone, name)(*arguments(alone))
                mine.append((name, arguments))
            except Exception:  # noqa: BLE001 - whatever torch does not take
                pass
        found += mine[:2]
    return found


def wrong(name: str, arguments: Arguments, asked: Any) -> Iterator[tuple[Any, ...]]:
    """Yield what is not the whole one's."""
    alone = whole(asked)
    with contextlib.suppress(Exception):  # whatever torch does not take of this shape
        right = getattr(alone, name)(*arguments(alone))
        yield from _differs(name, arguments, asked, alone, right)


def _differs(
    name: str, arguments: Arguments, asked: Any, alone: Any, right: Any
) -> Iterator[tuple[Any, ...]]:
    try:
        found = getattr(asked, name)(*arguments(asked.detach()))
        if not (same(right, found) and same(alone, asked)):
            yield name, right, found
    except RoundelayError:
        pass
    except Exception as error:  # noqa: BLE001 - as it would come to the user
        yield name, repr(error)


@pytest.mark.filterwarnings("ignore")
def test_every_method_is_the_whole_one_s_or_refused() -> None:
    asked = calls()

    def be_rank(comm: Any) -> list[Any]:
        torch.manual_seed(3)
        mine = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(DTYPE)
        mine, _ = rd.prepare(mine, torch.optim.SGD(mine.parameters()), strategy="zero3", comm=comm)
        mine(torch.linspace(-1, 1, 6, dtype=DTYPE).view(2, 3)).square().mean().backward()
        bad: list[Any] = []
        with torch.no_grad():
            for name, arguments in asked:
                bad += wrong(name, arguments, mine[2].weight.grad.clone())
                if not name.endswith("_"):
                    bad += wrong(name, arguments, mine[2].weight)
                    bad += wrong(name, arguments, mine[2].weight.grad[1:, 2:])
        return bad

    for found in rd.run(be_rank, 2, "threads"):
        assert not found


def test_lists_of_tensors_are_the_whole_ones() -> None:
    def be_rank(comm: Any) -> list[Any]:
        torch.manual_seed(3)
        mine = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(DTYPE)
        mine, _ = rd.prepare(mine, torch.optim.SGD(mine.parameters()), strategy="zero2", comm=comm)
        mine(torch.ones(2, 3, dtype=DTYPE)).square().mean().backward()
        bad = []
        for name in (name for name in dir(torch) if name.startswith("_foreach_")):
            for more in ((), (2.0,), ([2.0, 0.5],), ("list",), ("list", "list")):
                try:
                    right = _listed(name, more, mine, divided=False)
                except Exception:  # noqa: BLE001 - whatever torch does not take
                    continue
                found = _listed(name, more, mine, divided=True)
                bad += [] if all(map(same, right, found)) else [(name, more)]
        return bad

    for found in rd.run(be_rank, 2, "threads"):
        assert not found


def _listed(name: str, more: tuple[Any, ...], model: Any, *, divided: bool) -> tuple[Any, Any]:
    """Return what an operation on lists gives, and what its first list is then."""
    first, second = ([one.grad.abs() * times + 0.1 for one in model[0].parameters()]
                     for times in (1, 2))  # fmt: skip
    if not divided:
        first, second = whole(first), whole(second)
    made = getattr(torch, name)(first, *(second if one == "list" else one for one in more))
    return made, first


@pytest.mark.parametrize("way", ["zero2", "zero3"])
def test_out_never_reaches_beyond_a_piece(way: str) -> None:
    """A tensor of one number lies on one rank; the others have its neighbours' memory."""

    def be_rank(comm: Any) -> None:
        mine = nn.ParameterDict({"a": torch.ones(3), "b": torch.tensor(2.0), "c": torch.ones(2)})
        mine, own = rd.prepare(
            mine, torch.optim.SGD(mine.parameters(), lr=0.1), strategy=way, comm=comm
        )
        sum(one.sum() for one in own.param_groups[0]["params"]).backward()
        two = torch.tensor(2.0)
        for what in ([one.grad for one in mine.values()],
                     [one.detach() for one in own.param_groups[0]["params"]]):  # fmt: skip
            before = [whole(one) for one in what]
            torch.mul(two, two, out=what[1])
            assert [one.tolist() for one in what] == [before[0].tolist(), 4.0, before[2].tolist()]
            torch.frexp(
                torch.full((3,), 8.0), out=(what[0], exponents := torch.zeros(3, dtype=torch.int32))
            )
            assert what[0].tolist() == [0.5] * 3
            assert exponents.tolist() == [4] * 3
            for there, value in (
                (what[0], two),
                (what[1], torch.ones(3)),
                (what[2], torch.ones(5)),
            ):
                with pytest.raises(
                    InvalidArgumentError, match=r"another shape.* of [abc] is divided"
                ):
                    torch.mul(value, value, out=there)

    rd.run(be_rank, 3, "threads")
