"""However q, k and v lie in memory, attention over ranks is that of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

F = torch.nn.functional
BATCH, HEADS, TOKENS, DIM = 2, 2, 7, 4

#: How [batch, tokens, features] become heads; in memory their dims lie in other orders, and apart.
LIES: dict[str, Callable[[Any], Any]] = {
    "heads, then dims": lambda x: x.unflatten(-1, (HEADS, DIM)).transpose(1, 2),
    "dims, then heads": lambda x: x.unflatten(-1, (DIM, HEADS)).permute(0, 3, 1, 2),
    "tokens last": lambda x: x.transpose(1, 2).contiguous().unflatten(1, (HEADS, DIM)).mT,
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2].view_as(x)
    .unflatten(-1, (HEADS, DIM)).transpose(1, 2),
    "one for all dims": lambda x: x[..., :HEADS].transpose(1, 2)[..., None].expand(-1, -1, -1, DIM),
    "one for all heads": lambda x: x[:, None, :, :DIM].expand(-1, HEADS, -1, -1),
}  # fmt: skip


def of(way: str, x: Any) -> list[Any]:
    """Return queries, keys and values."""
    return [LIES[way](x), LIES[way](x.sin()), LIES["heads, then dims"](x.cos())]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("method", ["ring", "ulysses", "block"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", LIES)
def test_attention_is_that_of_one_device(
    way: str,
    causal: bool,  # noqa: FBT001
    method: str,
    size: int,
) -> None:
    if method == "ulysses" and HEADS % size:
        return
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, TOKENS, HEADS * DIM, dtype=torch.float64, generator=draw)
    whole = x.clone().requires_grad_()
    right = F.scaled_dot_product_attention(*(one.contiguous() for one in of(way, whole)),
                                           is_causal=causal)  # fmt: skip
    (grad,) = torch.autograd.grad(right.square().sum(), whole)

    def body(comm: rd.Communicator) -> None:
        shard = rd.shard_sequence(x, comm).clone().requires_grad_()
        if method == "block":
            with rd.context_parallel(comm):
                out = F.scaled_dot_product_attention(*of(way, shard), is_causal=causal)
        else:
            out = rd.attention(*of(way, shard), comm=comm, method=method, causal=causal)
        (mine,) = torch.autograd.grad(out.square().sum(), shard)
        for got, wanted in ((rd.unshard_sequence(out.detach(), comm, -2), right),
                            (rd.unshard_sequence(mine, comm), grad)):  # fmt: skip
            torch.testing.assert_close(got, wanted.detach(), rtol=1e-12, atol=1e-12)

    rd.run(body, size, "threads")
