"""Layers that people build models from, beside those of the large architectures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as f
from torch.nn.utils import parametrizations, prune, rnn

from zoo.architectures import mean_square
from zoo.habits import habit, made, rows_of, tokens_of, trained
from zoo.place import Place, State
from zoo.transformers import WIDTH, WORDS, next_word

FAMILY = "models"


@habit(FAMILY, "an embedding with padding_idx")
def padded(at: Place) -> State:
    def build() -> Any:
        return nn.Sequential(nn.Embedding(WORDS, 4, padding_idx=3), nn.Linear(4, WORDS))

    return trained(at, made(build), next_word, rows=tokens_of)


@habit(FAMILY, "an embedding with max_norm, which writes into its weights in forward")
def max_norm(at: Place) -> State:
    """Of the same rows on every rank; otherwise ranks would write differently."""

    def build() -> Any:
        return nn.Sequential(nn.Embedding(WORDS, 4, max_norm=1.0), nn.Linear(4, WORDS))

    def loss(model: Any, rank: int, tokens: Any, step: int) -> Any:
        every = tokens_of(step, words=WORDS)
        return next_word(model, rank, every[:2], step) + 0 * tokens.sum()

    return trained(at, made(build), loss, rows=tokens_of)


@habit(FAMILY, "an embedding with max_norm, other words on each rank")
def max_norm_apart(at: Place) -> State:
    """Ranks write differently, so that one device, which writes for all, is no measure."""

    def build() -> Any:
        return nn.Sequential(nn.Embedding(WORDS, 4, max_norm=1.0), nn.Linear(4, WORDS))

    return trained(at, made(build), next_word, rows=lambda step: tokens_of(step, 2))


@habit(FAMILY, "EmbeddingBag")
def bag(at: Place) -> State:
    def build() -> Any:
        return nn.Sequential(nn.EmbeddingBag(WORDS, 4, mode="sum"), nn.Linear(4, 2))

    return trained(at, made(build), mean_square, rows=tokens_of)


class Listed(nn.Module):
    """Parameters in a list and a dict, used by number and name."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.full((4,), 0.5 + number) for number in range(3)])
        self.named = nn.ParameterDict({"shift": torch.ones(4), "gain": torch.tensor(0.3)})
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return self.head(x * self.named["gain"] + self.named["shift"])


@habit(FAMILY, "ParameterList and ParameterDict")
def listed(at: Place) -> State:
    return trained(at, made(Listed), mean_square)


@habit(FAMILY, "lazy layers, run once before prepare")
def lazy(at: Place) -> State:
    def build() -> Any:
        model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(2))
        model(torch.ones(1, 4))
        return model

    return trained(at, made(build), mean_square)


@habit(FAMILY, "lazy layers that never ran before prepare")
def still_lazy(at: Place) -> State:
    """Whose parameters have no shape yet; on one device the first forward pass gives them one."""
    model = nn.Sequential(nn.LazyLinear(2, dtype=torch.float64))
    if at.alone:
        return {}
    return trained(at, model, mean_square)


class Counting(nn.Module):
    """A buffer that every forward pass writes into, and one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls: torch.Tensor
        self.last: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Any, step: int) -> Any:
        self.calls.fill_(step + 1.0)
        self.last = torch.full((), step * 2.0, dtype=torch.float64)
        return self.inner(x) / self.calls.item()


@habit(FAMILY, "buffers written and replaced in forward")
def counting(at: Place) -> State:
    return trained(at, made(Counting), lambda model, _, x, step: model(x, step).square().mean())


class Router(nn.Module):
    """Layers in an order that the data say; the same for all ranks, as the data's step does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})

    def forward(self, x: Any, order: str) -> Any:
        for name in order:
            x = torch.tanh(self.layers[name](x))
        return x


@habit(FAMILY, "layers in an order that changes from step to step, some twice")
def ordered(at: Place) -> State:
    orders = "abc", "cab", "aab"
    return trained(at, made(Router), lambda model, _, x, step:
                   model(x, orders[step]).square().mean())  # fmt: skip


@habit(FAMILY, "dropout with a seed for each step", engine="shared_memory")
def dropout(at: Place) -> State:
    def loss(model: Any, rank: int, x: Any, step: int) -> Any:
        torch.manual_seed(10 * step + rank)
        return model(x).square().mean()

    def build() -> Any:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 2))

    return trained(at, made(build), loss)


class Masked(nn.Module):
    """Torch's own attention, with a causal mask and one for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Any) -> Any:
        x, length = self.words(tokens), tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        padding = torch.zeros_like(tokens, dtype=torch.bool)
        padding[:, 1] = tokens[:, 1] == 0
        seen, _ = self.attend(x, x, x, attn_mask=later, key_padding_mask=padding)
        return self.head(self.norm(x + seen))


@habit(FAMILY, "MultiheadAttention with masks")
def masked(at: Place) -> State:
    return trained(at, made(Masked), next_word, rows=tokens_of)


@habit(FAMILY, "torch's Transformer: encoder and decoder")
def translation(at: Place) -> State:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.body = nn.Transformer(WIDTH, 2, 1, 1, 7, dropout=0.0, batch_first=True)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, tokens: Any) -> Any:
            x = self.words(tokens)
            return self.head(self.body(x.flip(1), x))

    return trained(at, made(Translate), next_word, rows=tokens_of)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, 4), nn.RNN(4, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, tokens: Any) -> Any:
        lengths = 1 + tokens[:, 0] % 4
        packed = rnn.pack_padded_sequence(
            self.words(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.inner(packed)[1][0])


@habit(FAMILY, "RNN over packed sequences")
def packed(at: Place) -> State:
    return trained(at, made(Packed), mean_square, rows=tokens_of)


class Tied(nn.Module):
    """A decoder that is the encoder's transpose, and a bias that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.other = nn.Linear(4, 3), nn.Linear(3, 3)
        self.other.bias = self.encode.bias

    def forward(self, x: Any) -> Any:
        return f.linear(torch.tanh(self.other(self.encode(x))), self.encode.weight.T)


@habit(FAMILY, "an autoencoder tied by transpose; a bias of two layers")
def tied(at: Place) -> State:
    return trained(at, made(Tied), mean_square)


@habit(FAMILY, "trained and frozen parameters in one layer")
def mixed(at: Place) -> State:
    def build() -> Any:
        model: Any = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2))
        model[0].weight.requires_grad = model[2].bias.requires_grad = False
        return model

    return trained(at, made(build), mean_square)


@habit(FAMILY, "an orthogonal layer, by parametrization")
def orthogonal(at: Place) -> State:
    def build() -> Any:
        return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2))

    return trained(at, made(build), mean_square)


@habit(FAMILY, "a pruned layer, by torch.nn.utils.prune")
def pruned(at: Place) -> State:
    def build() -> Any:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        cut: Any = prune.l1_unstructured  # which torch has no types for
        cut(model[0], "weight", amount=0.4)
        return model

    return trained(at, made(build), mean_square)


@habit(FAMILY, "weights initialized by model.apply")
def applied(at: Place) -> State:
    def init(module: Any) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def build() -> Any:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).apply(init)

    return trained(at, made(build), mean_square)


class Graph(nn.Module):
    """Messages between rows, added up by index, as libraries for graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.send, self.keep = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Any) -> Any:
        to = torch.arange(len(x)).roll(1)
        return torch.relu(self.keep(x).index_add(0, to, self.send(x)))


@habit(FAMILY, "a graph network: messages by index_add")
def graph(at: Place) -> State:
    return trained(at, made(Graph), mean_square, rows=rows_of)
