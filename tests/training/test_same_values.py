"""The same operation with other values on each rank is told on all of them, or it changes nothing.

What is divided shows nobody what the others were given: each rank works on its own piece.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch  # noqa: E402

nn = torch.nn
DTYPE = torch.float64
ZERO: dict[str, Any] = {
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "hybrid": rd.Zero(3, shard_over=2),
}
SERVER = rd.ParameterServer(update="server")
STRATEGIES: dict[str, Any] = {"ddp": "ddp", **ZERO, "ps": "ps", "server": SERVER}
START = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(DTYPE)
INPUT = torch.linspace(-1, 1, 24, dtype=DTYPE).view(8, 3)
Act = Callable[[int, Any, Any], None]


def full(value: int) -> Any:
    return torch.full((5, 3), 0.01 * value, dtype=DTYPE)


# ---- gradients


def add(value: int, model: Any, _: Any) -> None:
    model[0].weight.grad.add_(full(value))


def multiply(value: int, model: Any, _: Any) -> None:
    model[0].weight.grad.mul_(0.1 * value)


def multiply_by_tensor(value: int, model: Any, _: Any) -> None:
    torch._foreach_mul_([model[0].weight.grad], torch.tensor(0.1 * value, dtype=DTYPE))


def put(value: int, model: Any, _: Any) -> None:
    model[0].weight.grad = full(value)


def put_product(value: int, model: Any, _: Any) -> None:
    model[0].weight.grad = model[0].weight.grad * value


def through_a_view(value: int, model: Any, _: Any) -> None:
    model[0].weight.grad[value % 5] = 1


def through_a_copy(value: int, model: Any, _: Any) -> None:
    mine = model[0].weight.grad.clone()
    mine.view(-1).mul_(value)
    model[0].weight.grad.copy_(mine)


def in_another_order(value: int, model: Any, _: Any) -> None:
    grad = model[0].weight.grad
    for number in (2, 3) if value % 2 else (3, 2):
        grad.add_(1).mul_(number)


# ---- parameters


@torch.no_grad()  # type: ignore[untyped-decorator]
def write(value: int, model: Any, _: Any) -> None:
    model[0].weight.mul_(value)


@torch.no_grad()  # type: ignore[untyped-decorator]
def write_by_groups(value: int, _: Any, own: Any) -> None:
    own.param_groups[0]["params"][0].mul_(value)


# ---- the optimizer's state


def state(own: Any) -> Any:
    return own.state[own.param_groups[0]["params"][0]]


def multiply_state(value: int, _: Any, own: Any) -> None:
    state(own)["exp_avg"].mul_(value)


def put_state(value: int, _: Any, own: Any) -> None:
    state(own)["exp_avg"] = full(value)


def write_number(value: int, _: Any, own: Any) -> None:
    state(own)["step"].fill_(value + 5)


def load(value: int, _: Any, own: Any) -> None:
    found = copy.deepcopy(own.state_dict())
    found["state"][0]["exp_avg"].add_(value)
    own.load_state_dict(found)


GRADIENTS = (add, multiply, multiply_by_tensor, put, put_product, through_a_view, through_a_copy,
             in_another_order)  # fmt: skip
PARAMETERS = (write, write_by_groups)
STATE = (multiply_state, put_state, write_number, load)


def trained(comm: Any, strategy: Any, act: Act, value: int, *, after: bool, last: bool) -> Any:
    """Train three steps, and do something in the second or the third, before it or after."""
    model = copy.deepcopy(START)
    own: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
    try:
        for step in range(3):
            rows = INPUT.tensor_split(comm.size)[comm.rank]
            model(rows).square().mean().backward()
            if step == 1 + last and not after:
                act(value, model, own)
            own.step()
            if step == 1 + last and after:
                act(value, model, own)
            own.zero_grad()
        return {name: one.clone() for name, one in rd.full_state_dict(model).items()}
    except CollectiveMismatch as error:
        return str(error)


def cases() -> Iterator[tuple[Act, bool, bool]]:
    for last in (False, True):
        for act in (*GRADIENTS, *PARAMETERS, *STATE):
            yield act, False, last
            if act not in GRADIENTS:
                yield act, True, last


def takes(strategy: str, act: Act) -> bool:
    """Tell whether it can be done there: what servers have, workers can't change but by loading."""
    return strategy != "server" or act in (*PARAMETERS, load)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_values_are_told_and_the_same_are_one_device(strategy: str, sample: Any) -> None:
    grid = sample.cells((case for case in cases() if takes(strategy, case[0])), 3)

    def be_rank(comm: Any, chosen: Any, *, alike: bool) -> list[Any]:
        value = 2 if alike else 1 + comm.rank
        return [trained(comm, chosen, act, value, after=after, last=last)
                for act, after, last in grid]  # fmt: skip

    size = 4 if strategy == "hybrid" else 2
    differ = rd.run(lambda comm: be_rank(comm, STRATEGIES[strategy], alike=False), size, "threads")
    alike = rd.run(lambda comm: be_rank(comm, STRATEGIES[strategy], alike=True), size, "threads")
    expected = rd.run(lambda comm: be_rank(comm, "ddp", alike=True), 1, "threads")[0]
    for number, (act, after, last) in enumerate(grid):
        case = f"{act.__name__} {after=} {last=}"
        for found in differ:
            assert isinstance(found[number], str), f"{case} passed unnoticed"
            assert "0.weight" in found[number] or act is load, (case, found[number])
        for found in alike:
            assert isinstance(found[number], dict), (case, found[number])
            for name, one in expected[number].items():
                assert torch.allclose(found[number][name], one, rtol=1e-11, atol=1e-12), case


@pytest.mark.parametrize("strategy", ZERO)
def test_numbers_of_what_each_rank_made_otherwise_are_told(strategy: str) -> None:
    """And what one rank alone makes of its pieces, and shows nobody, is its own affair."""

    def be_rank(comm: Any) -> str:
        model = copy.deepcopy(START)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, own = rd.prepare(model, own, strategy=ZERO[strategy], comm=comm)
        for step in range(3):
            model(INPUT).square().mean().backward()
            grad = model[0].weight.grad
            if comm.rank == 0:
                grad.clone().mul_(7)
            if step == 2:
                (grad * (1 + comm.rank)).norm()
            own.step()
            own.zero_grad()
        with pytest.raises(CollectiveMismatch, match="norm") as error:
            rd.full_state_dict(model)
        return str(error.value)

    for told in rd.run(be_rank, 4 if strategy == "hybrid" else 2, "threads"):
        assert "0.weight" in told


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "ps"])
def test_one_of_many_gradients_is_enough(strategy: str) -> None:
    """As where all are clipped, and one is not clipped as the others' is."""

    def be_rank(comm: Any) -> list[str]:
        told = []
        for odd in (0, 7, 39):
            model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
            own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
            model(INPUT.float()).square().mean().backward()
            for number, one in enumerate(model.parameters()):
                one.grad.mul_(2 + comm.rank if number == odd else 2)
            own.step()
            with pytest.raises(CollectiveMismatch, match="did different things") as error:
                rd.full_state_dict(model)
            told.append(str(error.value))
        return told

    rd.run(be_rank, 2, "threads")


# ---- servers that update


def let_one_go(model: Any) -> None:
    model[0].weight.grad = None


def let_all_go(model: Any) -> None:
    model.zero_grad()


def make_zero(model: Any) -> None:
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("act", [let_one_go, let_all_go, make_zero], ids=lambda one: one.__name__)
def test_gradients_let_go_before_a_step(strategy: str, act: Callable[[Any], None]) -> None:
    def be_rank(comm: Any, chosen: Any, who: Callable[[int], bool]) -> list[Any]:
        def done(_: int, model: Any, __: Any) -> None:
            if who(comm.rank):
                act(model)

        return [trained(comm, chosen, done, 0, after=False, last=last) for last in (False, True)]

    size = 4 if strategy == "hybrid" else 2
    expected = rd.run(be_rank, 1, "threads", ("ddp", lambda _: True))[0]
    for found in rd.run(be_rank, size, "threads", (STRATEGIES[strategy], lambda _: True)):
        for mine, theirs in zip(found, expected, strict=True):
            assert all(torch.allclose(mine[name], one, rtol=1e-11) for name, one in theirs.items())
    for found in rd.run(be_rank, size, "threads", (STRATEGIES[strategy], lambda rank: rank == 1)):
        assert all("did different things to their gradients" in told for told in found), found


def test_gradients_of_servers_are_cleared_by_the_model() -> None:
    """By zeros, to which the next pass adds, as on one device."""

    def be_rank(comm: Any, strategy: Any) -> Any:
        model = copy.deepcopy(START)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        for _ in range(3):
            model(INPUT).square().mean().backward()
            own.step()
            model.zero_grad(set_to_none=False)
        return rd.full_state_dict(model)

    expected = rd.run(be_rank, 1, "threads", ("ddp",))[0]
    for found in rd.run(be_rank, 2, "threads", (SERVER,)):
        assert all(torch.allclose(found[name], one, rtol=1e-11) for name, one in expected.items())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "ps", SERVER])
@pytest.mark.parametrize("both", [False, True])
def test_who_wrote_into_a_parameter_is_said_in_words(strategy: Any, both: bool) -> None:  # noqa: FBT001
    def be_rank(comm: Any) -> str:
        model = torch.nn.Linear(3, 2)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        with torch.no_grad():
            if comm.rank == 0 or both:
                model.bias.add_(1 + comm.rank)
        with pytest.raises(CollectiveMismatch) as error:
            model(torch.ones(1, 3)).sum().backward()
        return str(error.value)

    for told in rd.run(be_rank, 2, "threads"):
        assert "Rank 0 has written values of its own, and rank 1 has written" in told
        assert ("written nothing" in told) is not both
        assert not re.search(r"\d{5}", told)
