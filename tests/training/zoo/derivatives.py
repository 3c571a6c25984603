"""Losses that are made of derivatives, and other things that torch.func and autograd.grad do."""

from __future__ import annotations

from typing import Any

import torch
from torch import func

from zoo.habits import habit, made, rows_of, trained
from zoo.losses import FAMILY, Stack, plain
from zoo.place import Place, State


@habit(FAMILY, "gradients by torch.autograd.grad over model.parameters(), in the loss")
def gradient_norms(at: Place) -> State:
    def loss(model: Any, rank: int, x: Any, step: int) -> Any:
        first = plain(model, rank, x, step)
        used = [one for one in model.parameters() if one.requires_grad]
        grads: Any = torch.autograd.grad(first, used, create_graph=True, allow_unused=True)
        return first + 0.1 * sum(one.square().sum() for one in grads if one is not None)

    return trained(at, made(Stack), loss)


@habit(FAMILY, "gradients by torch.autograd.grad, put into p.grad")
def by_grad(at: Place) -> State:
    """Of this rank's rows: what is put there counts as it is, so all ranks take the same rows."""
    model = made(Stack)
    model, own = at.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        every = list(model.parameters())
        loss = model(rows_of(step)).square().mean()
        grads = torch.autograd.grad(loss, every, allow_unused=True)
        for one, grad in zip(every, grads, strict=True):
            one.grad = grad
        own.step()
        own.zero_grad()
    return at.state(model)


@habit(FAMILY, "a differential equation in the loss: second derivatives by the inputs")
def equation(at: Place) -> State:
    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        x = x.clone().requires_grad_()
        y = model(x).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return (second.sum(1) + first.sum(1)).square().mean()

    return trained(at, made(Stack), loss)


@habit(FAMILY, "MAML: a step inside the loss, by functional_call")
def maml(at: Place) -> State:
    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        own = dict(model.named_parameters())
        first = func.functional_call(model, own, (x,)).square().mean()
        grads: Any = torch.autograd.grad(
            first, list(own.values()), create_graph=True, allow_unused=True
        )
        inner = {name: one if grad is None else one - 0.1 * grad
                 for (name, one), grad in zip(own.items(), grads, strict=True)}  # fmt: skip
        return func.functional_call(model, inner, (x.flip(1),)).square().mean()

    return trained(at, made(Stack), loss)


@habit(FAMILY, "adversarial inputs: a step along the gradient by x first")
def adversarial(at: Place) -> State:
    def loss(model: Any, rank: int, x: Any, step: int) -> Any:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(plain(model, rank, x, step), x)
        return plain(model, rank, (x + 0.1 * grad).detach(), step)

    return trained(at, made(Stack), loss)


@habit(FAMILY, "a custom autograd.Function that sees weights")
def custom(at: Place) -> State:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Any) -> Any:
            ctx.save_for_backward(weight)
            return weight.sign() * weight.abs().mean()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (weight,) = ctx.saved_tensors
            return grads[0] * (weight.abs() < 1)

    def through(_: Any, block: Any, x: Any) -> Any:
        return block(x)

    def keep(block: Any, y: Any) -> Any:
        weight: Any = Straight.apply(block.up.weight)  # type: ignore[no-untyped-call]
        return y + torch.tanh(y @ weight.T) @ block.down.weight.T

    return trained(at, made(lambda: Stack(keep, through)), plain)
