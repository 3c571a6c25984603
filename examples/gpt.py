"""A small GPT and text to train it on: bytes in, the next byte out."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import roundelay as rd

VOCABULARY = 256  # bytes
#: Of queries, keys and values [batch, heads, tokens, dim], what each query sees.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
ALONE: Attention = partial(nn.functional.scaled_dot_product_attention, is_causal=True)


@dataclass(frozen=True)
class Size:
    """How large a model is, and how far it looks back."""

    layers: int
    heads: int
    width: int
    context: int


SIZES = {
    "nano": Size(2, 2, 64, 64),  # 0.1 M parameters: seconds on a laptop
    "small": Size(4, 4, 256, 128),  # 3.2 M
    "medium": Size(6, 6, 384, 128),  # 11 M
    "gpt2": Size(12, 12, 768, 1024),  # 86 M, or 124 M with GPT-2's vocabulary
}


class Block(nn.Module):
    """Attention, then a perceptron, each beside a way around it."""

    def __init__(self, size: Size, attention: Attention = ALONE) -> None:
        super().__init__()
        self.head_width, self.attention = size.width // size.heads, attention
        self.before_attention = nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.attended = nn.Linear(size.width, size.width)
        self.before_perceptron = nn.LayerNorm(size.width)
        self.perceptron = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what the block has to add."""
        three = self.queries_keys_values(self.before_attention(x))
        # As many heads as there are: with tensor parallel, those of this rank.
        q, k, v = three.unflatten(2, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)
        seen = self.attention(q, k, v)
        x = x + self.attended(seen.transpose(1, 2).flatten(2))
        more: Tensor = self.perceptron(self.before_perceptron(x))
        return x + more


class GPT(nn.Module):
    """Embeddings, blocks, and a head that shares the embedding."""

    def __init__(
        self, size: Size, vocabulary: int = VOCABULARY, attention: Attention = ALONE
    ) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.last = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for one in self.parameters():
            if one.dim() > 1:
                nn.init.normal_(one, std=0.02)

    def forward(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        """Return the logits of every next byte; tokens may be a part of a sequence, with places."""
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.last(x))
        return logits

    @torch.no_grad()
    def write(self, start: bytes, length: int, *, seed: int = 0) -> bytes:
        """Go on from a beginning."""
        generator = torch.Generator().manual_seed(seed)
        text = list(start)
        for _ in range(length):
            window = torch.tensor([text[-self.size.context :]])
            chances = self(window)[0, -1].float().softmax(-1)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(text)


class Text(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: each row is one, with the same one byte later as what to say."""

    def __init__(self, data: bytes, context: int) -> None:
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.context = context
        if not len(self):
            sys.exit(
                f"The text has {len(data)} bytes, and a window {context + 1}: take a longer one."
            )

    def __len__(self) -> int:
        """Count whole windows."""
        return (len(self.data) - 1) // self.context

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a window and its successor."""
        start = row * self.context
        window = self.data[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def read_text(file: str | None) -> bytes:
    """Return a file's bytes; by default the source of Python's own standard library."""
    if file is not None:
        return Path(file).read_bytes()
    folder = Path(os.__file__).parent
    return b"\n\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def loss_of(
    model: nn.Module, tokens: Tensor, targets: Tensor, places: Tensor | None = None
) -> Tensor:
    """Return the mean cross-entropy over all bytes of a batch."""
    logits = model(tokens) if places is None else model(tokens, places)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def count(text: str) -> int:
    """Read a number of things from the command line: one at least."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def mesh_of(text: str, comm: rd.Communicator, known: tuple[str, ...]) -> rd.Mesh:
    """Read `dp=2,tp=2`; what it leaves out of the ranks is data parallel."""
    axes: dict[str, int] = {}
    for pair in filter(None, text.split(",")):
        name, _, length = pair.partition("=")
        if not length.isdecimal() or not int(length) or name in axes:
            sys.exit(f"--mesh has each axis once, with its length, as in dp=2,tp=2; not {text!r}.")
        axes[name] = int(length)
    if unknown := axes.keys() - {*known}:
        sys.exit(f"--mesh knows {', '.join(known)} here, not {', '.join(sorted(unknown))}.")
    others = math.prod(length for name, length in axes.items() if name != "dp")
    return rd.Mesh(comm=comm, **{"dp": max(1, comm.size // others), **axes})
