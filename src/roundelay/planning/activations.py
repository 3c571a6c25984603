"""What a transformer keeps of a forward pass for backward, in bytes.

With half precision, dropout and attention that keeps its scores this is the formula of Korthikanti
et al. 2022, `sbh(34 + 5as/h)` a layer. Without dropout, and with attention that computes scores
again, it is what `rd.ledger(model, forward=…)` measures of our GPT: the table of docs/mesh.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.planning.model import ModelShape

__all__ = ["RECOMPUTE", "KeptHow", "kept_around", "kept_by_layer", "kept_of_token"]

#: What is computed again in backward: nothing, the scores of attention, or whole layers.
RECOMPUTE = ("none", "selective", "full")
STATISTICS = 4  # bytes of a mean, a deviation, a log-sum-exp, a probability in the loss
INDEX = 8  # bytes of the number of a token


@dataclass(frozen=True, slots=True)
class KeptHow:
    """How activations are kept: their element, what is divided, what is computed again."""

    itemsize: int = 2
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = True
    recompute: str = "none"
    flash: bool = True  # attention computes its scores again, block by block
    dropout: bool = False


def kept_by_layer(model: ModelShape, rows: int, sequence: int, kept: KeptHow) -> int:
    """Return the bytes that one layer keeps of so many rows on one rank.

    >>> gpt3 = ModelShape(96, 12288, 96, 51200, (), (), ())
    >>> paper = KeptHow(flash=False, dropout=True)
    >>> round(kept_by_layer(gpt3, 1, 2048, paper) / (2048 * 12288), 1)  # 34 + 5·96·2048/12288
    114.0
    """
    tokens = rows * sequence // kept.cp
    between, inputs, inner = kept_of_token(model, sequence, kept)
    spread = kept.tp if kept.sequence_parallel else 1
    return -(-tokens * between // spread) + tokens * inputs + -(-tokens * inner // kept.tp)


def kept_of_token(model: ModelShape, sequence: int, kept: KeptHow) -> tuple[int, int, int]:
    """Return what a layer keeps of a token: between cut layers, of their inputs, inside of them.

    Sequence parallel divides the first, and nobody the second, which are gathered once; tensor
    parallel divides the third.
    """
    h, a, item = model.hidden, model.heads, kept.itemsize
    if kept.recompute == "full":
        return h * item, 0, 0
    norms = 2 * h * item + 4 * STATISTICS
    inputs = 2 * h * item
    masks = 2 * h if kept.dropout else 0
    inner = 4 * h * item + 8 * h * item  # queries, keys, values, output; inside the perceptron
    if kept.flash:
        inner += a * STATISTICS
    elif kept.recompute == "none":
        scores = a * sequence
        inner += scores * item + (scores * (1 + item) if kept.dropout else 0)
    return norms + masks, inputs, inner


def kept_around(model: ModelShape, rows: int, sequence: int, kept: KeptHow, *, last: bool) -> int:
    """Return what is kept beside the layers: tokens, and at the end a norm and the logits."""
    tokens, item = rows * sequence // kept.cp, kept.itemsize
    first = tokens * INDEX
    if not last:
        return first
    norm = 2 * model.hidden * item + 2 * STATISTICS
    return first + tokens * (norm + INDEX) + -(-tokens * model.vocabulary * STATISTICS // kept.tp)
