"""Ulysses: ranks exchange heads for tokens, so that each has some heads of the whole sequence.

One all-to-all brings queries, keys and values, another takes the output back; backward likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from roundelay.communicator import Communicator
from roundelay.parallel.context.layout import in_order, shares
from roundelay.parallel.context.local import local_attention
from roundelay.parallel.context.plan import Span
from roundelay.parallel.functions import all_to_all

__all__ = ["ulysses_attention"]


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    comm: Communicator,
    spans: Sequence[tuple[Span, ...]],
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Return the attention of this rank's queries to all ranks' keys: [batch, heads, tokens, dim].

    Shorter shards travel as long as the longest. Fewer heads of keys and values than ranks are
    repeated until there are enough.
    """
    repeats = math.lcm(k.size(1), comm.size) // k.size(1)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    lengths = [sum(stop - start for start, stop in each) for each in spans]
    longest = max(lengths)
    sent = [_by_rank(x, comm.size, longest) for x in (q, k, v)]
    came = all_to_all(torch.cat([x.flatten(1) for x in sent], 1), comm, 0, 0)
    parts = torch.split(came, [x[0].numel() for x in sent], 1)
    whole = [
        in_order(_cut(part.view_as(x), lengths), -2, spans)
        for part, x in zip(parts, sent, strict=True)
    ]
    seen = local_attention(*whole, comm=comm, causal=causal, scale=scale)
    rows = torch.stack([_padded(share, longest) for share in shares(seen, 2, spans)])
    back = all_to_all(rows, comm, 0, 0)[..., : lengths[comm.rank], :]
    return back.transpose(0, 1).flatten(1, 2)


def _by_rank(x: torch.Tensor, size: int, longest: int) -> torch.Tensor:
    """Return what goes to each rank, its heads: [ranks, batch, heads, tokens, dim]."""
    batch, heads, _, dim = x.shape
    by_rank = _padded(x, longest).reshape(batch, size, heads // size, longest, dim)
    return by_rank.transpose(0, 1)


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    more = length - x.size(-2)
    return torch.nn.functional.pad(x, (0, 0, 0, more)) if more else x


def _cut(rows: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return every rank's tokens, without what was added to make them as long as others."""
    return [row[..., :length, :] for row, length in zip(rows, lengths, strict=True)]
