"""What a program does around `prepare` and a pass: as on one device, or refused by name."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError  # noqa: E402
from roundelay.training.prepare import known_strategies  # noqa: E402

nn = torch.nn
SIZES = (1, 2, 3)
STRATEGIES = {**known_strategies(), "ps, servers update": rd.ParameterServer(update="server")}
SYNCHRONOUS = [name for name, strategy in STRATEGIES.items() if strategy.synchronous]
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
synchronous = pytest.mark.parametrize("name", SYNCHRONOUS)
every_size = pytest.mark.parametrize("size", SIZES)


def model_of(*, bias: bool = True) -> Any:
    """Two layers of the same shape; the same weights every time."""
    model = nn.Sequential(nn.Linear(5, 5, bias=bias), nn.Tanh(), nn.Linear(5, 5, bias=bias))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.double()


def rows(comm: Any, step: int = 0) -> Any:
    """This rank's part of a batch; all of it where there are no ranks."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(12, 5, dtype=torch.float64, generator=generator)
    return batch if comm is None else batch.tensor_split(comm.size)[comm.rank]


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.05)


# ---- frozen between forward and backward


def freeze_midway(comm: Any, strategy: Any, *, left: bool) -> tuple[list[Any], Any]:
    """Freeze a weight between forward and backward of one step; `left`: with a gradient there."""
    model = model_of()
    optimizer: Any = adam(model)
    if comm is not None:
        model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        if left and step == 2:
            add_up(comm, model, step + 10)
        loss = model(rows(comm, step)).square().mean()
        model[0].weight.requires_grad_(requires_grad=step != 2)
        loss.backward()
        seen.append(model[0].weight.grad is None)
        optimizer.step()
        model[0].weight.requires_grad_(requires_grad=True)
    state = model.state_dict() if comm is None else rd.full_state_dict(model)
    return seen, {name: tensor.detach().clone() for name, tensor in state.items()}


def add_up(comm: Any, model: Any, step: int) -> None:
    """Run a backward pass whose gradients wait for those of the next one."""
    with nullcontext() if comm is None else rd.accumulate(model):
        model(rows(comm, step)).square().mean().backward()


@synchronous
@every_size
@pytest.mark.parametrize("left", [False, True])
def test_what_is_frozen_before_backward_gets_no_gradient(name: str, size: int, left: bool) -> None:  # noqa: FBT001
    expected = freeze_midway(None, None, left=left)
    be_rank = partial(freeze_midway, strategy=STRATEGIES[name], left=left)
    for seen, state in rd.run(be_rank, size, "threads"):
        assert seen == expected[0]
        for key, tensor in expected[1].items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in SYNCHRONOUS])
def test_what_is_frozen_before_backward_stays_where_workers_do_not_wait(name: str) -> None:
    expected = freeze_midway(None, None, left=False)
    be_rank = partial(freeze_midway, strategy=STRATEGIES[name], left=False)
    ((seen, state),) = rd.run(be_rank, 1, "threads")
    assert seen[2] == expected[0][2]
    for key, tensor in expected[1].items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-12, atol=1e-12)


@synchronous
@pytest.mark.parametrize("size", [1, 2])
def test_in_mixed_precision_too(name: str, size: int) -> None:
    def be_rank(comm: Any) -> bool:
        model = model_of().float()
        model, optimizer = rd.prepare(
            model, adam(model), strategy=STRATEGIES[name], comm=comm, precision="bf16"
        )
        model(rows(comm).float()).float().square().mean().backward()
        optimizer.zero_grad()
        before = copy.deepcopy(rd.full_state_dict(model)["0.weight"])
        loss = model(rows(comm).float()).float().square().mean()
        model[0].weight.requires_grad_(requires_grad=False)
        loss.backward()
        optimizer.step()
        return bool(torch.equal(before, rd.full_state_dict(model)["0.weight"]))

    assert all(rd.run(be_rank, size, "threads"))


# ---- before prepare


def refused(
    size: int, model: Any, strategy: Any, *, around: Any = nullcontext, **options: Any
) -> list[str]:
    """Prepare copies of a model on all ranks, and return what they were told."""

    def be_rank(comm: Any) -> str:
        mine = model()
        optimizer = adam(mine)
        with around(), pytest.raises(InvalidArgumentError) as error:
            rd.prepare(mine, optimizer, strategy=strategy, comm=comm, **options)
        return str(error.value)

    return rd.run(be_rank, size, "threads")


@every_strategy
@every_size
@pytest.mark.parametrize("zeros", [False, True])
def test_gradients_at_prepare_are_refused(name: str, size: int, zeros: bool) -> None:  # noqa: FBT001
    def model() -> Any:
        mine = model_of()
        mine(rows(None)).square().mean().backward()
        if zeros:
            mine.zero_grad()
            mine[2].weight.grad = torch.zeros_like(mine[2].weight)
        return mine

    told = refused(size, model, STRATEGIES[name])
    first = "2.weight" if zeros else "0.weight"
    assert all(f"parameter {first} has a gradient" in one for one in told), told
    assert all("optimizer.zero_grad()" in one for one in told), told


@every_strategy
@every_size
@pytest.mark.parametrize("how", ["prepared", "built"])
def test_inference_mode_is_refused(name: str, size: int, how: str) -> None:
    def model() -> Any:
        with torch.inference_mode(how == "built"):
            return nn.Linear(3, 2)

    around = torch.inference_mode if how == "prepared" else nullcontext
    told = refused(size, model, STRATEGIES[name], around=around)
    assert all("torch.inference_mode()" in one and "torch.no_grad()" in one for one in told), told
    assert all(("weight" in one) == (how == "built") for one in told), told


# ---- memory that is shared


class Views(nn.Module):  # type: ignore[misc, name-defined]
    """A layer, and a view of its weight in another place; or parameters in one memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        first, second = model_of(bias=False)[0], model_of(bias=False)[2]
        self.first, self.second = first, second
        if kind == "tied":
            second.weight.data = first.weight.data
        elif kind == "overlapping":
            flat = torch.linspace(-1, 1, 45, dtype=torch.float64)
            first.weight.data, second.weight.data = flat[:25].view(5, 5), flat[20:].view(5, 5)
        elif kind == "one Parameter":
            second.weight = first.weight
        elif kind == "beside each other":
            flat = torch.linspace(-1, 1, 50, dtype=torch.float64).view(25, 2)
            first.weight.data, second.weight.data = flat[:, 0].view(5, 5), flat[:, 1].view(5, 5)
            self.cells = [first.weight, second.weight]
        elif kind == "buffer":
            self.register_buffer("row", first.weight.data[0])
        elif kind == "attribute":
            self.row = first.weight.detach()[0]
        else:
            self.row = {"list": [first.weight[0]], "dict": {"row": first.weight.T}}[kind]

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))


def train_views(comm: Any, kind: str, strategy: Any) -> Any:
    model = Views(kind)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if comm is not None:
        model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
    for step in range(3):
        optimizer.zero_grad()
        model(rows(comm, step)).square().mean().backward()
        optimizer.step()
    state = model.state_dict() if comm is None else rd.full_state_dict(model)
    row = model.row.detach().clone() if isinstance(getattr(model, "row", 0), torch.Tensor) else 0
    return {name: tensor.detach().clone() for name, tensor in state.items()}, row


SHARING = ("tied", "overlapping", "buffer", "attribute", "list", "dict")


def parts(name: str, kind: str) -> bool:
    """Tell whether memory that is shared would part."""
    strategy = STRATEGIES[name]
    moves = strategy.moves_parameters
    return moves or (strategy.steps_elsewhere and kind in ("tied", "overlapping"))


@every_size
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in STRATEGIES for kind in SHARING if parts(name, kind)]
)
def test_memory_that_would_part_is_refused_by_name(name: str, kind: str, size: int) -> None:
    told = refused(size, lambda: Views(kind), STRATEGIES[name])
    word = "second.weight" if kind in ("tied", "overlapping") else "row"
    assert all("first.weight" in one and word in one for one in told), told


@pytest.mark.parametrize("kind", SHARING)
def test_in_mixed_precision_it_is_refused_under_ddp(kind: str) -> None:
    told = refused(2, lambda: Views(kind), "ddp", precision="bf16")
    assert all("in mixed precision" in one and "first.weight" in one for one in told), told


@every_size
@pytest.mark.parametrize("kind", [*SHARING, "one Parameter", "beside each other"])
@synchronous
def test_memory_that_stays_shared_is_right(name: str, kind: str, size: int) -> None:
    if kind in SHARING and parts(name, kind):
        pytest.skip("is refused")
    expected, row = train_views(None, kind, None)
    for state, seen in rd.run(train_views, size, "threads", args=(kind, STRATEGIES[name])):
        assert state.keys() == expected.keys()
        torch.testing.assert_close(seen, row, rtol=1e-12, atol=1e-12)
        for key, tensor in expected.items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-12, atol=1e-12)


@every_size
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_weights_that_a_hook_makes_anew_are_right(name: str, size: int) -> None:
    def be_rank(comm: Any) -> Any:
        model = model_of()
        nn.utils.spectral_norm(model[0])
        model, optimizer = rd.prepare(model, adam(model), strategy=name, comm=comm)
        model(rows(comm)).square().mean().backward()
        optimizer.step()
        return rd.full_state_dict(model)["0.weight_orig"].clone()

    assert all(tensor.isfinite().all() for tensor in rd.run(be_rank, size, "threads"))


# ---- layers that change places after prepare


def swap(model: Any) -> None:
    model[0], model[2] = model[2], model[0]


def remove(model: Any) -> None:
    model[2] = nn.Identity()


def rename(model: Any) -> None:
    model.add_module("last", model[2])
    delattr(model, "2")


def put_frozen(model: Any) -> None:
    """Have another layer of the same name and shape, which nobody trains."""
    model[2] = nn.Linear(5, 5).double().requires_grad_(requires_grad=False)
    nn.init.ones_(model[2].weight)
    nn.init.zeros_(model[2].bias)


@every_strategy
@every_size
@pytest.mark.parametrize("change", [swap, remove, rename, put_frozen])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_states_go_by_the_names_of_now(
    name: str, size: int, change: Any, precision: str, tmp_path: Any
) -> None:
    if size != 2 and precision == "bf16":
        pytest.skip("is the same")
    model = model_of().float()
    change(model)
    expected = model.state_dict()

    def be_rank(comm: Any) -> tuple[Any, ...]:
        mine = model_of().float()
        mine, own = rd.prepare(
            mine, adam(mine), strategy=STRATEGIES[name], comm=comm, precision=precision
        )
        change(mine)
        with pytest.raises(InvalidArgumentError, match=r"rd\.save .*\d.weight is .*rd\.unprepare"):
            rd.save(tmp_path / "checkpoint", mine, own)
        full = {key: one.clone() for key, one in rd.full_state_dict(mine).items()}
        pieces = {key: one.clone() for key, one in rd.whole_tensors(mine)}
        mine.load_state_dict(full)
        again = {key: one.clone() for key, one in rd.full_state_dict(mine).items()}
        mine, _ = rd.unprepare(mine)
        return full, pieces, again, mine.state_dict()

    for states in rd.run(be_rank, size, "threads"):
        for state in states:
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[key], expected[key]) for key in expected)


# ---- taken back between backward and step


@every_strategy
@every_size
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_that_wait_for_a_step_are_not_dropped(
    name: str,
    size: int,
    precision: str,
    adds: bool,  # noqa: FBT001
) -> None:
    if size != 2 and precision == "bf16":
        pytest.skip("is the same")

    def be_rank(comm: Any) -> None:
        model = model_of().float()
        model, optimizer = rd.prepare(
            model, adam(model), strategy=STRATEGIES[name], comm=comm, precision=precision
        )
        for end in (optimizer.step, optimizer.zero_grad):
            optimizer.zero_grad()
            with rd.accumulate(model) if adds else nullcontext():
                model(rows(comm).float()).float().square().mean().backward()
            with pytest.raises(InvalidArgumentError, match=r"step\(\) before.*zero_grad\(\)"):
                rd.unprepare(model)
            end()
        model(rows(comm).float()).float().square().mean().backward()
        optimizer.step()  # whose gradients stay
        model, _ = rd.unprepare(model)
        assert all(parameter.grad is None for parameter in model.parameters())

    rd.run(be_rank, size, "threads")
