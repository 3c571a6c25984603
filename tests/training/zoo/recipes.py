"""More of what people write into the loop: recipes of papers and tutorials."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.habits import adam, habit, made, rows_of, sgd
from zoo.loops import FAMILY, STEPS, Loop, Net, looped
from zoo.place import Place, State


class Sam(torch.optim.SGD):
    """Climbs to the worst place nearby, takes the gradient there, and steps from where it was."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [one for group in self.param_groups for one in group["params"]
                  if one.grad is not None]  # fmt: skip
        norm = torch.sqrt(sum((one.grad.square().sum() for one in params), torch.tensor(0.0)))
        moves = [0.05 * one.grad / norm for one in params]
        for one, move in zip(params, moves, strict=True):
            one.add_(move)
        if closure is not None:
            with torch.enable_grad():
                closure()
        for one, move in zip(params, moves, strict=True):
            one.sub_(move)
        super().step()
        return None


@habit(FAMILY, "a rank that leaves out one backward pass")
def left_out(at: Place) -> State:
    """Which is refused, but on a single rank, where it is a step on nothing."""
    loop = Loop(at)
    for step in range(STEPS):
        if step != 1 or at.size - 1 not in at.ranks:
            loop.backward(step)
        loop.end()
    return loop.state


@habit(FAMILY, "SAM as an optimizer with a closure")
def sam(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        loop.backward(number)

        def again() -> None:
            loop.optimizer.zero_grad()
            loop.backward(number)

        loop.optimizer.step(again)
        loop.optimizer.zero_grad()

    return looped(at, step, lambda those: Sam(those, lr=0.1))


@habit(FAMILY, "a rank that accumulates one micro-batch more")
def one_more(at: Place) -> State:
    loop = Loop(at)
    rows = rows_of(0)
    of = at.loss
    for step in range(2):
        with at.adding(loop.model):
            of(lambda _, x: loop.model(x).square().mean(), rows).backward()
            if at.alone:
                last = rows.tensor_split(at.size)[at.size - 1]
                (loop.model(last).square().mean() / at.size).backward()
            elif at.comm.rank == at.size - 1:
                of(lambda _, x: loop.model(x).square().mean(), rows).backward()
        loop.backward(step)
        loop.end()
    return loop.state


@habit(FAMILY, "micro-batches by hand: (loss / parts).backward(), without rd.accumulate")
def by_hand(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        for rows in rows_of(number).tensor_split(2):
            at.loss(lambda _, x: loop.model(x).square().mean() / 2, rows).backward()
        loop.end()

    return looped(at, step)


def grouped(groups: Callable[[Any], list[dict[str, Any]]]) -> Callable[[Place], State]:
    def program(at: Place) -> State:
        loop = Loop(at, lambda those: torch.optim.AdamW(those, lr=0.02, eps=1e-4), groups=groups)
        for step in range(STEPS):
            loop.backward(step)
            loop.end()
        return loop.state

    return program


@habit(FAMILY, "weight decay for matrices only, by named_parameters")
@grouped
def decay_groups(model: Any) -> list[dict[str, Any]]:
    plain = [one for name, one in model.named_parameters() if "bias" in name]
    return [{"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": 0.1},
            {"params": plain, "weight_decay": 0.0}]  # fmt: skip


@habit(FAMILY, "a rate for every parameter, lower in lower layers")
@grouped
def layer_rates(model: Any) -> list[dict[str, Any]]:
    return [{"params": [one], "lr": 0.03 * 0.8**depth}
            for depth, one in enumerate(reversed(list(model.parameters())))]  # fmt: skip


@habit(FAMILY, "WGAN: a critic whose weights are clamped after each step")
def wgan(at: Place) -> State:
    fake, critic = Loop(at), Loop(at, sgd)
    for step in range(2):
        for turn in range(2):

            def loss(_: int, x: Any) -> Any:
                return (
                    critic.model(fake.model(x).detach().repeat(1, 2)).mean()
                    - critic.model(x).mean()
                )

            at.loss(loss, rows_of(step + turn)).backward()
            critic.end()
            with torch.no_grad():
                for one in critic.model.parameters():
                    one.clamp_(-0.2, 0.2)
        at.loss(
            lambda _, x: -critic.model(fake.model(x).repeat(1, 2)).mean(), rows_of(step)
        ).backward()
        fake.end()
        critic.optimizer.zero_grad()
    return fake.state | {f"critic.{name}": one for name, one in critic.state.items()}


@habit(FAMILY, "torch's GradScaler, disabled: scale, unscale_, step, update")
def grad_scaler(at: Place) -> State:
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(loop: Loop, number: int) -> None:
        loss = at.loss(lambda _, x: loop.model(x).square().mean(), rows_of(number))
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()

    return looped(at, step)


@habit(FAMILY, "warmup by LambdaLR, and ReduceLROnPlateau on the mean loss")
def warmup(at: Place) -> State:
    loop = Loop(at)
    lambdas = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: (step + 1) / 4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer, patience=0)
    for step in range(4):
        loop.backward(step)
        loop.end()
        lambdas.step()
        plateau.step(1.0)
    return loop.state


@habit(FAMILY, "truncated backpropagation: a state carried over, and detached")
def truncated(at: Place) -> State:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(4, 5), nn.Linear(5, 2)

        def forward(self, x: Any, state: Any) -> Any:
            state = self.cell(x, state)
            return self.head(state), state

    loop = Loop(at, build=Cell)
    states = {rank: torch.zeros(12 // at.size, 5, dtype=torch.float64) for rank in at.ranks}
    for step in range(STEPS):

        def loss(rank: int, x: Any) -> Any:
            y, state = loop.model(x, states[rank])
            states[rank] = state.detach()
            return y.square().mean()

        at.loss(loss, rows_of(step)).backward()
        loop.end()
    return loop.state


@habit(FAMILY, "two losses, each with a backward pass over the same graph, one step")
def two_losses(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        found: list[Any] = []

        def losses(_: int, x: Any) -> Any:
            y = loop.model(x)
            found.append(y.sin().mean())
            return y.square().mean()

        first = at.loss(losses, rows_of(number))
        first.backward(retain_graph=True)
        torch.stack(found).mean().backward()  # type: ignore[no-untyped-call]
        loop.end()

    return looped(at, step)


@habit(FAMILY, "detect_anomaly around a step")
def anomaly(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        with torch.autograd.set_detect_anomaly(True):
            loop.backward(number)
        loop.end()

    return looped(at, step)


@habit(FAMILY, "a batch left out on all ranks, after a loss that is not finite")
def skipped(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        loss = at.loss(lambda _, x: loop.model(x).square().mean(), rows_of(number))
        if number == 1:
            return
        loss.backward()
        loop.end()

    return looped(at, step)


@habit(FAMILY, "an optimizer for each parameter, which steps in a hook in backward")
def in_hooks(at: Place) -> State:
    """As torch's tutorial saves memory; on ranks a gradient is not yet that of all of them then."""
    model = made(Net)
    own = {one: sgd([one]) for one in model.parameters()}
    model, _ = at.prepare(model, list(own.values()))

    def hook(one: Any) -> None:
        own[one].step()
        own[one].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(hook)
    for step in range(STEPS):
        at.loss(lambda _, x: model(x).sum(), rows_of(step)).backward()
    return at.state(model)


@habit(FAMILY, "meta-learning by hand: a copy trained for a step, its gradients used (Reptile)")
def reptile(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        weights = at.state(loop.model)
        copied = made(Net)
        copied.load_state_dict(copy.deepcopy(weights))
        inner = sgd(copied.parameters())
        copied(rows_of(number)).square().mean().backward()
        inner.step()
        with torch.no_grad():
            for one, other in zip(loop.model.parameters(), copied.parameters(), strict=True):
                one.add_(0.5 * (other - one))

    return looped(at, step, adam)


class Shift(nn.Module):
    """The gradient of its bias needs no weight, and may come when those are not here."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        return UserDict(y=self.inner(x))


@habit(FAMILY, "rd.loader, batches that can't be divided evenly, outputs in a UserDict")
def uneven_batches(at: Place) -> State:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Shift() for _ in range(3)])

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = torch.tanh(block(x)["y"])
            return x

    loop, data = Loop(at, build=Shifted), rows_of(0, count=14)
    for (rows,) in at.loader(data, 7):
        loop.model(rows).square().mean().backward()
        loop.end()
    return loop.state
