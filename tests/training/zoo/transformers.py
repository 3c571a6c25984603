"""Models of words: blocks of attention, tied, shared, checkpointed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint

from zoo.habits import habit, made, tokens_of, trained
from zoo.place import Place, State

__all__ = ["WIDTH", "WORDS", "next_word"]

FAMILY = "models"
WIDTH, WORDS = 6, 11


def next_word(model: Any, _: int, tokens: Any, __: int) -> Any:
    return f.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Attend(nn.Module):
    """A causal block; with angles, these turn queries and keys, as rotary positions do."""

    def __init__(self, *, heads: int = 2, gated: bool = False) -> None:
        super().__init__()
        self.heads, self.gated = heads, gated
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.before, self.between = norm(WIDTH), norm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=not gated)
        self.out = nn.Linear(WIDTH, WIDTH, bias=not gated)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH + 1) if gated else None
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Any, angles: Any = None) -> Any:
        batch, length, _ = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (one.transpose(1, 2) for one in parts)
        if angles is not None:
            q, k = (one * angles.cos() + one.roll(1, -1) * angles.sin() for one in (q, k))
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        inner = self.up(self.between(x))
        inner = inner * f.silu(self.gate(self.between(x))) if self.gate else f.gelu(inner)
        return x + self.down(inner)


class Gpt(nn.Module):
    """Tied embedding and head, learned positions; `way` says how blocks are called."""

    def __init__(self, way: str = "plain", *, shared: bool = False) -> None:
        super().__init__()
        self.way = way
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        blocks = [Attend() for _ in range(3)]
        self.blocks = nn.ModuleList(blocks[:1] * 3 if shared else blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Any) -> Any:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            if self.way == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.way == "reentrant")
        return self.head(self.norm(x))


@habit(FAMILY, "GPT-2: tied embedding and head")
def gpt(at: Place) -> State:
    return trained(at, made(Gpt), next_word, rows=tokens_of)


@habit(FAMILY, "GPT-2 with checkpointing")
def gpt_checkpointed(at: Place) -> State:
    return trained(at, made(lambda: Gpt("checkpoint")), next_word, rows=tokens_of)


@habit(FAMILY, "GPT-2 with reentrant checkpointing")
def gpt_reentrant(at: Place) -> State:
    return trained(at, made(lambda: Gpt("reentrant")), next_word, rows=tokens_of)


@habit(FAMILY, "ALBERT: one block for all layers")
def albert(at: Place) -> State:
    return trained(at, made(lambda: Gpt(shared=True)), next_word, rows=tokens_of)


@habit(FAMILY, "ALBERT with checkpointing")
def albert_checkpointed(at: Place) -> State:
    return trained(at, made(lambda: Gpt("checkpoint", shared=True)), next_word, rows=tokens_of)


@habit(FAMILY, "ALBERT with reentrant checkpointing")
def albert_reentrant(at: Place) -> State:
    return trained(at, made(lambda: Gpt("reentrant", shared=True)), next_word, rows=tokens_of)


class Llama(nn.Module):
    """Rotary positions from a buffer that no checkpoint has, RMS norms, gated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Attend(gated=True) for _ in range(2)])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", 10000.0 ** -torch.arange(0, 1, 1 / 3), persistent=False)

    def forward(self, tokens: Any) -> Any:
        angles = torch.arange(tokens.shape[1])[:, None] * self.inv_freq
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))


@habit(FAMILY, "LLaMA: rotary buffers, RMSNorm, gates")
def llama(at: Place) -> State:
    return trained(at, made(Llama), next_word, rows=tokens_of)
