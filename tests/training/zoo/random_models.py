"""Models drawn at random: pieces of all kinds, called in all ways, whose outputs escape anyhow."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = ["Model"]


@dataclass
class Out:
    """What a piece returns beside a tensor."""

    y: Any
    aux: Any


class Lora(nn.Module):
    """A frozen layer, and a small one beside it that learns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.whole = nn.Linear(width, width).requires_grad_(requires_grad=False)
        self.a = nn.Parameter(torch.randn(1, width) * 0.3)
        self.b = nn.Parameter(torch.randn(width, 1) * 0.3)

    def forward(self, x: Any) -> Any:
        return self.whole(x) + x @ self.a.T @ self.b.T


class Odd(nn.Module):
    """Parameters of no, one and few elements, of no dimensions, and some that nobody uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.one = nn.Parameter(torch.tensor([0.2]))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.full((width,), 0.1))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Any) -> Any:
        return x * self.gain + self.one + self.shift


class Branches(nn.Module):
    """Two ways: one of them in each step, or both."""

    def __init__(self, draw: Any, width: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(width, width), Lora(width)])
        self.pick = draw("branch", ["both", "by step", "by chance of step"])

    def forward(self, x: Any, step: int) -> Any:
        if self.pick == "both":
            return self.ways[0](x) - self.ways[1](x)
        if self.pick == "by step":
            return self.ways[step % 2](x)
        return x if step == 1 else self.ways[0](x)


def inner(draw: Any, width: int, depth: int) -> nn.Module:
    """What a piece computes with."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(width, width),
        "mlp": lambda: nn.Sequential(
            nn.Linear(width, 2 * width + 1), nn.Tanh(), nn.Linear(2 * width + 1, width, bias=False)
        ),
        "norm": lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)),
        "lora": lambda: Lora(width),
        "odd": lambda: Odd(width),
        "branches": lambda: Branches(draw, width),
        "weight norm": lambda: parametrizations.weight_norm(nn.Linear(width, width)),
        "nest": lambda: Piece(draw, width, depth - 1) if depth else nn.Linear(width, width),
        "attention": lambda: Attention(width),
        "gru": lambda: Recurrent(width),
    }
    return kinds[draw("kind", list(kinds))]()


class Attention(nn.Module):
    """Of each row over two tokens made of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Any) -> Any:
        tokens = torch.stack([x, x.sin()], dim=1)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0][:, 0]


class Recurrent(nn.Module):
    """Three steps of a cell on the same input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Any) -> Any:
        state = torch.zeros_like(x)
        for _ in range(3):
            state = self.cell(x, state)
        return state


class Piece(nn.Module):
    """Something inside, the way it is called, and the way in which more than its output escapes."""

    def __init__(self, draw: Any, width: int, depth: int = 1) -> None:
        super().__init__()
        self.inner = inner(draw, width, depth)
        self.call = draw("call", ["plain", "residual", "checkpoint", "reentrant", "twice"])
        self.route = draw("route", [
            None, None, "attribute", "list", "tuple", "dict", "dataclass", "userdict", "hook",
            "inner hook",
        ])  # fmt: skip
        self.aux: Any = None
        if self.route == "inner hook":
            last = [one for one in self.inner.modules() if not list(one.children())][-1]
            last.register_forward_hook(self.keep)
        elif self.route == "hook":
            self.register_forward_hook(self.keep)

    def keep(self, _: Any, __: Any, output: Any) -> None:
        kept = output[0] if isinstance(output, tuple) else output
        self.aux = kept.square().mean()

    def once(self, x: Any, step: int) -> Any:
        if isinstance(self.inner, Branches):
            return self.inner(x, step)
        if isinstance(self.inner, Piece):
            return tensor_of(self.inner(x, step))
        return self.inner(x)

    def forward(self, x: Any, step: int) -> Any:
        if self.call in ("checkpoint", "reentrant"):
            y = x + checkpoint(self.once, x, step, use_reentrant=self.call == "reentrant")
        elif self.call == "twice":
            y = self.once(torch.tanh(self.once(x, step)), step)
        else:
            y = self.once(x, step) + (x if self.call == "residual" else 0)
        aux = y.sin().mean()
        if self.route == "attribute":
            self.aux = aux
        elif self.route == "list":
            self.aux = [aux, aux.square()]
        packed = {"tuple": (y, aux), "dict": {"y": y, "aux": aux}, "dataclass": (Out(y, aux), 1),
                  "userdict": UserDict(y=y, aux=aux)}  # fmt: skip
        return packed.get(self.route, y)


def tensor_of(output: Any) -> Any:
    """The main tensor of whatever a piece returned."""
    if isinstance(output, dict | UserDict):
        return output["y"]
    if isinstance(output, tuple):
        first = output[0]
        return first.y if isinstance(first, Out) else first
    return output


def aux_of(output: Any) -> Any:
    """What it returned beside it."""
    if isinstance(output, dict | UserDict):
        return output["aux"]
    if isinstance(output, tuple):
        return output[0].aux if isinstance(output[0], Out) else output[1]
    return 0.0


class Model(nn.Module):
    """A first and a last layer around pieces, some of them twice, some sharing a weight."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        width = draw("width", [4, 3, 5])
        self.first = nn.Linear(4, width)
        pieces: list[Any] = []
        for _ in range(draw("pieces", [1, 2, 3, 4])):
            how = draw("piece", ["new", "new", "new", "the same", "a copy"]) if pieces else "new"
            pieces.append(Piece(draw, width) if how == "new" else pieces[0] if how == "the same"
                          else copy.deepcopy(pieces[-1]))  # fmt: skip
        self.pieces = nn.ModuleList(pieces)
        self.last = nn.Linear(width, 4)
        self.gain = nn.Parameter(torch.tensor(1.1))
        linears = [one.inner for one in pieces if isinstance(one.inner, nn.Linear)
                   and "weight" in one.inner._parameters]  # fmt: skip
        if len(linears) > 1 and draw("tied", [0, 1]):
            linears[-1].weight = linears[0].weight
        if width == 4 and draw("tied ends", [0, 1]):
            self.last.weight = self.first.weight
        if draw("frozen", [0, 0, 1]):
            self.pieces[0].requires_grad_(requires_grad=False)
        self.penalty = draw("penalty", [None, None, None, "weights", "gradient", "weights outside"])
        self.kept: list[Any] = []
        self.keeps = draw("kept", [0, 0, 1])

    def forward(self, x: Any, step: int) -> tuple[Any, Any]:
        x = torch.tanh(self.first(x))
        aux: Any = 0.0
        for piece in self.pieces:
            output = piece(x, step)
            x = tensor_of(output)
            aux = aux + aux_of(output)
            if self.keeps:
                self.kept.append(x)
        if self.penalty == "weights":
            aux = aux + 0.01 * self.gain.square() + 0.01 * self.last.weight.square().sum()
        return self.last(x) * self.gain, aux

    def loss(self, x: Any, step: int) -> Any:
        """A mean over rows."""
        self.kept.clear()
        x = x.detach().requires_grad_(self.penalty == "gradient")
        y, aux = self(x, step)
        loss = y.square().mean() + 0.1 * aux
        for piece in self.pieces:
            for one in piece.modules():
                held = getattr(one, "aux", None)
                for each in held if isinstance(held, list) else [held]:
                    if each is not None and each.requires_grad:
                        loss = loss + 0.05 * each
                vars(one)["aux"] = None
        for one in self.kept:
            loss = loss + 0.02 * one.square().mean()
        if self.penalty == "weights outside":
            loss = loss + 0.01 * self.gain.square()
        elif self.penalty == "gradient":
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = loss + 0.1 * grad.square().sum(dim=1).mean()
        return loss
