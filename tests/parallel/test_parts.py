"""Parameters that ranks have parts of: what is computed of them is what one device computes."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.parallel.part import PartParameter, PartTensor

torch = pytest.importorskip("torch")
nn: Any = torch.nn

ROWS, STEPS = 12, 3


class Net(nn.Module):  # type: ignore[misc]
    """Two layers for a plan, and experts if there is an axis for them."""

    def __init__(self, *, experts: bool, comm: Any = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)
        self.moe = None
        if experts:
            self.moe = rd.MoE([nn.Linear(4, 4) for _ in range(3)], rd.Router(4, 3), comm)

    def forward(self, x: Any) -> Any:
        y = self.down(torch.tanh(self.up(x)))
        return y if self.moe is None else self.moe(y)


PLAN = {"up": "column", "down": "row"}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm(),
    "norm 1": lambda p: torch.linalg.vector_norm(p, 1),
    "mean": lambda p: p.mean(),
    "mean by hand": lambda p: p.square().sum() / p.numel(),
    "max": lambda p: p.max(),
    "amin": lambda p: p.abs().amin(),
    "var": lambda p: p.var(),
    "std": torch.std,
    "prod": lambda p: (1 + 0.1 * p).prod(),
    "logsumexp": lambda p: p.flatten().logsumexp(0),
    "median": lambda p: p.median(),
    "l1": lambda p: p.abs().sum(),
    "group lasso": lambda p: p.flatten(1).norm(dim=1).sum() if p.dim() > 1 else p.norm(),
    "other dims": lambda p: p.sum(-1).square().sum(),
    "spectral": lambda p: torch.linalg.matrix_norm(p.reshape(len(p.tolist()), -1), 2),
    "singular values": lambda p: torch.linalg.svdvals(p.flatten(1) if p.dim() > 1 else p[None])[0],
    "an element": lambda p: p.view(-1)[-1] * p.reshape(-1)[0],
    "rows": lambda p: sum(each.norm() for each in p),
    "orthogonal": lambda p: (p.T @ p).norm() if p.dim() == 2 else p @ p.clone() if p.dim() < 2
    else p.norm(),
    "mask": lambda p: torch.where(p > 0, p, 0.0 * p).norm() + (p > 0).sum(),
    "sorted": lambda p: p.flatten().sort().values[::2].sum(),
    "a vector of all": lambda p: nn.utils.parameters_to_vector([p, p]).norm(),
    "from the first weights": lambda p: (p - torch.ones_like(p)).pow(2).mean(),
}  # fmt: skip
MESHES: list[dict[str, int]] = [
    {"tp": 2}, {"tp": 3}, {"ep": 2}, {"ep": 3}, {"dp": 2, "tp": 2}, {"dp": 2, "ep": 2},
    {"ep": 2, "tp": 2},
]  # fmt: skip
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "ps"]
CELLS = [
    (axes, strategy)
    for axes in MESHES
    for strategy in STRATEGIES
    if not ("ep" in axes and (strategy == "ps" or ("dp" not in axes and strategy != "ddp")))
]


DRAWING = threading.Lock()


def start_of(axes: dict[str, int]) -> Any:
    """Make a model, alike on ranks that are threads, which share torch's random numbers."""
    with DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(experts="ep" in axes).double()


def batch() -> Any:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1)).double()


def prepared(comm: Any, axes: dict[str, int], strategy: Any, start: Any, **options: Any) -> Any:
    """Return a model with the weights of another one, its optimizer, and this rank's rows."""
    mesh: Any = rd.Mesh(comm=comm, **axes)
    model = Net(experts="ep" in axes, comm=mesh["ep"] if "ep" in axes else None).double()
    if "ep" not in axes:
        model.load_state_dict(start)
    plan = {**PLAN, "moe*": "replicate"} if "ep" in axes else PLAN
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = rd.prepare(
        model, optimizer, mesh=mesh, strategy=strategy, plan=plan if "tp" in axes else None,
        **options,
    )  # fmt: skip
    if "ep" in axes:
        model.load_state_dict(start)
    names = [name for name in ("dp", "ep") if name in axes]
    data = mesh[tuple(names)] if len(names) > 1 else mesh[names[0]] if names else None
    size, rank = (1, 0) if data is None else (data.size, data.rank)
    return model, optimizer, batch().tensor_split(size)[rank]


def close(one: Any, two: Any) -> bool:
    return bool(torch.allclose(one.double(), two.double(), rtol=1e-10, atol=1e-12))


def trained(
    model: Any, optimizer: Any, x: Any, penalty: Callable[[Any], Any], groups: Any
) -> list[Any]:
    """Train with a penalty and clipping by each gradient's norm; return what could be logged."""
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        extra = 0.1 * sum(map(penalty, model.parameters()))
        (model(x).square().mean() + extra).backward()
        seen += [extra.detach(), *(p.grad.norm() for p in model.parameters())]
        for p in groups(model, optimizer):
            p.grad.mul_((0.3 * p.detach().norm() / p.grad.norm()).clamp(max=1))
            seen.append(p.grad.abs().max())
        nn.utils.clip_grad_norm_([*groups(model, optimizer)], 0.5)
        optimizer.step()
        seen += [p.detach().mean() for p in groups(model, optimizer)]
    return seen


def of_model(model: Any, _: Any) -> Any:
    return [*model.parameters()]


def of_optimizer(_: Any, optimizer: Any) -> Any:
    return [p for group in optimizer.param_groups for p in group["params"]]


def ranks_of(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("axes", "strategy"), CELLS, ids=str)
def test_a_loss_a_log_and_clipping_are_those_of_one_device(
    axes: dict[str, int], strategy: str, name: str
) -> None:
    alone, start = start_of(axes), start_of(axes).state_dict()
    own = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    expected = trained(alone, own, batch(), FUNCTIONS[name], of_model)
    # What `param_groups` has is another object under ZeRO, and the same otherwise.
    groups = of_optimizer if sum(map(ord, name)) % 2 else of_model

    def body(comm: rd.Communicator) -> None:
        model, optimizer, x = prepared(comm, axes, strategy, start)
        found = trained(model, optimizer, x, FUNCTIONS[name], groups)
        assert [close(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(found)
        for key, value in rd.full_state_dict(model).items():
            torch.testing.assert_close(value, alone.state_dict()[key], rtol=1e-10, atol=1e-12)

    rd.run(body, ranks_of(axes), "threads")


# ---- without training: every function on a part, beside that on the whole

ELEMENTS: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda p: 2 * p + p.detach() / 3,
    "by a number": lambda p: p * torch.tensor(0.5).double(),
    "clamped": lambda p: p.clamp(-0.1, 0.1).abs(),
    "compared": lambda p: (p > 0) & (p < 1),
    "cast": lambda p: p.float().to(torch.float64).to(p),
    "like": lambda p: torch.zeros_like(p) + torch.full_like(p, 3),
    "lists": lambda p: torch._foreach_add([p, p], [p, p], alpha=2)[1],
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "data": lambda p: p.data.mul_(0.5),
    "data = ": lambda p: setattr(p, "data", p.data * 2),
    "+=": lambda p: p.data.__iadd__(1),
    "[0] =": lambda p: p.__setitem__(0, 7.0),
    "[-1, ...] *=": lambda p: p.data.__setitem__((-1, ...), p[-1] * 3),
    "fill": lambda p: nn.init.constant_(p, 0.25),
    "drawn": lambda p: p.normal_(generator=torch.Generator().manual_seed(3)),
    "init": lambda p: nn.init.uniform_(p, -1, 1, generator=torch.Generator().manual_seed(3)),
    "whole": lambda p: p.copy_(torch.arange(28.0)[: p.numel()].view(4, 7) if p.dim() == 2
                               and p.tolist()[0][6:] else torch.ones(()).double()),
    "spectral": lambda p: p.div_(p.norm()),
    "lists": lambda p: torch._foreach_mul_([p, p.data], [0.5, 2.5]),
    "by matrix": lambda p: p.renorm_(2, 0, 0.1) if p.dim() == 2 else p.zero_(),
    "vector": lambda p: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector([p]).cumsum(0), [p]),
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_by_element_it_stays_a_part(size: int) -> None:
    def body(comm: rd.Communicator) -> None:
        one = start_of({}).requires_grad_(requires_grad=False)
        model = copy.deepcopy(one)
        rd.apply_plan(model, PLAN, rd.Mesh(tp=size, comm=comm))
        for name, function in ELEMENTS.items():
            for p, q in zip(model.parameters(), one.parameters(), strict=True):
                found, wanted = function(p), function(q)
                assert torch.equal(found, wanted), name
                assert (type(found) is PartTensor) == (type(p) is PartParameter), name
                assert rd.local(found).shape == p.shape
                assert type(rd.local(p)) is (nn.Parameter if rd.local(p) is p else torch.Tensor)
                assert found.tolist() == wanted.tolist()
                assert np.array_equal(found.numpy(), wanted.numpy())
        for name, function in WRITES.items():
            for p, q in zip(model.parameters(), one.parameters(), strict=True):
                function(p), function(q)
                assert close(p, q), name
                assert not isinstance(p, PartParameter) or rd.local(p).shape != q.shape

    rd.run(body, size, "threads")


def test_a_state_dict_a_copy_and_a_hook_are_as_ever() -> None:
    def body(comm: rd.Communicator) -> None:
        one = start_of({})
        model = copy.deepcopy(one)
        rd.apply_plan(model, PLAN, rd.Mesh(tp=2, comm=comm))
        state = model.state_dict()
        assert {type(value) for value in state.values()} == {torch.Tensor}
        assert tuple(state["up.weight"].shape) == tuple(model.up.weight.shape) != (7, 4)
        twin, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
        twin.load_state_dict(one.state_dict())
        average.update_parameters(twin)
        for each in (twin, average.module, copy.deepcopy(twin.up)):
            assert all(
                type(p) is PartParameter
                for name, p in each.named_parameters()
                if "down.b" not in name
            )
        assert close(average.module.up.weight.norm(), one.up.weight.norm())
        again: Any = nn.Parameter(model.up.weight.data)
        assert close(again.norm(), one.up.weight.norm())
        for net in (model, one):
            net.up.weight.register_hook(lambda grad: grad / grad.norm())
            net(batch()).square().mean().backward()
        assert close(model.up.weight.grad.norm(), torch.ones(()))
        assert close(model.up.weight.grad, one.up.weight.grad)
        found = torch.autograd.grad(model(batch()).sum(), model.up.weight)[0]
        assert close(found.std(), torch.autograd.grad(one(batch()).sum(), one.up.weight)[0].std())
        model.up.weight.grad = one.up.weight.grad * 2  # of which each rank keeps its part
        assert close(model.up.weight.grad, one.up.weight.grad * 2)
        assert "PartParameter" in repr(model.up.weight)

    rd.run(body, 2, "threads")


def test_a_second_derivative_is_that_of_one_device() -> None:
    def body(comm: rd.Communicator) -> None:
        one = start_of({})
        model = copy.deepcopy(one)
        penalty = sum(p.norm().square() for p in one.parameters())
        wanted = torch.autograd.grad(penalty, [*one.parameters()], create_graph=True)
        rd.apply_plan(model, PLAN, rd.Mesh(tp=2, comm=comm))
        penalty = sum(p.norm().square() for p in model.parameters())
        found = torch.autograd.grad(penalty, [*model.parameters()], create_graph=True)
        sum(each.square().sum() for each in found).backward()
        sum(each.square().sum() for each in wanted).backward()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            assert close(p.grad, q.grad)

    rd.run(body, 2, "threads")


# ---- what is refused, on all ranks

REFUSED: dict[str, Callable[[Any], Any]] = {
    "a view is written": lambda p: p.data[0].zero_(),
    "views of views": lambda p: p.data.view(-1)[2:4].mul_(2),
    "a column": lambda p: p.data.T.add_(1),
    "rows one by one": lambda p: [row.fill_(1) for row in p.data],
    "a misfit": lambda p: p * torch.ones(5, 4).double(),
    "a misfit is written": lambda p: p.data.add_(torch.ones(5, 1).double()),
    "another shape": lambda p: setattr(p, "data", torch.ones(2, 2).double()),
    "in place": lambda p: p.data.t_(),
    "out": lambda p: torch.mul(p.data, 2, out=p.data),
    "another parameter": nn.Parameter,
    "row by row": torch.vmap(lambda row: row / row.norm()),
    "a pickle": lambda p: torch.save(p.data, "/dev/null"),
}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_would_be_lost_is_refused_on_all_ranks(strategy: str) -> None:
    def body(comm: rd.Communicator) -> list[str]:
        model, _, _ = prepared(comm, {"tp": 2}, strategy, start_of({}).state_dict())
        before = model.up.weight.tolist()
        texts = []
        for name, function in REFUSED.items():
            with pytest.raises(InvalidArgumentError) as told:
                function(model.up.weight)
            texts.append(str(told.value))
            assert model.up.weight.tolist() == before, name
        return texts

    for texts in rd.run(body, 2, "threads"):
        assert all(len(text) > 60 for text in texts)


def test_ranks_that_ask_for_different_things_are_told() -> None:
    def body(comm: rd.Communicator, ask: Callable[[Any, int], Any]) -> str:
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
        rd.apply_plan(model, {"0": "column", "1": "row"}, rd.Mesh(tp=2, comm=comm))
        try:
            ask(model, comm.rank)
        except CollectiveMismatch as error:
            return str(error)
        return "nothing"

    asked: list[Callable[[Any, int], Any]] = [
        lambda model, rank: model[0].weight.norm() if rank else model[0].weight.mean(),
        lambda model, rank: model[rank].weight.view(-1),
        lambda model, rank: model[0].weight.data.normal_(
            generator=torch.Generator().manual_seed(rank)
        ),
    ]
    for ask in asked:
        texts = rd.run(lambda comm, ask=ask: body(comm, ask), 2, "threads")
        assert "nothing" not in texts


# ---- who knows of the parts


def test_code_that_knows_gets_the_part() -> None:
    """Layers, optimizers and modules that somebody divided by hand; and no loss or other layer."""
    from roundelay.parallel.sharding import Sharding, shard_parameter  # noqa: PLC0415

    class Mine(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 6).double()

        def forward(self, x: Any) -> Any:
            return self.product(x), self.inner(x)

        def product(self, x: Any) -> Any:
            return nn.functional.linear(x, self.inner.weight, self.inner.bias)

    def body(comm: rd.Communicator) -> None:
        model = Mine()
        for p in model.parameters():
            p.data = comm.broadcast(p.data.clone())
        whole = model.inner.weight.detach().clone()
        for p in model.parameters():
            shard_parameter(p, Sharding("tp", comm, 0, (((0, 3),), ((3, 6),))))
        assert [tuple(each.shape) for each in model(batch())] == [(ROWS, 3)] * 2
        weight = model.inner.weight
        assert nn.functional.linear(batch(), weight).shape == (ROWS, 6)
        assert close(nn.L1Loss()(weight, torch.zeros(6, 4).double()), whole.abs().mean())
        assert nn.Linear(4, 2).double()(weight).shape == (6, 2)
        assert close(nn.Softmax(0)(weight), whole.softmax(0))

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_masters_and_state_are_parts_as_well(strategy: str, axes: dict[str, int]) -> None:
    start = start_of(axes).state_dict()

    def body(comm: rd.Communicator) -> None:
        model, optimizer, x = prepared(comm, axes, strategy, start, precision="bf16")
        for p in of_optimizer(model, optimizer):
            wanted = next(value for value in start.values() if value.numel() == p.numel()
                          and close(value.mean(), p.detach().mean()))  # fmt: skip
            assert close(wanted.norm(), p.detach().norm())
        model(x.bfloat16()).square().mean().backward()
        optimizer.step()
        for p in of_optimizer(model, optimizer):
            momentum = optimizer.state[p]["momentum_buffer"]
            every = comm.all_gather(momentum.norm().double().reshape(1).contiguous())
            assert len({*every.flatten().tolist()}) == 1
            assert math.prod(np.asarray(momentum.cpu()).shape) == momentum.numel()
            if strategy == "zero2":
                assert momentum.full().numel() == momentum.numel()

    rd.run(body, ranks_of(axes), "threads")


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_and_penalty() -> None:
    def body(comm: rd.Communicator) -> None:
        one = start_of({})
        model = copy.deepcopy(one)
        rd.apply_plan(model, PLAN, rd.Mesh(tp=2, comm=comm))
        compiled = torch.compile(model, backend="eager")
        assert close(compiled(batch()), one(batch()))
        norms = torch.compile(lambda net: sum(p.norm() for p in net.parameters()), backend="eager")
        wanted = sum(p.norm() for p in one.parameters())
        assert close(norms(model), wanted) and close(norms(one), wanted)

    rd.run(body, 2, "threads")
