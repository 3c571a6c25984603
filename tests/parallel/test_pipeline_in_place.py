"""Writing in place across stages: as on one device, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import InvalidArgumentError, RankFailed

torch = pytest.importorskip("torch")
nn: Any = torch.nn
mse = nn.functional.mse_loss

Forward = Callable[[Any, Any], Any]


class Chain(nn.Module):  # type: ignore[misc]
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self._does = forward

    def forward(self, x: Any) -> Any:
        return self._does(self, x)


def on_an_activation(m: Any, x: Any) -> Any:
    h = m.a(x)
    y = m.b(h * 1)
    h.add_(1)
    return m.c(y + h)


def by_a_module(m: Any, x: Any) -> Any:
    h = m.a(x)
    y = m.b(h * 1)
    return m.c(y + nn.functional.relu(h, inplace=True))


def on_a_view_made_there(m: Any, x: Any) -> Any:
    h = m.a(x)
    y = m.b(h * 1)
    h[:, :3].mul_(2)
    return m.c(y + h)


def on_a_copy(m: Any, x: Any) -> Any:
    z = x * 2
    v = z[:, :3].clone()
    h = m.b(m.a(x))
    v.mul_(2)
    return m.c(h + z + v.repeat(1, 2))


def on_a_slice(m: Any, x: Any) -> Any:
    z = x * 2
    v = z[:, :3]
    h = m.b(m.a(x))
    v.add_(1)
    return m.c(h + z)


def on_another_shape(m: Any, x: Any) -> Any:
    z = x.clone()
    v = z.view(-1, 3)
    h = m.b(m.a(x))
    v.mul_(2)
    return m.c(h + z)


def on_what_is_detached(m: Any, x: Any) -> Any:
    h = m.a(x)
    z = h.detach()
    y = m.b(h * 1)
    z.mul_(2)
    return m.c(y + h)


def on_an_activations_view(m: Any, x: Any) -> Any:
    h = m.a(x)
    v = h[:, :3]
    y = m.b(h * 1)
    v.add_(1)
    return m.c(y + h)


def two_stages_later(m: Any, x: Any) -> Any:
    z = x * 2
    v = z[:, :3]
    h = m.c(m.b(m.a(x)))
    v.add_(1)
    return h + z


RIGHT = [on_an_activation, by_a_module, on_a_view_made_there, on_a_copy]
REFUSED = [on_a_slice, on_another_shape, on_what_is_detached, on_an_activations_view]
SCHEDULES = ["1f1b", "zb-h1"]


def trained(pipe: Any, forward: Forward, stages: list[str], schedule: str, size: int) -> Any:
    torch.manual_seed(0)
    model = Chain(forward).double()
    x, target = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    alone = copy.deepcopy(model)
    mse(alone(x), target).backward()

    def body(comm: rd.Communicator) -> Any:
        made = pipe(
            copy.deepcopy(model),
            comm=comm,
            loss=mse,
            micro_batches=4,
            stages=stages,
            schedule=schedule,
        )
        try:
            made.step(x, target)
        except (InvalidArgumentError, RankFailed) as error:
            return str(error)
        for name, value in made.named_parameters():
            expected = alone.get_parameter(name).grad
            torch.testing.assert_close(value.grad, expected, rtol=1e-12, atol=1e-12)
        return ""

    return rd.run(body, size, "threads")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("forward", RIGHT)
def test_what_a_stage_got_is_its_own(forward: Forward, schedule: str) -> None:
    assert trained(rd.Pipeline, forward, ["b"], schedule, 2) == ["", ""]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("forward", REFUSED)
def test_memory_that_two_shared_is_not_written(forward: Forward, schedule: str) -> None:
    told = trained(rd.Pipeline, forward, ["b"], schedule, 2)
    assert all("shares memory" in each and "clone()" in each for each in told)


def test_they_are_known_when_they_go_on() -> None:
    """Through a stage that does nothing with them, and between stages of one rank."""
    told = trained(rd.Pipeline, two_stages_later, ["b", "c"], "1f1b", 3)
    assert all("Stage 2" in each and "shares memory" in each for each in told)
    told = trained(rd.Pipeline, two_stages_later, ["b", "c"], "interleaved-1f1b", 1)
    assert all("shares memory" in each for each in told)
