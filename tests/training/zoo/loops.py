"""What people write into the loop around a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo.habits import adam, habit, made, rows_of, sgd
from zoo.place import ROWS, Place, State

FAMILY = "in the loop"
STEPS = 3


class Net(nn.Module):
    """Two units and one that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.extra = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any, *, extra: bool = True) -> Any:
        x = self.body(x)
        return self.head(self.extra(x) if extra else x)


class Loop:
    """A prepared model, and the parts of a step."""

    def __init__(
        self, at: Place, optimizer: Any = adam, build: Any = Net, groups: Any = nn.Module.parameters
    ) -> None:
        self.at, model = at, made(build)
        self.model, self.optimizer = at.prepare(model, optimizer(groups(model)))

    def backward(self, step: int, part: int = 0, parts: int = 1, **options: Any) -> None:
        rows = rows_of(step).tensor_split(parts)[part]
        self.at.loss(lambda _, x: self.model(x, **options).square().mean(), rows).backward()

    def weighed(self, step: int, rows: int = ROWS, part: int = 0, parts: int = 1) -> None:
        some = rows_of(step, count=rows).tensor_split(parts)[part]
        self.at.backward(lambda _, x: self.model(x).square().mean(), some, rows)

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> State:
        return self.at.state(self.model)


def looped(at: Place, step: Callable[[Loop, int], None], optimizer: Any = adam) -> State:
    loop = Loop(at, optimizer)
    for number in range(STEPS):
        step(loop, number)
    return loop.state


@habit(FAMILY, "rd.accumulate around all micro-batches but the last")
def accumulated(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        for part in range(2):
            with at.adding(loop.model) if part < 1 else contextlib.nullcontext():
                loop.backward(number, part, 2)
        loop.end()

    return looped(at, step)


@habit(FAMILY, "rd.accumulate around every micro-batch")
def all_accumulated(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        for part in range(2):
            with at.adding(loop.model):
                loop.backward(number, part, 2)
        loop.end()

    return looped(at, step)


@habit(FAMILY, "several backward passes, each exchanged")
def several(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        for part in range(3):
            loop.backward(number, part, 3)
        loop.end()

    return looped(at, step)


@habit(FAMILY, "rd.backward with weights: uneven shards")
def uneven(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        loop.weighed(number, rows=7)
        loop.end()

    return looped(at, step)


@habit(FAMILY, "rd.backward with weights: ranks without rows")
def empty(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        loop.weighed(number, rows=1 + number)
        loop.end()

    return looped(at, step)


@habit(FAMILY, "rd.backward with weights, accumulated")
def weighed(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        for part in range(2):
            with at.adding(loop.model) if part < 1 else contextlib.nullcontext():
                loop.weighed(number, 11, part, 2)
        loop.end()

    return looped(at, step)


@habit(FAMILY, "schedulers, also in several groups")
def scheduled(at: Place) -> State:
    def groups(model: Any) -> list[dict[str, Any]]:
        return [{"params": model.body.parameters(), "lr": 0.02},
                {"params": [*model.extra.parameters(), *model.head.parameters()],
                 "weight_decay": 0.1}]  # fmt: skip

    loop = Loop(at, lambda those: torch.optim.AdamW(those, lr=0.01, eps=1e-4), groups=groups)
    rate = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, [0.1, 0.05], total_steps=6)
    for step in range(STEPS):
        loop.backward(step)
        loop.end()
        rate.step()
    return loop.state


@habit(FAMILY, "step(closure)")
def closure(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        def again() -> float:
            loop.optimizer.zero_grad()
            loop.backward(number)
            return 0.0

        loop.optimizer.step(again)

    return looped(at, step)


@habit(FAMILY, "LBFGS")
def lbfgs(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        def again() -> Any:
            loop.optimizer.zero_grad()
            losses = at.loss(lambda _, x: loop.model(x).square().mean(), rows_of(number))
            losses.backward()
            return losses

        loop.optimizer.step(again)

    return looped(at, step, lambda those: torch.optim.LBFGS(those, lr=0.1, max_iter=2))


@habit(FAMILY, "evaluation in between, by no_grad and inference_mode")
def evaluated(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        loop.model.eval()
        with torch.no_grad():
            loop.model(rows_of(9))
        with torch.inference_mode():
            loop.model(rows_of(9))
        loop.model.train()
        loop.backward(number)
        with torch.no_grad():
            loop.model(rows_of(9))
        loop.end()

    return looped(at, step)


@habit(FAMILY, "GAN: two models, two optimizers, in turns")
def gan(at: Place) -> State:
    fake, real = Loop(at), Loop(at, sgd)
    for step in range(2):
        at.loss(lambda _, x: -real.model(fake.model(x).detach().repeat(1, 2)).square().mean(),
                rows_of(step)).backward()  # fmt: skip
        real.end()
        at.loss(lambda _, x: real.model(fake.model(x).repeat(1, 2)).sin().mean(),
                rows_of(step)).backward()  # fmt: skip
        fake.end()
        real.optimizer.zero_grad()
    return fake.state | {f"real.{name}": one for name, one in real.state.items()}


@habit(FAMILY, "step without backward, and twice on the same gradients")
def odd_steps(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        loop.optimizer.step()
        loop.backward(number)
        loop.optimizer.step()
        loop.end()

    return looped(at, step)


@habit(FAMILY, "hooks around the optimizer's step")
def step_hooks(at: Place) -> State:
    loop = Loop(at)
    count = []
    loop.optimizer.register_step_pre_hook(lambda *_: count.append(1))
    loop.optimizer.register_step_post_hook(lambda *_: count.append(1))
    for step in range(STEPS):
        loop.backward(step)
        loop.end()
    return loop.state | {"calls": torch.tensor(len(count))}


@habit(FAMILY, "rd.loader, left by break, and looped over again")
def left_loader(at: Place) -> State:
    loop = Loop(at)
    data = rows_of(0, count=3 * ROWS)

    def train(rows: Any) -> None:
        loop.model(rows).square().mean().backward()
        loop.end()

    loader = at.loader(data, ROWS)
    for step, (rows,) in enumerate(loader):
        train(rows)
        if step == 1:
            break
    for (rows,) in loader:
        train(rows)
    return loop.state


@habit(FAMILY, "an error in forward on all ranks, caught")
def forward_error(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        with contextlib.suppress(RuntimeError):
            loop.model(torch.ones(2, 7, dtype=torch.float64))
        loop.backward(number)
        loop.end()

    return looped(at, step)


def after_error(at: Place, fails: Callable[[Loop, Any], Any], expected: Any) -> State:
    """Steps that begin with a loss whose backward pass raises; the error is kept."""
    kept = []

    def step(loop: Loop, number: int) -> None:
        try:
            fails(loop, rows_of(number)).square().mean().backward()
        except expected as error:
            kept.append(error)
        loop.optimizer.zero_grad()
        loop.backward(number)
        loop.end()

    return looped(at, step)


@habit(FAMILY, "an error in backward on all ranks, caught and kept")
def backward_error(at: Place) -> State:
    def stumble(_: Any) -> None:
        raise ValueError("on purpose")

    def fails(loop: Loop, rows: Any) -> Any:
        hidden = loop.model.body(rows)
        hidden.register_hook(stumble)
        return loop.model.head(hidden)

    return after_error(at, fails, ValueError)


@habit(FAMILY, "a refusal in backward, caught and kept")
def kept_refusal(at: Place) -> State:
    def fails(loop: Loop, rows: Any) -> Any:
        x = checkpoint(loop.model.body, rows.requires_grad_(), use_reentrant=True)
        return loop.model.head(loop.model.body(x))

    return after_error(at, fails, at.refusals)
