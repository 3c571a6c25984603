"""Models that people train."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as f
from torch.nn.utils import parametrizations

from zoo.habits import habit, made, rows_of, sgd, tokens_of, trained
from zoo.place import Place, State
from zoo.transformers import WIDTH, WORDS, next_word

FAMILY = "models"


def mean_square(model: Any, _: int, x: Any, __: int) -> Any:
    return model(x).square().mean()


class Residual(nn.Module):
    """Two convolutions with a norm after each, and a way around them."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False), norm(), nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1, bias=False), norm(),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return f.relu(x + self.body(x))


def resnet(norm: Any) -> Any:
    body = [nn.Conv2d(1, 4, 3, padding=1), Residual(norm), nn.MaxPool2d(2), Residual(norm)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def images(step: int) -> Any:
    return rows_of(step, 36).view(-1, 1, 6, 6)


@habit(FAMILY, "ResNet with GroupNorm")
def group_norm(at: Place) -> State:
    return trained(at, made(lambda: resnet(lambda: nn.GroupNorm(2, 4))), mean_square, rows=images)


@habit(FAMILY, "ResNet with BatchNorm, each rank its own statistics")
def batch_norm(at: Place) -> State:
    """Running statistics are rank 0's: one device takes those of the first share only."""

    def loss(model: Any, rank: int, x: Any, _: int) -> Any:
        first = rank == 0 or not at.alone
        for one in model.modules():
            one.momentum = 0.1 if first else 0.0
        found = model(x).square().mean()
        if not first:
            for name, one in model.named_buffers():
                if name.endswith("num_batches_tracked"):
                    one.sub_(1)
        return found

    return trained(at, made(lambda: resnet(lambda: nn.BatchNorm2d(4))), loss, rows=images)


class Speech(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.inner = kind(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, WORDS)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.inner(self.words(tokens))[0])


@habit(FAMILY, "LSTM, two layers, both ways")
def lstm(at: Place) -> State:
    return trained(at, made(lambda: Speech(nn.LSTM)), next_word, rows=tokens_of)


@habit(FAMILY, "GRU")
def gru(at: Place) -> State:
    return trained(at, made(lambda: Speech(nn.GRU)), next_word, rows=tokens_of)


@habit(FAMILY, "torch's TransformerEncoder")
def encoder(at: Place) -> State:
    def build() -> Any:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.0, batch_first=True)
        body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), body, nn.Linear(WIDTH, WORDS))

    return trained(at, made(build), next_word, rows=tokens_of)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.base(x) + x @ self.a.T @ self.b.T)


@habit(FAMILY, "LoRA: frozen layers with small ones beside them")
def lora(at: Place) -> State:
    return trained(at, made(lambda: nn.Sequential(Lora(), Lora(), nn.Linear(4, 1))), mean_square)


@habit(FAMILY, "weight_norm, by parametrization")
def weight_norm(at: Place) -> State:
    def build() -> Any:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(),
                             parametrizations.weight_norm(nn.Linear(5, 2)))  # fmt: skip

    return trained(at, made(build), mean_square)


@habit(FAMILY, "spectral_norm, whose buffers move in forward")
def spectral_norm(at: Place) -> State:
    """One device goes forward once for each share, so a single share is what it stands for."""

    def build() -> Any:
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(),
                             nn.Linear(5, 2))  # fmt: skip

    def loss(model: Any, rank: int, x: Any, step: int) -> Any:
        for one in model.modules():
            one.training = rank == 0 or not at.alone
        return mean_square(model, rank, x, step)

    return trained(at, made(build), loss)


class Experts(nn.Module):
    """One of several layers for each rank, or for each row as a gate says."""

    def __init__(self, chosen: str) -> None:
        super().__init__()
        self.chosen = chosen
        self.first, self.gate = nn.Linear(4, 4), nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Any, rank: int) -> Any:
        x = torch.tanh(self.first(x))
        if self.chosen == "by rank":
            return self.last(self.experts[rank](x))
        weights = self.gate(x).softmax(-1)
        if self.chosen == "all":
            parts = [one(x) * weights[:, at, None] for at, one in enumerate(self.experts)]
            return self.last(torch.stack(parts).sum(0))
        best = weights.argmax(-1)
        y = torch.zeros_like(x)
        for at, one in enumerate(self.experts):
            mine = best == at
            if self.chosen == "every expert" or bool(mine.any()):
                y = y + torch.zeros_like(x).masked_scatter(mine[:, None], one(x[mine])) * weights[
                    :, at, None]  # fmt: skip
        return self.last(y)


def by_rank(model: Any, rank: int, x: Any, _: int) -> Any:
    return model(x, rank).square().mean()


@habit(FAMILY, "experts, all of them weighted by a gate")
def soft_experts(at: Place) -> State:
    return trained(at, made(lambda: Experts("all")), by_rank)


@habit(FAMILY, "experts, each called with the rows that chose it, maybe none")
def routed_experts(at: Place) -> State:
    return trained(at, made(lambda: Experts("every expert")), by_rank)


@habit(FAMILY, "experts, those that nobody chose on this rank left out")
def chosen_experts(at: Place) -> State:
    return trained(at, made(lambda: Experts("some")), by_rank, rows=lambda at: rows_of(at)[:6])


@habit(FAMILY, "experts, another one on each rank")
def expert_by_rank(at: Place) -> State:
    return trained(at, made(lambda: Experts("by rank")), by_rank)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Any, skipped: set[int]) -> Any:
        for number, layer in enumerate(self.layers):
            if number not in skipped:
                x = x + torch.tanh(layer(x))
        return x


@habit(FAMILY, "stochastic depth, the same layers on all ranks")
def depth(at: Place) -> State:
    return trained(at, made(Deep), lambda model, _, x, step: model(x, {step}).square().mean())


@habit(FAMILY, "stochastic depth, other layers on each rank")
def depth_by_rank(at: Place) -> State:
    return trained(at, made(Deep), lambda model, rank, x, step:
                   model(x, {(rank + step) % 4}).square().mean())  # fmt: skip


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none, self.one = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])

    def forward(self, x: Any) -> Any:
        x = self.layers[0](x) * self.scalar + self.one + self.none.sum()
        return self.layers[1](x)


@habit(FAMILY, "parameters of no, one and unused elements, and a scalar")
def odd(at: Place) -> State:
    return trained(at, made(Odd), mean_square)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(-8, 8, dtype=torch.int8).view(4, 4)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.scale, self.head = nn.Parameter(torch.full((4, 1), 0.1)), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.head(torch.tanh(f.linear(x, self.weight * self.scale)))


@habit(FAMILY, "frozen int8 weights")
def quantized(at: Place) -> State:
    return trained(at, made(Quantized), mean_square)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.turn, n=4))


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(1, 3, 3, stride=2, padding=1),
                                   nn.Conv1d(3, 4, 3, stride=2, padding=1)])  # fmt: skip
        self.up = nn.ModuleList([nn.ConvTranspose1d(4, 3, 2, stride=2),
                                 nn.ConvTranspose1d(6, 1, 2, stride=2)])  # fmt: skip

    def forward(self, x: Any) -> Any:
        wide = self.down[0](x)
        back = self.up[0](torch.relu(self.down[1](torch.relu(wide))))
        return self.up[1](torch.cat([back, wide], dim=1))


@habit(FAMILY, "U-Net: early results used late")
def unet(at: Place) -> State:
    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        return (model(x) - x).square().mean()

    return trained(at, made(Unet), loss, rows=lambda at: rows_of(at, 8)[:, None])


@habit(FAMILY, "two towers, one of them called twice (CLIP, siamese)")
def towers(at: Place) -> State:
    def build() -> Any:
        return nn.ModuleDict({"text": nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
                              "image": nn.Sequential(nn.Linear(4, 3))})  # fmt: skip

    def loss(model: Any, _: int, x: Any, __: int) -> Any:
        here, there, other = model.text(x), model.text(x.flip(1)), model.image(x)
        scores = here @ other.T / math.sqrt(3) + there @ other.T
        return f.cross_entropy(scores, torch.arange(len(x)))

    return trained(at, made(build), loss)


@habit(FAMILY, "complex parameters")
def waves(at: Place) -> State:
    return trained(at, made(Waves), mean_square, optimizer=sgd)


@habit(FAMILY, "sparse gradients of an embedding")
def sparse(at: Place) -> State:
    def build() -> Any:
        return nn.Sequential(nn.Embedding(WORDS, 4, sparse=True), nn.Linear(4, WORDS))

    return trained(at, made(build), next_word, rows=tokens_of,
                   optimizer=lambda those: torch.optim.SGD(those, lr=0.1))  # fmt: skip
