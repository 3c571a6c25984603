"""A forward that is read off does in stages what it does on one device, or is refused by name."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import InvalidArgumentError, RankFailed

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional


class Rounds(torch.autograd.Function):  # type: ignore[misc, name-defined]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        del ctx
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        del ctx
        return 3 * grad


class Tied(nn.Linear):  # type: ignore[misc, name-defined]
    def attend(self, x: Any) -> Any:
        return x @ self.weight

    @property
    def doubled(self) -> Any:
        return 2 * self.weight


class Chain(nn.Module):  # type: ignore[misc, name-defined]
    """Four layers, and between the second and the third what `does` does."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (Tied(4, 4).double() for _ in range(4))
        self.register_buffer("count", torch.zeros(()).double())
        self.register_buffer("mean", torch.ones(4).double())
        self.steps, self.scale = 0, 1.0
        self.cache: dict[str, Any] = {}
        self._does = does

    def forward(self, x: Any) -> Any:
        return self.d(torch.tanh(self.c(self._does(self, torch.tanh(self.a(x))))))


def plain(self: Any, h: Any) -> Any:
    return self.b(h)


def no_grad(self: Any, h: Any) -> Any:
    with torch.no_grad():
        h = self.b(h)
    return h + h.mean()


def enable_grad(self: Any, h: Any) -> Any:
    with torch.no_grad():
        low = self.b(h)
        with torch.enable_grad():
            return low + self.b(h)


def function(self: Any, h: Any) -> Any:
    torch.set_grad_enabled(False)
    low = self.b(h)
    torch.set_grad_enabled(True)
    return low + h


def autocast(self: Any, h: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = F.linear(h.float(), self.b.weight.float(), self.b.bias.float())
    return low.to(h.dtype)


def parameters(self: Any, h: Any) -> Any:
    return self.b(h) + sum(one.sum() for one in self.b.parameters())


def all_parameters(self: Any, h: Any) -> Any:
    return self.b(h) * (1 + sum(one.square().sum() for one in self.parameters()))


def named(self: Any, h: Any) -> Any:
    return self.b(h) + dict(self.named_parameters())["d.weight"].sum()


def state(self: Any, h: Any) -> Any:
    return self.b(h) + self.state_dict()["c.bias"].sum()


def modules(self: Any, h: Any) -> Any:
    return self.b(h) + sum(one.bias.sum() for one in self.modules() if isinstance(one, nn.Linear))


def method(self: Any, h: Any) -> Any:
    return self.a.attend(self.b(h)) @ self.d.doubled


def counts(self: Any, h: Any) -> Any:
    self.count += 1
    return self.b(h) * self.count


def counts_by_method(self: Any, h: Any) -> Any:
    self.count.add_(1)
    return self.b(h) * self.count


def sets(self: Any, h: Any) -> Any:
    before = self.mean
    self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
    return self.b(h) * self.mean + before


def resets(self: Any, h: Any) -> Any:
    self.mean = torch.zeros(4, dtype=torch.float64)
    self.mean.add_(h.detach().mean(0))
    return self.b(h) * self.mean


def keeps_last(self: Any, h: Any) -> Any:
    self.mean = h.detach().mean(0)
    return self.b(h)


AS_ONE = [plain, no_grad, enable_grad, function, autocast, parameters, all_parameters, named, state,
          modules, method, counts, counts_by_method, sets, resets, keeps_last]  # fmt: skip


def mse(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("does", AS_ONE, ids=lambda does: does.__name__)
def test_stages_do_what_one_device_does(does: Any, micro_batches: int) -> None:
    torch.manual_seed(1)
    model, batches = Chain(does), torch.randn(3, 2, 4, 4).double()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)

    def on_one(x: Any, target: Any) -> Any:
        total = torch.zeros(()).double()
        for part, right in zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True):
            loss = mse(alone(part), right) / micro_batches
            if alone.training:
                loss.backward()
            total += loss.detach()
        return total

    for x, target in batches:
        optimizer.zero_grad()
        on_one(x, target)
        optimizer.step()
    alone.eval()
    with torch.no_grad():
        losses = torch.stack([on_one(x, target) for x, target in batches])

    def body(comm: Any) -> Any:
        mesh = rd.Mesh(pp=2, comm=comm)
        pipe = rd.Pipeline(
            copy.deepcopy(model), comm=mesh["pp"], loss=mse, stages=["c"],
            micro_batches=micro_batches,
        )  # fmt: skip
        pipe, own = rd.prepare(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), mesh=mesh)
        for x, target in batches:
            own.zero_grad()
            pipe.step(x, target)
            own.step()
        pipe.eval()
        found = torch.stack([pipe.evaluate(x, target) for x, target in batches])
        return rd.full_state_dict(pipe), found

    for found, evaluated in rd.run(body, 2, "threads"):
        assert found.keys() == alone.state_dict().keys()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
        torch.testing.assert_close(evaluated, losses, rtol=1e-12, atol=1e-12)


def own_function(self: Any, h: Any) -> Any:
    return Rounds.apply(self.b(h))


def checkpointed(self: Any, h: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(self.b, h, use_reentrant=False)


def caught(self: Any, h: Any) -> Any:
    try:
        return own_function(self, h)
    except Exception:  # noqa: BLE001 - as programs do
        return self.b(h)


def python_count(self: Any, h: Any) -> Any:
    self.steps += 1
    return self.b(h) * self.steps


def new_attribute(self: Any, h: Any) -> Any:
    self.hidden = h
    return self.b(h)


def inside_closed(self: Any, h: Any) -> Any:
    self.b.scale = 2
    return self.b(h)


def evaluates(self: Any, h: Any) -> Any:
    self.b.eval()
    return self.b(h)


def container(self: Any, h: Any) -> Any:
    self.cache["h"] = h
    return self.b(h)


def random_tensor(self: Any, h: Any) -> Any:
    return self.b(h) + torch.randn(4)


def random_number(self: Any, h: Any) -> Any:
    return self.b(h) * random.random()


def by_mode(self: Any, h: Any) -> Any:
    return self.b(h) if torch.is_grad_enabled() else h


REFUSED = [
    (own_function, "Rounds.apply"),
    (checkpointed, "torch.utils.checkpoint"),
    (caught, "Rounds.apply"),
    (python_count, "sets steps"),
    (new_attribute, "sets hidden"),
    (inside_closed, "sets b.scale"),
    (evaluates, "sets b.training"),
    (container, "what is in cache"),
    (random_tensor, "another thing each time"),
    (random_number, "another thing each time"),
    (by_mode, "with gradients and another without"),
]


def refusals(body: Any) -> list[BaseException]:
    def rank_of(comm: Any) -> BaseException:
        with pytest.raises((InvalidArgumentError, RankFailed)) as found:
            body(comm)
        return found.value

    return rd.run(rank_of, 2, "threads")


@pytest.mark.parametrize(("does", "words"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_what_operations_do_not_show_is_refused(does: Any, words: str) -> None:
    model = Chain(does)

    def body(comm: Any) -> None:
        mine = copy.deepcopy(model)
        try:
            rd.Pipeline(mine, comm=comm, loss=mse, micro_batches=1)
        finally:
            assert not mine.cache  # nothing of the reading is left behind

    for error in refusals(body):
        assert words in str(error)
        assert "split=" in str(error)


def test_a_number_that_changes_later_is_refused() -> None:
    def body(comm: Any) -> None:
        model = Chain(lambda self, h: self.b(h) * self.scale)
        pipe = rd.Pipeline(model, comm=comm, loss=mse, micro_batches=1)
        x = torch.ones(2, 4).double()
        pipe.step(x, x)
        model.steps = 5  # which the forward does not read
        pipe.step(x, x)
        model.scale = 0.5
        pipe.step(x, x)

    for error in refusals(body):
        assert "scale of Chain was 1.0" in str(error)
        assert "0.5 now" in str(error)


def early_write(self: Any, h: Any) -> Any:
    self.count.add_(1)
    return self.c(self.b(h)) * self.count


def shared_norm(self: Any, h: Any) -> Any:
    return self.norm(self.c(self.b(self.norm(h))))


def late_set(self: Any, h: Any) -> Any:
    out = self.c(self.b(h * self.mean))
    self.mean = h.detach().mean(0)
    return out


@pytest.mark.parametrize("does", [early_write, shared_norm, late_set])
def test_a_buffer_that_several_stages_use_is_not_written(does: Any) -> None:
    model = Chain(does)
    if does is shared_norm:
        model.norm = nn.BatchNorm1d(4).double()

    def body(comm: Any) -> None:
        pipe = rd.Pipeline(copy.deepcopy(model), comm=comm, loss=mse, micro_batches=1, stages=["c"])
        x = torch.arange(16.0).view(4, 4).double()
        pipe.step(x, x)

    for error in refusals(body):
        assert "Stages 0 and 1 of the pipeline use the buffer" in str(error)


def test_measuring_leaves_buffers_as_they_are() -> None:
    def body(comm: Any) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        rd.Pipeline(model, comm=comm, cost="time", sample=torch.randn(8, 4))
        return model[1].num_batches_tracked, model[1].running_mean

    for count, mean in rd.run(body, 2, "threads"):
        assert not count
        assert not mean.any()
