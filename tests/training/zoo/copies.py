"""What people keep of a model beside it: averages, targets, teachers, the best so far."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from zoo.edits import between
from zoo.habits import adam, habit, made, rows_of, sgd
from zoo.loops import Loop, Net
from zoo.place import Place, State

FAMILY = "copies of a model"


def tensors(name: str, state: Any) -> State:
    return {f"{name} {key}": one.detach().clone() for key, one in state.items()}


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
    mean = swa_utils.AveragedModel(loop.model)
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


@habit(FAMILY, "copy.deepcopy of the model inside rd.whole")
def copied_whole(at: Place) -> State:
    found: list[Any] = []

    def do(loop: Loop) -> None:
        with at.whole(loop.model):
            found.append(copy.deepcopy(loop.model))

    return between(at, do) | tensors("copy", found[0].state_dict())


def with_target(at: Place, target: Any, follow: Callable[[Any, Any], object]) -> State:
    """Train towards what another network says, which follows the model after each step."""
    loop = Loop(at)
    target.requires_grad_(requires_grad=False)
    for step in range(3):

        def loss(_: int, x: Any) -> Any:
            return (loop.model(x) - 0.9 * target(x.flip(1)).detach()).square().mean()

        at.loss(loss, rows_of(step)).backward()
        loop.end()
        follow(target, loop.model)
    return loop.state | tensors("target", target.state_dict())


@habit(FAMILY, "DQN: a target network, loaded with rd.full_state_dict")
def target_network(at: Place) -> State:
    return with_target(at, made(Net), lambda target, model: target.load_state_dict(at.state(model)))


@habit(FAMILY, "DQN: a target network, loaded with model.state_dict()")
def target_by_state(at: Place) -> State:
    return with_target(
        at, made(Net), lambda target, model: target.load_state_dict(model.state_dict())
    )


@habit(FAMILY, "BYOL: a target that lerps towards model.parameters()")
def byol(at: Place) -> State:
    @torch.no_grad()
    def follow(target: Any, model: Any) -> None:
        for theirs, mine in zip(target.parameters(), model.parameters(), strict=True):
            theirs.lerp_(mine, 0.1)

    return with_target(at, made(Net), follow)


@habit(FAMILY, "distillation: a frozen teacher inside the prepared model")
def teacher_inside(at: Place) -> State:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = Net(), Net().requires_grad_(requires_grad=False)

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                goal = self.teacher(x)
            return self.student(x) - 2 * goal

    loop = Loop(at, build=Both)
    for step in range(3):
        loop.backward(step)
        loop.end()
    return loop.state


@habit(FAMILY, "SWA: AveragedModel of the whole, and update_bn")
def swa(at: Place) -> State:
    def build() -> Any:
        return nn.Sequential(nn.Linear(4, 5), nn.GroupNorm(1, 5), nn.Linear(5, 2))

    loop = Loop(at, build=build)
    with at.whole(loop.model):
        mean = swa_utils.AveragedModel(loop.model)
    for step in range(3):
        loop.backward(step)
        loop.end()
        with at.whole(loop.model):
            mean.update_parameters(loop.model)
    swa_utils.update_bn([rows_of(8)], mean)
    return loop.state | tensors("mean", mean.state_dict())


@habit(FAMILY, "early stopping: deepcopy(model.state_dict()), loaded in the end")
def early_stopping(at: Place) -> State:
    loop = Loop(at)
    best: Any = None
    for step in range(3):
        loop.backward(step)
        loop.end()
        if step == 1:
            best = copy.deepcopy(loop.model.state_dict())
    loop.model.load_state_dict(best)
    return loop.state


@habit(FAMILY, "the best weights by rd.full_state_dict, loaded and trained on")
def best_weights(at: Place) -> State:
    loop = Loop(at)
    best: Any = None
    for step in range(3):
        loop.backward(step)
        loop.end()
        if step == 0:
            best = at.state(loop.model)
    loop.model.load_state_dict(best)
    loop.backward(3)
    loop.end()
    return loop.state


@habit(FAMILY, "torch.save of both state dicts, and torch.load")
def saved(at: Place) -> State:
    def do(loop: Loop) -> None:
        file = io.BytesIO()
        torch.save((at.state(loop.model), loop.optimizer.state_dict()), file)
        loop.backward(9)
        loop.end()
        file.seek(0)
        weights, state = torch.load(file)
        loop.model.load_state_dict(weights)
        loop.optimizer.load_state_dict(state)

    return between(at, do)


@habit(FAMILY, "LR finder: rates tried, then weights and optimizer as before")
def finder(at: Place) -> State:
    def do(loop: Loop) -> None:
        before = copy.deepcopy((at.state(loop.model), loop.optimizer.state_dict()))
        for rate in (1e-3, 1e-2):
            loop.optimizer.param_groups[0]["lr"] = rate
            loop.backward(9)
            loop.end()
        loop.model.load_state_dict(before[0])
        loop.optimizer.load_state_dict(before[1])

    return between(at, do)


class Lookahead:
    """Every second step, go back half the way to where slow weights are."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count = optimizer, 0
        self.every = [one for group in optimizer.param_groups for one in group["params"]]
        self.slow = [one.detach().clone() for one in self.every]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            for one, slow in zip(self.every, self.slow, strict=True):
                slow.lerp_(one, 0.5)
                one.copy_(slow)


@habit(FAMILY, "Lookahead around the prepared optimizer")
def lookahead(at: Place) -> State:
    loop = Loop(at, sgd)
    outer = Lookahead(loop.optimizer)
    for step in range(4):
        loop.backward(step)
        outer.step()
        loop.optimizer.zero_grad()
    return loop.state


@habit(FAMILY, "model.load_state_dict of other weights between steps")
def loaded(at: Place) -> State:
    return between(at, lambda loop: loop.model.load_state_dict(made(Net).state_dict()))


@habit(FAMILY, "model.load_state_dict of some weights, strict=False")
def partly_loaded(at: Place) -> State:
    def do(loop: Loop) -> None:
        some = {"head.weight": torch.ones(2, 4), "unknown": torch.ones(1)}
        loop.model.load_state_dict(some, strict=False)

    return between(at, do, adam)
