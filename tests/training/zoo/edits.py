"""What people do to a model and its optimizer between steps."""

from __future__ import annotations

import copy
import pickle
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


@habit(FAMILY, "EMA over model.parameters()")
def ema(at: Place) -> State:
    loop, kept = Loop(at), [one.detach().clone() for one in made(Net).parameters()]
    for step in range(3):
        loop.backward(step)
        loop.end()
        with torch.no_grad():
            for mine, one in zip(kept, loop.model.parameters(), strict=True):
                mine.lerp_(one, 0.1)
    return loop.state | {f"ema {index}": one for index, one in enumerate(kept)}


@habit(FAMILY, "EMA by rd.full_state_dict")
def ema_by_state(at: Place) -> State:
    loop, kept = Loop(at), made(Net).state_dict()
    for step in range(3):
        loop.backward(step)
        loop.end()
        for name, one in at.state(loop.model).items():
            kept[name].lerp_(one, 0.1)
    return loop.state | {f"ema {name}": one for name, one in kept.items()}


@habit(FAMILY, "torch's AveragedModel")
def averaged(at: Place) -> State:
    loop = Loop(at)
    mean = torch.optim.swa_utils.AveragedModel(loop.model)
    for step in range(3):
        loop.backward(step)
        loop.end()
        mean.update_parameters(loop.model)
    return loop.state | {f"mean {name}": one.clone() for name, one in mean.state_dict().items()}


@habit(FAMILY, "copy.deepcopy of the model")
def copied(at: Place) -> State:
    found = []
    state = between(at, lambda loop: found.append(copy.deepcopy(loop.model)))
    return state | {f"copy {name}": one for name, one in found[0].state_dict().items()}


@habit(FAMILY, "pickle of the model's state_dict")
def pickled(at: Place) -> State:
    found = []
    state = between(at, lambda loop: found.append(pickle.dumps(loop.model.state_dict())))
    return state | {f"copy {name}": one for name, one in pickle.loads(found[0]).items()}


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
    model = made(Net)
    head = sgd(model.head.parameters())
    model, own = at.prepare(model, adam([*model.body.parameters(), *model.extra.parameters()]))
    for step in range(2):
        at.loss(lambda _, x: model(x).square().mean(), rows_of(step)).backward()
        own.step()
        head.step()
        model.zero_grad()
    return at.state(model)


@habit(FAMILY, "rd.whole around reading and writing weights")
def whole(at: Place) -> State:
    def do(loop: Loop) -> None:
        with torch.no_grad(), at.whole(loop.model):
            loop.model.head.weight.mul_(0.5)

    return between(at, do)
