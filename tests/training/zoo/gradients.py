"""What people do with gradients before a step, and how they let them go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from zoo.habits import habit, sgd
from zoo.loops import Loop, looped
from zoo.place import Place, State

FAMILY = "gradients"


def then_step(before: Callable[[Loop], object]) -> Callable[[Loop, int], None]:
    """Do something between backward and step."""

    def step(loop: Loop, number: int) -> None:
        loop.backward(number)
        before(loop)
        loop.end()

    return step


@habit(FAMILY, "optimizer.clip_grad_norm_, the prepared one's")
def clip(at: Place) -> State:
    return looped(at, then_step(lambda loop: at.clip(loop.optimizer, 0.05)))


@habit(FAMILY, "optimizer.clip_grad_value_")
def clip_value(at: Place) -> State:
    return looped(at, then_step(lambda loop: at.clip_value(loop.optimizer, 0.01)))


@habit(FAMILY, "torch's clip_grad_norm_ over model.parameters()")
def torch_clip(at: Place) -> State:
    return looped(at, then_step(lambda loop: clip_grad_norm_(loop.model.parameters(), 0.05)))


def in_groups(loop: Loop) -> list[Any]:
    return [one for group in loop.optimizer.param_groups for one in group["params"]]


@habit(FAMILY, "torch's clip_grad_norm_ over optimizer.param_groups")
def torch_clip_groups(at: Place) -> State:
    return looped(at, then_step(lambda loop: clip_grad_norm_(in_groups(loop), 0.05)))


@habit(FAMILY, "torch's clip_grad_value_")
def torch_clip_value(at: Place) -> State:
    return looped(at, then_step(lambda loop: clip_grad_value_(loop.model.parameters(), 0.01)))


@habit(FAMILY, "clipping by hand")
def own_clip(at: Place) -> State:
    def cut(loop: Loop) -> None:
        grads = [one.grad for one in loop.model.parameters() if one.grad is not None]
        norm = torch.sqrt(sum((one.square().sum() for one in grads), torch.tensor(0.0)))
        for one in grads:
            one.mul_(torch.clamp(0.05 / norm, max=1.0))

    return looped(at, then_step(cut))


@habit(FAMILY, "gradient norms read for a log")
def logged(at: Place) -> State:
    def log(loop: Loop) -> None:
        norms = [one.grad.norm().item() for one in loop.model.parameters() if one.grad is not None]
        loop.optimizer.param_groups[0]["lr"] = 0.01 + 0.001 * sum(norms)

    return looped(at, then_step(log))


@habit(FAMILY, "gradients scaled by hand")
def scaled(at: Place) -> State:
    def scale(loop: Loop) -> None:
        for one in loop.model.parameters():
            if one.grad is not None:
                one.grad.mul_(0.5)

    return looped(at, then_step(scale), sgd)


@habit(FAMILY, "gradients set by hand")
def set_by_hand(at: Place) -> State:
    def put(loop: Loop) -> None:
        for one in loop.model.parameters():
            one.grad = torch.full(one.shape, 0.1, dtype=torch.float64)

    return looped(at, then_step(put))


def zeroed(how: Callable[[Loop], object]) -> Callable[[Loop, int], None]:
    def step(loop: Loop, number: int) -> None:
        loop.backward(number + 50)
        how(loop)
        loop.backward(number, extra=number % 2 == 0)
        loop.optimizer.step()
        how(loop)

    return step


def let_go(loop: Loop) -> None:
    for one in loop.model.parameters():
        one.grad = None


ZERO: dict[str, Callable[[Loop], object]] = {
    "optimizer.zero_grad()": lambda loop: loop.optimizer.zero_grad(),
    "zero_grad(set_to_none=False)": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda loop: loop.model.zero_grad(),
    "p.grad = None by hand": let_go,
}


def _zero_habit(how: Callable[[Loop], object]) -> Callable[[Place], State]:
    return lambda at: looped(at, zeroed(how))


for _name, _how in ZERO.items():
    habit(FAMILY, f"{_name}, a batch thrown away")(_zero_habit(_how))


@habit(FAMILY, "no zero_grad: gradients of all steps add up")
def never_zeroed(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.optimizer.step()

    return looped(at, step, sgd)


@habit(FAMILY, "gradient noise, from a generator with a seed")
def noise(at: Place) -> State:
    def disturb(loop: Loop) -> None:
        drawn = torch.Generator().manual_seed(3)
        for one in loop.model.parameters():
            one.grad.add_(torch.randn(one.shape, generator=drawn, dtype=torch.float64), alpha=0.01)

    return looped(at, then_step(disturb))


@habit(FAMILY, "gradients centred over their rows")
def centred(at: Place) -> State:
    def centre(loop: Loop) -> None:
        for one in loop.model.parameters():
            if one.dim() > 1:
                one.grad.sub_(one.grad.mean(dim=1, keepdim=True))

    return looped(at, then_step(centre))


@habit(FAMILY, "gradients of some rows masked, as frozen words are")
def masked(at: Place) -> State:
    def mask(loop: Loop) -> None:
        loop.model.head.weight.grad[0] = 0
        loop.model.body[0].weight.grad[:, 1:3].zero_()

    return looped(at, then_step(mask), sgd)


@habit(FAMILY, "adaptive clipping, by the norms of each weight and its gradient")
def adaptive(at: Place) -> State:
    def cut(loop: Loop) -> None:
        for one in loop.model.parameters():
            limit = 0.01 * one.detach().norm().clamp(min=1e-3)
            norm = one.grad.norm()
            one.grad.copy_(torch.where(norm > limit, one.grad * (limit / norm), one.grad))

    return looped(at, then_step(cut))


@habit(FAMILY, "gradients kept in a list, and put back")
def put_back(at: Place) -> State:
    def swap(loop: Loop) -> None:
        kept = [one.grad.clone() for one in loop.model.parameters()]
        loop.optimizer.zero_grad()
        for one, grad in zip(loop.model.parameters(), kept, strict=True):
            one.grad = grad * 0.5

    return looped(at, then_step(swap))


@habit(FAMILY, "clipping between micro-batches that only add up")
def clip_early(at: Place) -> State:
    """Each rank would clip gradients of its own, by norms of its own."""

    def step(loop: Loop, number: int) -> None:
        with at.adding(loop.model):
            loop.backward(number, 0, 2)
        clip_grad_norm_(loop.model.parameters(), 0.05)
        loop.backward(number, 1, 2)
        loop.end()

    return looped(at, step)


@habit(FAMILY, "clipping by torch where rd.accumulate is around every micro-batch")
def clip_accumulated(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        with at.adding(loop.model):
            loop.backward(number)
        clip_grad_norm_(loop.model.parameters(), 0.05)
        loop.end()

    return looped(at, step)


@habit(FAMILY, "zero_grad(set_to_none=False), then micro-batches inside rd.accumulate")
def zeros_accumulated(at: Place) -> State:
    def step(loop: Loop, number: int) -> None:
        for part in range(3):
            with at.adding(loop.model):
                loop.backward(number, part, 3)
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)

    return looped(at, step)
