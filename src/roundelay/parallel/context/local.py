"""Attention of a whole sequence that one rank has."""

from __future__ import annotations

import torch

from roundelay.communicator import Communicator
from roundelay.parallel.context.plan import RingPlan
from roundelay.parallel.context.ring import ring_attention

__all__ = ["local_attention"]


def local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    comm: Communicator,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Return torch's own attention; ours where values have other dims: it would hold all scores.

    No rank hears of another here.
    """
    if q.size(-1) == v.size(-1):
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - no block of rd.context_parallel sees it
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
            )
    alone = RingPlan.even(q.size(-2), 1, "contiguous", causal=causal)
    return ring_attention(q, k, v, comm=comm, plan=alone, scale=scale)
