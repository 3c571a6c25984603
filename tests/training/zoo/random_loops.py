"""Loops drawn at random: a few steps of training, with what people do in and between them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import roundelay as rd
from zoo.place import ROWS, Place, State

__all__ = ["Loop"]


def optimizers_of(draw: Any, model: Any) -> list[Any]:
    """One or two of torch's, with an epsilon that does not make much of rounding; two groups."""
    kinds = [
        ("SGD", {}), ("SGD", {"momentum": 0.9, "nesterov": True}), ("Adam", {"eps": 1e-3}),
        ("AdamW", {"eps": 1e-3, "amsgrad": True}), ("RMSprop", {"eps": 1e-3, "momentum": 0.5}),
        ("Adagrad", {"eps": 1e-3}), ("Adamax", {"eps": 1e-3}), ("SGD", {"weight_decay": 0.1}),
    ]  # fmt: skip
    kind, options = draw("optimizer", kinds)
    every = [one for one in model.parameters() if one.requires_grad or draw("listed", [0, 1])]
    cut = draw("groups", [0, len(every) // 2])
    groups = [{"params": every[cut:]}, *([{"params": every[:cut], "lr": 0.02}] if cut else [])]
    other, more = draw("second optimizer", [("", {}), ("", {}), *kinds[:4]])
    if not other or not cut:
        return [getattr(torch.optim, kind)(groups, lr=0.05, **options)]
    return [getattr(torch.optim, kind)(groups[:1], lr=0.05, **options),
            getattr(torch.optim, other)(groups[1:], **more)]  # fmt: skip


class Loop:
    """A few steps of training, with what people do in between."""

    def __init__(self, draw: Any, at: Place, model: Any, folder: Path) -> None:
        self.draw, self.at, self.folder = draw, at, folder
        self.saved: Any = None
        self.prepare(model, optimizers_of(draw, model))
        # Of programs, not of steps: where servers update there is no gradient to look at.
        self.edits = draw("edits", [0, 0, 1])
        self.looks = draw("looks at gradients", [0, 0, 0, 1])
        self.loads = draw("loader", [0, 0, 1])
        # Of passes, and of norms: in half of all programs those that all strategies add up alike.
        self.sums = draw("sums", ["alike", "any"])
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.9)

    def prepare(self, model: Any, optimizers: list[Any]) -> None:
        self.model, found = self.at.prepare(
            model, optimizers if len(optimizers) > 1 else optimizers[0]
        )
        self.optimizers = list(found) if len(optimizers) > 1 else [found]

    def run(self) -> State:
        for step in range(3):
            self.step(step)
            self.between(step)
        return self.at.state(self.model)

    def step(self, step: int) -> None:
        if self.draw("zero before", [0, 1]):
            self.zero_all()
        zero = self.draw("zero", ["optimizer", "model", "zeros", "by hand", "twice"])
        clip = self.draw("clip", [None, None, "value", "norm" if self.sums == "any" else "value"])
        look = self.draw("look", list(self.looking())) if self.looks else None
        for _ in self.passes(step):
            self.look(look)
            for one in self.optimizers:
                if clip == "norm":
                    self.at.clip(one, 0.3)
                elif clip == "value":
                    self.at.clip_value(one, 0.02)
                one.step()
            self.zero(zero)

    # ---- backward passes

    def passes(self, step: int) -> Iterator[None]:
        """Go through a batch, and yield where its gradients are complete."""
        draw, at = self.draw, self.at
        parts = draw("passes", [1, 1, 2, 3] if self.sums == "any" else [1])
        inside = draw("accumulate", ["all but last", "all but last", "every", "none"])
        if self.looks and inside == "every":  # when gradients would be this rank's own
            inside = "all but last"
        weighed = draw("weighed", [False, False, True])
        count = draw("rows", [ROWS, 13, 7]) if weighed and not self.loads else ROWS * parts
        rows = torch.randn(
            count + (self.loads and draw("more rows", [0, 1, 3])), 4, dtype=torch.float64,
            generator=torch.Generator().manual_seed(draw.seed + step),
        )  # fmt: skip
        if self.loads:
            yield from self.loaded(rows, step, parts)
            return
        for part, some in enumerate(rows.tensor_split(parts)):
            adds = inside == "every" or ((inside == "all but last" or weighed) and part < parts - 1)
            context: AbstractContextManager[None] = at.adding(self.model) if adds else nullcontext()
            with context:
                if weighed:
                    at.backward(lambda _, x: self.model.loss(x, step), some, len(rows))
                else:
                    at.loss(lambda _, x: self.model.loss(x, step), some).backward()
        yield

    def loaded(self, rows: Any, step: int, parts: int) -> Iterator[None]:
        """By `rd.loader`, in micro-batches; one device weighs each by its rows."""
        size = self.at.size
        micro = math.ceil(len(rows) / (size * parts))
        if self.at.alone:
            parts = math.ceil(math.ceil(len(rows) / size) / micro)
            for share in rows.tensor_split(size):
                for part in share.tensor_split(parts):
                    (self.model.loss(part, step) * len(part) / len(rows)).backward()
            yield
            return
        loader = rd.loader(
            TensorDataset(rows), batch_size=len(rows), comm=self.at.comm, model=self.model,
            micro_batch=micro, shuffle=False, quiet=True,
        )  # fmt: skip
        for (part,) in loader:
            self.model.loss(part, step).backward()
            if loader.last_of_step:
                yield
            else:
                for one in self.optimizers:
                    one.step()
                    one.zero_grad()

    # ---- gradients

    def looking(self) -> dict[str | None, Callable[[list[Any]], object]]:
        """What people do to gradients; norms only where strategies need not add up alike."""

        def rate(those: list[Any]) -> None:
            group = self.optimizers[0].param_groups[0]
            group["lr"] = 0.05 / (1 + sum(one.grad.norm().item() for one in those))

        def put(those: list[Any], grads: list[Any]) -> None:
            for one, grad in zip(those, grads, strict=True):
                one.grad = grad

        does: dict[str | None, Callable[[list[Any]], object]] = {
            None: lambda _: None,
            "scale": lambda those: [one.grad.mul_(0.5) for one in those],
            "clamp": lambda those: put(those, [one.grad.clamp(-0.02, 0.01) for one in those]),
            "drop": lambda those: put(those[:1], [None for _ in those[:1]]),
            "columns": lambda those: [one.grad[..., 0].zero_() for one in those
                                      if one.dim() and one.numel()],
        }  # fmt: skip
        return does if self.sums == "alike" else does | {
            "torch's clip": lambda those: torch.nn.utils.clip_grad_norm_(those, 0.3),
            "norms": rate,
        }  # fmt: skip

    def look(self, kind: str | None) -> None:
        if kind is not None:
            those = [one for one in self.model.parameters() if one.grad is not None]
            self.looking()[kind](those)

    def zero_all(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def zero(self, zero: str) -> None:
        if zero == "model":
            self.model.zero_grad()
        elif zero == "by hand":
            for one in self.model.parameters():
                one.grad = None
        else:
            for one in self.optimizers:
                one.zero_grad(set_to_none=zero != "zeros")
            if zero == "twice":
                self.model.zero_grad()

    # ---- between steps

    def between(self, step: int) -> None:
        does: dict[str | None, Callable[[], object]] = {
            "eval": lambda: self.evaluate(torch.no_grad(), step),
            "no_grad": lambda: self.evaluate(torch.inference_mode(), step),
            "schedule": self.scheduler.step,
            "optimizer state": self.reload,
            "again": self.again,
            "freeze": lambda: self.again(self.model.first),
            "step without backward": lambda: [one.step() for one in self.optimizers],
            "lr": self.slow_down,
            "whole": lambda: self.shrink([self.model.last.weight], self.at.whole(self.model)),
            "save": self.save,
            "load": self.load,
        }
        edits: dict[str | None, Callable[[], object]] = {
            "model state": lambda: self.model.load_state_dict(self.model.state_dict()),
            "edit": lambda: self.shrink(self.model.parameters(), nullcontext()),
            "data": self.set_data,
        }
        does |= edits if self.edits else {}
        kind = self.draw("between", [None, None, *does])
        if kind is not None:
            does[kind]()

    def evaluate(self, context: AbstractContextManager[Any], step: int) -> None:
        self.model.eval()
        with context:
            self.model(torch.ones(2, 4, dtype=torch.float64), step)
        self.model.train()

    def reload(self) -> None:
        for one in self.optimizers:
            one.load_state_dict(one.state_dict())

    def slow_down(self) -> None:
        self.optimizers[-1].param_groups[-1]["lr"] *= 0.5

    def save(self) -> None:
        """To go back to by `load`; one device keeps copies."""
        if self.at.alone:
            states = [one.state_dict() for one in self.optimizers]
            self.saved = copy.deepcopy((self.model.state_dict(), states))
        else:
            rd.save(self.folder, self.model, self.optimizers)
            self.saved = True

    def load(self) -> None:
        if self.saved is None:
            self.save()
        if self.at.alone:
            weights, states = copy.deepcopy(self.saved)  # which optimizers would step on
            self.model.load_state_dict(weights)
            for one, state in zip(self.optimizers, states, strict=True):
                one.load_state_dict(state)
        else:
            rd.load(self.folder, self.model, self.optimizers)

    def again(self, other: Any = None) -> None:
        """Unprepare and prepare, with a layer frozen in between, or trained again."""
        several = len(self.optimizers) > 1
        given = self.optimizers if several else self.optimizers[0]
        self.model, plain = self.at.unprepare(self.model, given)
        if other is not None:
            other.requires_grad_(requires_grad=not other.weight.requires_grad)
        self.prepare(self.model, list(plain) if several else [plain])

    def shrink(self, parameters: Any, context: AbstractContextManager[Any]) -> None:
        with torch.no_grad(), context:
            for one in parameters:
                one.mul_(0.9)

    def set_data(self) -> None:
        for one in self.model.parameters():
            one.data = one.data * 0.5
