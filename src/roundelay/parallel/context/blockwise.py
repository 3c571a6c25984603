"""Attention within one block by plain matrix products, some rows at a time, for any dtype.

The scores of so many rows are all that is held beside the tensors, so memory is that of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

__all__ = ["backward", "forward"]

ROWS = 256  # whose scores are held at a time


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the log-sum-exp of each row of scores."""
    wide = _wide(q.dtype)
    queries, k, v = _folded(q.to(wide), k), k.to(wide), v.to(wide)
    out = queries.new_empty(*queries.shape[:-1], v.size(-1))
    lse = queries.new_empty(queries.shape[:-1])
    for start, stop in _pieces(queries.size(-2)):
        scores = _scores(queries, k, start, stop, q.size(-2) if causal else 0) * scale
        lse[..., start:stop] = scores.logsumexp(-1)
        out[..., start:stop, :] = (scores - lse[..., start:stop, None]).exp() @ v
    return out.view(*q.shape[:-1], -1).to(q.dtype), lse.view(q.shape[:-1])


def backward(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients, of whole rows' gradient, output and log-sum-exp."""
    wide = _wide(q.dtype)
    queries, keys, values = _folded(q.to(wide), k), k.to(wide), v.to(wide)
    grad, out = (_folded(x.to(wide), k) for x in rows[:2])
    lse = rows[2].to(wide).reshape(queries.shape[:-1])
    drop = (grad * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for start, stop in _pieces(queries.size(-2)):
        scores = _scores(queries, keys, start, stop, q.size(-2) if causal else 0) * scale
        weights = (scores - lse[..., start:stop, None]).exp()
        mine = grad[..., start:stop, :]
        dv += weights.mT @ mine
        weights *= (mine @ values.mT - drop[..., start:stop, :]) * scale
        dq[..., start:stop, :] = weights @ keys
        dk += weights.mT @ queries[..., start:stop, :]
    return dq.view(q.shape).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _folded(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the rows of all heads that share one head of keys, one after the other."""
    return x.reshape(x.size(0), k.size(1), -1, x.size(-1))


def _pieces(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, ROWS):
        yield start, min(start + ROWS, length)


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, start: int, stop: int, repeat: int
) -> torch.Tensor:
    """Return the scores of some rows; causal ones where places repeat after so many rows."""
    scores = queries[..., start:stop, :] @ keys.mT
    if not repeat:
        return scores
    places = torch.arange(start, stop, device=keys.device) % repeat
    ahead = torch.arange(keys.size(-2), device=keys.device) > places[:, None]
    return scores.masked_fill_(ahead, -math.inf)
