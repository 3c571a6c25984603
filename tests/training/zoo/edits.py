"""What people do to a model and its optimizer between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from zoo.habits import adam, habit, made, rows_of, sgd
from zoo.loops import Loop, Net
from zoo.place import Place, State

FAMILY = "between steps"


def between(at: Place, do: Callable[[Loop], object], optimizer: Any = adam) -> State:
    """A step, something, and two more steps."""
    loop = Loop(at, optimizer)
    for step in range(3):
        loop.backward(step)
        loop.end()
        if step == 0:
            do(loop)
    return loop.state


@habit(FAMILY, "freezing a layer by requires_grad_")
def freeze(at: Place) -> State:
    return between(at, lambda loop: loop.model.extra.requires_grad_(requires_grad=False))


@habit(FAMILY, "freezing a layer between rd.unprepare and rd.prepare")
def freeze_well(at: Place) -> State:
    def do(loop: Loop) -> None:
        model, own = at.unprepare(loop.model, loop.optimizer)
        model.extra.requires_grad_(requires_grad=False)
        loop.model, loop.optimizer = at.prepare(model, own)

    return between(at, do)


@habit(FAMILY, "parameters clamped in place")
def clamp(at: Place) -> State:
    def do(loop: Loop) -> None:
        with torch.no_grad():
            for one in loop.model.parameters():
                one.clamp_(-0.1, 0.1)

    return between(at, do)


@habit(FAMILY, "p.data = …")
def data(at: Place) -> State:
    def do(loop: Loop) -> None:
        for one in loop.model.parameters():
            one.data = one.data * 0.5

    return between(at, do)


@habit(FAMILY, "vector_to_parameters")
def vector(at: Place) -> State:
    def do(loop: Loop) -> None:
        whole = parameters_to_vector(loop.model.parameters())
        vector_to_parameters(whole * 0.5, loop.model.parameters())

    return between(at, do)


@habit(FAMILY, "weights read: norms for a log")
def read(at: Place) -> State:
    def do(loop: Loop) -> None:
        norm = sum(one.detach().norm().item() for one in loop.model.parameters())
        loop.optimizer.param_groups[0]["lr"] = 0.001 * norm

    return between(at, do)


@habit(FAMILY, "optimizer.state_dict(), loaded again")
def optimizer_state(at: Place) -> State:
    return between(at, lambda loop: loop.optimizer.load_state_dict(loop.optimizer.state_dict()))


@habit(FAMILY, "an optimizer's state of one device, loaded")
def foreign_state(at: Place) -> State:
    def do(loop: Loop) -> None:
        model = made(Net)
        other = adam(model.parameters())
        model(rows_of(7)).square().mean().backward()
        other.step()
        at.take_state(loop.model, loop.optimizer, model, other)

    return between(at, do)


@habit(FAMILY, "options of groups changed by hand")
def options(at: Place) -> State:
    def do(loop: Loop) -> None:
        loop.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.1)

    return between(at, do, sgd)


@habit(FAMILY, "add_param_group after prepare")
def add_group(at: Place) -> State:
    def do(loop: Loop) -> None:
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})

    return between(at, do)


@habit(FAMILY, "prepared a second time")
def twice(at: Place) -> State:
    def do(loop: Loop) -> None:
        loop.model, loop.optimizer = at.prepare(loop.model, adam(loop.model.parameters()))

    return between(at, do)


@habit(FAMILY, "unprepared, and prepared with another optimizer")
def another(at: Place) -> State:
    def do(loop: Loop) -> None:
        model, _ = at.unprepare(loop.model, loop.optimizer)
        loop.model, loop.optimizer = at.prepare(model, sgd(model.parameters()))

    return between(at, do)


@habit(FAMILY, "another optimizer built over the prepared model")
def rebuilt(at: Place) -> State:
    def do(loop: Loop) -> None:
        loop.optimizer = sgd(loop.model.parameters())

    return between(at, do)


@habit(FAMILY, "a layer replaced after prepare")
def replaced(at: Place) -> State:
    def do(loop: Loop) -> None:
        loop.model.extra = made(lambda: nn.Linear(4, 4))

    return between(at, do)


@habit(FAMILY, "a buffer registered after prepare")
def buffer(at: Place) -> State:
    return between(at, lambda loop: loop.model.register_buffer("late", torch.ones(2)))


@habit(FAMILY, "trained without the optimizer: p.sub_(lr * p.grad)")
def by_hand(at: Place) -> State:
    loop = Loop(at)
    for step in range(3):
        loop.backward(step)
        with torch.no_grad():
            for one in loop.model.parameters():
                one.sub_(0.1 * one.grad)
        loop.optimizer.zero_grad()
    return loop.state


@habit(FAMILY, "gradients cleared by the model of a second optimizer")
def two_optimizers(at: Place) -> State:
    """Of which only one is prepared."""
    loop = Loop(at, groups=lambda model: [*model.body.parameters(), *model.extra.parameters()])
    head = sgd(loop.model.head.parameters())
    for step in range(2):
        loop.backward(step)
        loop.optimizer.step()
        head.step()
        loop.model.zero_grad()
    return loop.state


@habit(FAMILY, "rd.whole around reading and writing weights")
def whole(at: Place) -> State:
    def do(loop: Loop) -> None:
        with torch.no_grad(), at.whole(loop.model):
            loop.model.head.weight.mul_(0.5)

    return between(at, do)


@habit(FAMILY, "the head set up anew: reset_parameters()")
def reset(at: Place) -> State:
    def do(loop: Loop) -> None:
        with torch.no_grad():
            for one in loop.model.head.parameters():
                nn.init.ones_(one)

    return between(at, do)


@habit(FAMILY, "model.apply of an initialization between steps")
def applied(at: Place) -> State:
    def init(module: Any) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)

    return between(at, lambda loop: loop.model.apply(init))


@habit(FAMILY, "model.bfloat16() and model.double() between steps")
def cast(at: Place) -> State:
    return between(at, lambda loop: loop.model.bfloat16().double())


@habit(FAMILY, "a parametrization registered after prepare")
def parametrized(at: Place) -> State:
    def do(loop: Loop) -> None:
        with at.whole(loop.model):
            nn.utils.parametrizations.weight_norm(loop.model.head)

    return between(at, do)


@habit(FAMILY, "weights written through optimizer.param_groups")
def by_groups(at: Place) -> State:
    def do(loop: Loop) -> None:
        with torch.no_grad():
            for group in loop.optimizer.param_groups:
                for one in group["params"]:
                    one.mul_(0.9).add_(0.01)

    return between(at, do)


@habit(FAMILY, "torch.nn.init over optimizer.param_groups")
def initialized(at: Place) -> State:
    def do(loop: Loop) -> None:
        for one in loop.optimizer.param_groups[0]["params"]:
            nn.init.constant_(one, 0.1)

    return between(at, do)
