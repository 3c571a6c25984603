"""Batch norm over all ranks is batch norm on one device: outputs, gradients, running statistics."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError  # noqa: E402

STEPS = 3
KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def rows(dims: int, count: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + dims)
    shape = (count, 4, *(3, 2, 2)[: dims - 2])
    return 1 + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """Two norms, one after the other, with something to learn before and behind."""

    def __init__(self, dims: int, way: str = "", **options: Any) -> None:
        super().__init__()
        self.way = way
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.first, self.second = KINDS[dims](4, **options), KINDS[dims](4, **options)
        self.head = nn.Linear(4, 2)
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-1, 1, 8).view(2, 4))
            self.head.bias.fill_(0.5)
        self.double()

    def inner(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Any) -> Any:
        x = x * self.scale.view(1, -1, *(1 for _ in x.shape[2:]))
        if self.way and self.training:
            again = self.way == "reentrant"
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=again)
        else:
            x = self.inner(x)
        return self.head(x.flatten(2).mean(2) if x.dim() > 2 else x)


def alone(dims: int, count: int, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    model = Net(dims, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model(rows(dims, count, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return model.state_dict(), model(rows(dims, count, 9)).detach()


def together(
    comm: Any, strategy: str, dims: int, count: int, options: dict[str, Any], weighed: bool  # noqa: FBT001
) -> tuple[dict[str, Any], Any]:  # fmt: skip
    model = rd.SyncBatchNorm.convert(Net(dims, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
    data = [row for step in range(STEPS) for row in rows(dims, count, step)]
    for x in rd.loader(data, count, comm=comm, model=model, shuffle=False, quiet=True):
        if weighed:
            rd.backward(model(x).square().sum(), weight=2 * len(x))
        else:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    mine = rows(dims, count, 9).tensor_split(comm.size)[comm.rank]
    state = {name: one.clone() for name, one in rd.full_state_dict(model).items()}
    with torch.no_grad():
        return state, model(mine)


CASES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 5, {}),
    (2, 2, {}),
    (3, 4, {"momentum": None}),
    (4, 5, {"affine": False}),
    (5, 3, {"track_running_stats": False}),
    (4, 1, {"eps": 1e-3, "momentum": 0.3}),
]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "ps"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_ranks_give_what_one_device_gives(strategy: str, case: int) -> None:
    """Ranks with more rows than others and with none, however the loss is weighed."""
    dims, count, options = CASES[case]
    state, outputs = alone(dims, count, options)
    for size, weighed in ((1, False), (2, False), (3, False), (3, True)):
        args = (strategy, dims, count, options, weighed)
        found = rd.run(together, size, "threads", args)
        every = torch.cat([out for _, out in found])
        np.testing.assert_allclose(every.numpy(), outputs.numpy(), rtol=1e-12, atol=1e-12)
        for mine, _ in found:
            assert mine.keys() == state.keys()
            for name, one in state.items():
                np.testing.assert_allclose(
                    mine[name].numpy(), one.numpy(), rtol=1e-12, atol=1e-12, err_msg=name
                )


@pytest.mark.parametrize(
    ("strategy", "way"),
    [*((one, "plain") for one in ("ddp", "zero2", "zero3", "ps")), ("ddp", "reentrant")],
)
def test_checkpointing_updates_statistics_once(strategy: str, way: str) -> None:
    state, _ = alone(4, 6, {})
    args = (strategy, 4, 6, {"way": way}, False)
    for mine, _ in rd.run(together, 2, "threads", args):
        assert mine["first.num_batches_tracked"] == STEPS
        for name, one in state.items():
            np.testing.assert_allclose(mine[name].numpy(), one.numpy(), rtol=1e-12, atol=1e-12)


def test_gradients_of_gradients_and_statistics_without_gradients() -> None:
    """A gradient penalty; and training mode under no_grad, with ranks given by hand."""
    whole = rows(2, 6, 0)

    def penalty(layer: Any, x: Any) -> Any:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(x).pow(3).sum(), [x], create_graph=True)
        slope.square().sum().backward()
        return layer.weight.grad.numpy()

    plain = nn.BatchNorm1d(4).double()
    due = penalty(plain, whole)
    with torch.no_grad():
        plain(whole * 3)

    def be_rank(comm: Any) -> None:
        mine = whole.tensor_split(comm.size)[comm.rank]
        layer = rd.SyncBatchNorm(4, comm=comm, dtype=torch.float64)
        found = comm.all_reduce(torch.from_numpy(penalty(layer, mine)).clone())
        np.testing.assert_allclose(found.numpy(), due, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            layer(mine * 3)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            one, other = getattr(layer, name).numpy(), getattr(plain, name).numpy()
            np.testing.assert_allclose(one, other, rtol=1e-12)

    rd.run(be_rank, 3, "threads")


def test_half_precision_has_statistics_in_float32() -> None:
    x = rows(4, 6, 0)
    plain = Net(4).float()
    plain(x.float())

    def be_rank(comm: Any) -> None:
        model = rd.SyncBatchNorm.convert(Net(4).float())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(model, optimizer, precision="bf16", comm=comm)
        out = model(x.float().tensor_split(comm.size)[comm.rank])
        assert (out.dtype, model.first.running_var.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(
            model.first.running_var, plain.first.running_var, rtol=2e-2, atol=2e-2
        )
        out.float().square().mean().backward()
        optimizer.step()

    rd.run(be_rank, 2, "threads")


def test_converting_keeps_all_but_the_class() -> None:
    shared = nn.BatchNorm2d(3, momentum=0.2).eval()
    shared.weight.requires_grad_(requires_grad=False)
    called = []
    shared.register_forward_hook(lambda *_: called.append(1))
    model = nn.Sequential(nn.Conv2d(3, 3, 1), shared, nn.Sequential(shared, nn.InstanceNorm2d(3)))
    before = dict(model.named_parameters())
    assert rd.SyncBatchNorm.convert(model) is model
    assert type(model[1]) is type(model[2][0]) is rd.SyncBatchNorm
    assert model[1] is model[2][0] is shared
    assert all(one is before[name] for name, one in model.named_parameters())
    assert (shared.training, shared.momentum, shared.weight.requires_grad) == (False, 0.2, False)
    model(torch.ones(2, 3, 4, 4))
    assert called == [1, 1]
    again = rd.SyncBatchNorm.convert(nn.BatchNorm1d(2))
    again = pickle.loads(pickle.dumps(copy.deepcopy(again)))
    assert type(again) is rd.SyncBatchNorm
    again(torch.arange(4.0).view(2, 2))  # on one device, as any batch norm
    torch.testing.assert_close(again.running_mean, torch.tensor([0.1, 0.2]))


def test_what_can_not_be_is_named() -> None:
    class Own(nn.BatchNorm1d):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return super().forward(x).relu()

    for kind in (Own(3), nn.LazyBatchNorm1d()):
        model = nn.Sequential(nn.BatchNorm1d(3), kind)
        with pytest.raises(InvalidArgumentError, match="can't take 1"):
            rd.SyncBatchNorm.convert(model)
        assert type(model[0]) is nn.BatchNorm1d

    def be_rank(comm: Any) -> None:
        model = rd.SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(3)))
        model, _ = rd.prepare(model, torch.optim.SGD(model.parameters()), comm=comm)
        with pytest.raises(InvalidArgumentError, match="more than one value"):
            model(torch.ones(1 - comm.rank, 3))
        with pytest.raises(InvalidArgumentError, match=r"\(rows, 3, …\)"):
            model(torch.ones(2, 4))
        with pytest.raises(InvalidArgumentError, match="prepared already"):
            rd.SyncBatchNorm.convert(model)
        model, _ = rd.unprepare(model)
        if comm.rank == 0:
            model(torch.ones(2, 3))  # one device's again: nobody is waited for

    rd.run(be_rank, 2, "threads")


def penalized(model: Any, x: Any) -> tuple[Any, Any]:
    """A loss with a gradient penalty, and the gradient."""
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + slope.square().sum(1).mean(), slope.detach()


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_gradients_that_a_program_asks_for_are_not_weighed(strategy: str) -> None:
    """By `torch.autograd.grad`, in batches of which ranks have more rows than others, or none."""
    plain, count = Net(2), 5
    optimizer, slopes = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for step in range(2):
        loss, slope = penalized(plain, rows(2, count, step))
        slopes.append(slope)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def be_rank(comm: Any) -> tuple[list[Any], dict[str, Any]]:
        model = rd.SyncBatchNorm.convert(Net(2))
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
        data = torch.cat([rows(2, count, step) for step in range(2)])
        for x in rd.loader(data, count, comm=comm, shuffle=False, quiet=True):
            loss, slope = penalized(model, x)
            found.append(slope)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return found, rd.full_state_dict(model)

    for size in (2, 3, 7):
        told = rd.run(be_rank, size, "threads")
        for step, due in enumerate(slopes):
            every = torch.cat([found[step] for found, _ in told])
            np.testing.assert_allclose(every.numpy(), due.numpy(), rtol=1e-12, atol=1e-12)
        for name, one in plain.state_dict().items():
            np.testing.assert_allclose(
                told[0][1][name].numpy(), one.numpy(), rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_copies_of_a_prepared_model_are_of_one_device(strategy: str) -> None:
    """But those of layers that were given ranks by hand stay with them."""

    def be_rank(comm: Any) -> None:
        model = rd.SyncBatchNorm.convert(Net(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
        with rd.whole(model):
            copied = copy.deepcopy(model)
            averaged = torch.optim.swa_utils.AveragedModel(model)
        mine = rows(2, 4, comm.rank)
        if comm.rank == 0:  # nobody is waited for
            for one in (copied, averaged.module):
                one(mine).sum().backward()
                due = 0.1 * (mine * one.scale).mean(0)
                np.testing.assert_allclose(one.first.running_mean.numpy(), due.detach().numpy())
        layer = copy.deepcopy(rd.SyncBatchNorm(4, comm=comm, dtype=torch.float64))
        layer(mine)
        both = torch.cat([rows(2, 4, rank) for rank in range(comm.size)])
        found = layer.state_dict()["running_mean"]
        np.testing.assert_allclose(found.numpy(), 0.1 * both.mean(0).numpy())

    rd.run(be_rank, 2, "threads")
