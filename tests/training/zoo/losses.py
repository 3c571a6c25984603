"""The ways in which what a model computes gets into the loss, and from there back."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from zoo.habits import adam, habit, made, rows_of, trained
from zoo.place import Place, State

FAMILY = "from a model to its loss"


class Block(nn.Module):
    """A residual block; `keep` is what it does with what it has computed."""

    def __init__(self, keep: Any = None) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 1)
        self.keep, self.aux = keep, None

    def forward(self, x: Any) -> Any:
        y = x + self.down(torch.tanh(self.up(x)))
        return y if self.keep is None else self.keep(self, y)


class Stack(nn.Module):
    """Blocks one after the other; `through` calls one of them."""

    def __init__(self, keep: Any = None, through: Any = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList([Block(keep) for _ in range(3)])
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.through = through or (lambda _, block, x: block(x))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = self.through(self, block, x)
        return self.last(x) * self.gain


def plain(model: Any, _: int, x: Any, __: int) -> Any:
    return model(x).square().mean()


def in_attribute(block: Any, y: Any) -> Any:
    block.aux = block.head(y).square().mean()
    return y


@habit(FAMILY, "an auxiliary loss in an attribute")
def attribute(at: Place) -> State:
    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        y = model(x)
        return y.square().mean() + 0.1 * sum(one.aux for one in model.blocks)

    return trained(at, made(lambda: Stack(in_attribute)), loss)


@habit(FAMILY, "deep supervision: a list in an attribute, read later")
def supervision(at: Place) -> State:
    def through(model: Any, block: Any, x: Any) -> Any:
        y = block(x)
        model.outs.append(block.head(y))
        return y

    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        model.outs = []
        y = model(x)
        return y.square().mean() + sum(0.1 * one.square().mean() for one in model.outs)

    return trained(at, made(lambda: Stack(through=through)), loss)


@habit(FAMILY, "features in the caller's own list")
def callers_list(at: Place) -> State:
    kept: list[Any] = []

    def through(_: Any, block: Any, x: Any) -> Any:
        kept.append(block(x))
        return kept[-1]

    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        kept.clear()
        model(x)
        return sum((one.sin().mean() for one in kept), torch.tensor(0.0))

    return trained(at, made(lambda: Stack(through=through)), loss)


@habit(FAMILY, "features by a forward hook, alone in the loss")
def forward_hook(at: Place) -> State:
    model, kept = made(Stack), []
    model.blocks[1].down.register_forward_hook(lambda _, __, y: kept.append(y))

    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        kept.clear()
        model(x)
        return kept[0].square().mean()

    return trained(at, model, loss)


@habit(FAMILY, "features by a forward pre-hook")
def pre_hook(at: Place) -> State:
    model, kept = made(Stack), []
    model.last.register_forward_pre_hook(lambda _, given: kept.append(given[0]))

    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        kept.clear()
        return model(x).square().mean() + 0.1 * kept[0].square().mean()

    return trained(at, model, loss)


@habit(FAMILY, "a backward hook that changes gradients on the way")
def backward_hook(at: Place) -> State:
    model = made(Stack)
    model.blocks[0].register_full_backward_hook(lambda _, grads, __: (grads[0] * 0.5,))
    return trained(at, model, plain)


@habit(FAMILY, "a hook on a parameter that scales its gradient")
def parameter_hook(at: Place) -> State:
    model = made(Stack)
    model.first.weight.register_hook(lambda grad: grad * 2)
    model.blocks[1].up.bias.register_hook(lambda grad: grad * 0.5)
    return trained(at, model, plain)


@dataclass
class Result:
    logits: Any
    hidden: Any


@habit(FAMILY, "outputs in a dataclass")
def dataclass_output(at: Place) -> State:
    def keep(block: Any, y: Any) -> Any:
        return (Result(y, block.head(y)), 1)

    def through(_: Any, block: Any, x: Any) -> Any:
        out = block(x)[0]
        return out.logits + out.hidden

    return trained(at, made(lambda: Stack(keep, through)), plain)


@habit(FAMILY, "outputs in a UserDict")
def user_dict(at: Place) -> State:
    def keep(block: Any, y: Any) -> Any:
        return UserDict(y=y, more=[block.head(y)])

    def through(_: Any, block: Any, x: Any) -> Any:
        out = block(x)
        return out["y"] + out["more"][0]

    return trained(at, made(lambda: Stack(keep, through)), plain)


@habit(FAMILY, "gradient penalty (create_graph)")
def gradient_penalty(at: Place) -> State:
    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        x = x.clone().requires_grad_()
        y = model(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + grad.square().sum(1).mean()

    return trained(at, made(Stack), loss)


@habit(FAMILY, "a weight penalty inside forward")
def penalty_inside(at: Place) -> State:
    def keep(block: Any, y: Any) -> Any:
        return y + 0.01 * sum(one.square().sum() for one in block.parameters())

    return trained(at, made(lambda: Stack(keep)), plain)


@habit(FAMILY, "a weight penalty over model.parameters()")
def penalty_outside(at: Place) -> State:
    def loss(model: Any, rank: int, x: Any, step: int) -> Any:
        weights = sum(one.square().sum() for one in model.parameters())
        return plain(model, rank, x, step) + 0.01 * weights

    return trained(at, made(Stack), loss)


@habit(FAMILY, "two backward passes over one graph (retain_graph)")
def retained(at: Place) -> State:
    model, own = at.prepare(*with_adam(made(Stack)))
    for step in range(2):
        hidden: list[Any] = []

        def loss(_: int, x: Any, hidden: list[Any] = hidden) -> Any:
            y = model(x)
            hidden.append(y.sin().mean())
            return y.square().mean()

        first = at.loss(loss, rows_of(step))
        with at.adding(model):
            first.backward(retain_graph=True)
        torch.stack(hidden).mean().backward()  # type: ignore[no-untyped-call]
        own.step()
        own.zero_grad()
    return at.state(model)


def with_adam(model: Any) -> tuple[Any, Any]:
    return model, adam(model.parameters())


@habit(FAMILY, "a part of the model called by itself")
def part_alone(at: Place) -> State:
    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        return model.blocks[1](model.blocks[0](x)).square().mean()

    return trained(at, made(Stack), loss)


@habit(FAMILY, "a method of the model other than forward")
def method(at: Place) -> State:
    class Scored(Stack):
        def score(self, x: Any) -> Any:
            return self.last(self.blocks[0](self.first(x))) * self.gain

    return trained(at, made(Scored), lambda model, _, x, __: model.score(x).square().mean())


@habit(FAMILY, "checkpoint_sequential")
def sequential(at: Place) -> State:
    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        in_two: Any = checkpoint_sequential  # which torch has no types for
        return in_two(model, 2, x, use_reentrant=False).square().mean()

    return trained(at, made(lambda: nn.Sequential(*(Block() for _ in range(4)))), loss)


@habit(FAMILY, "torch.func.functional_call with the model's own parameters")
def functional(at: Place) -> State:
    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        own = dict(model.named_parameters())
        return torch.func.functional_call(model, own, (x,)).square().mean()

    return trained(at, made(Stack), loss)


@habit(FAMILY, "an output that is changed in place")
def in_place(at: Place) -> State:
    def through(_: Any, block: Any, x: Any) -> Any:
        return block(x).mul_(0.5).tanh_()

    return trained(at, made(lambda: Stack(through=through)), plain)


@habit(FAMILY, "a loss that leaves most of the model out")
def left_out(at: Place) -> State:
    return trained(at, made(Stack), lambda model, _, x, step:
                   (model(x) if step % 2 else model.first(x)).square().mean())  # fmt: skip


@habit(FAMILY, "torch.compile before prepare", engine="shared_memory")
def compiled_before(at: Place) -> State:
    return trained(at, torch.compile(made(Stack), backend="eager", dynamic=False), plain)


@habit(FAMILY, "torch.compile after prepare", engine="shared_memory")
def compiled_after(at: Place) -> State:
    def wrap(model: Any) -> Any:
        return torch.compile(model, backend="eager", dynamic=False)

    return trained(at, made(Stack), plain, wrap=wrap)
