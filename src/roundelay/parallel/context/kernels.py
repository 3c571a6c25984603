"""Attention within one block, with the log-sum-exp by which blocks are put together.

PyTorch's own kernels where they take the tensors, and `blockwise` for all others. Backward of a
block is given the output and log-sum-exp of the whole row, so that blocks add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from roundelay.parallel.context import blockwise

__all__ = ["Kernel", "Rows", "Tile", "block_backward", "block_forward", "kernel_for"]

HALVES = (torch.float16, torch.bfloat16)
WIDEST = 256  # dims of a head that flash attention on a GPU takes
WIDEST_OF_CUDNN = 128
SHORTEST_OF_CUDNN = 128  # tokens: it takes no single ones, and few of them cost nothing
HOPPER = (9, 0)  # the first GPU on which cuDNN's attention is the faster one
LANES = 8  # of which kernels for GPUs take multiples
ALIGNED_ROWS = 32  # to a multiple of which the efficient kernel pads its log-sum-exp

Pair = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_aten: Any = torch.ops.aten  # Any: torch does not say what its operators take
_cuda: Any = torch.backends.cuda


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries, keys and values of one block: [batch, heads, tokens, dim].

    There may be fewer heads of keys and values; `causal` is for as many keys as queries.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    scale: float


class Rows(NamedTuple):
    """What backward needs of the queries' whole rows: gradient, output and log-sum-exp."""

    grad: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Kernel(NamedTuple):
    """One way to compute a block: its output and log-sum-exp, and the gradients of q, k and v."""

    forward: Callable[[Tile], Pair]
    backward: Callable[[Tile, Rows], Three]
    lanes: int = 1  # the dims of a head must be a multiple of this


def kernel_for(q: torch.Tensor, dim: int, tokens: int) -> Kernel:
    """Choose the fastest kernel for such queries, heads of so many dims, and so many tokens."""
    if q.device.type == "cpu" and q.dtype in (torch.float64, torch.float32, *HALVES):
        return CPU_FLASH
    if q.device.type == "cuda" and q.dtype in HALVES and dim <= WIDEST:
        fits = dim <= WIDEST_OF_CUDNN and tokens >= SHORTEST_OF_CUDNN
        return CUDA_CUDNN if fits and _has_cudnn(q) else CUDA_FLASH
    if q.device.type == "cuda" and q.dtype in (torch.float32, *HALVES):
        return CUDA_EFFICIENT
    return Kernel(_own_forward, _own_backward)


def _has_cudnn(q: torch.Tensor) -> bool:
    """Tell whether torch itself would take cuDNN's attention, which is the faster one there."""
    hopper = torch.cuda.get_device_capability(q.device) >= HOPPER
    return hopper and bool(_cuda.cudnn_sdp_enabled())


def block_forward(tile: Tile) -> Pair:
    """Return the output of a block, and the log-sum-exp of each row of its scores."""
    dim = tile.v.size(-1)
    kernel, width = _chosen(tile)
    out, lse = kernel.forward(_widened(tile, width))
    return out[..., :dim], lse


def block_backward(tile: Tile, rows: Rows) -> Three:
    """Return the gradients of a block's queries, keys and values."""
    kernel, width = _chosen(tile)
    wide = Rows(_wide(rows.grad, width), _wide(rows.out, width), rows.lse)
    dq, dk, dv = kernel.backward(_widened(tile, width), wide)
    return dq[..., : tile.q.size(-1)], dk[..., : tile.k.size(-1)], dv[..., : tile.v.size(-1)]


def _chosen(tile: Tile) -> tuple[Kernel, int]:
    """Return a kernel, and how many dims heads have there; zeros beyond change no score."""
    dim = max(tile.q.size(-1), tile.v.size(-1))
    kernel = kernel_for(tile.q, dim, min(tile.q.size(-2), tile.k.size(-2)))
    return kernel, -(-dim // kernel.lanes) * kernel.lanes


def _widened(tile: Tile, width: int) -> Tile:
    q, k, v = (_wide(x, width) for x in (tile.q, tile.k, tile.v))
    return tile if q is tile.q and k is tile.k and v is tile.v else replace(tile, q=q, k=k, v=v)


def _wide(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return a tensor with so many dims of a head, beside one another: kernels look no further."""
    more = width - x.size(-1)
    if more:
        return torch.nn.functional.pad(x, (0, more))
    return x if x.stride(-1) == 1 else x.contiguous()


def _cpu_forward(tile: Tile) -> Pair:
    run = _aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - torch has no other name
    out, lse = run(tile.q, tile.k, tile.v, 0.0, tile.causal, scale=tile.scale)
    return out, lse


def _cpu_backward(tile: Tile, rows: Rows) -> Three:
    run = _aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 - likewise
    dq, dk, dv = run(
        rows.grad, tile.q, tile.k, tile.v, rows.out, rows.lse, 0.0, tile.causal, scale=tile.scale
    )
    return dq, dk, dv


def _flash_forward(tile: Tile) -> Pair:
    run = _aten._scaled_dot_product_flash_attention  # noqa: SLF001 - likewise
    out, lse, *_ = run(tile.q, tile.k, tile.v, 0.0, tile.causal, scale=tile.scale)
    return out, lse


def _flash_backward(tile: Tile, rows: Rows) -> Three:
    run = _aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001 - likewise
    seed = torch.empty(2, dtype=torch.uint64, device=tile.q.device)  # of no dropout
    dq, dk, dv = run(
        rows.grad, tile.q, tile.k, tile.v, rows.out, rows.lse.contiguous(), None, None,
        tile.q.size(-2), tile.k.size(-2), 0.0, tile.causal, seed, seed, scale=tile.scale,
    )  # fmt: skip
    return dq, dk, dv


def _cudnn_forward(tile: Tile) -> Pair:
    run = _aten._scaled_dot_product_cudnn_attention  # noqa: SLF001 - likewise
    q, k, v = (x.contiguous() for x in (tile.q, tile.k, tile.v))
    out, lse, *_ = run(q, k, v, None, True, 0.0, tile.causal, False, scale=tile.scale)  # noqa: FBT003
    return out, lse.squeeze(-1)


def _cudnn_backward(tile: Tile, rows: Rows) -> Three:
    run = _aten._scaled_dot_product_cudnn_attention_backward  # noqa: SLF001 - likewise
    q, k, v, grad, out = (x.contiguous() for x in (tile.q, tile.k, tile.v, rows.grad, rows.out))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv = run(
        grad, q, k, v, out, rows.lse.contiguous().unsqueeze(-1), seed, seed, None, None, None,
        q.size(-2), k.size(-2), 0.0, tile.causal, scale=tile.scale,
    )  # fmt: skip
    return dq, dk, dv


def _efficient_forward(tile: Tile) -> Pair:
    run = _aten._scaled_dot_product_efficient_attention  # noqa: SLF001 - likewise
    k, v = (_every_head(x, tile.q.size(1)) for x in (tile.k, tile.v))
    out, lse, *_ = run(tile.q, k, v, None, True, 0.0, tile.causal, scale=tile.scale)  # noqa: FBT003
    return out, lse[..., : tile.q.size(-2)]


def _efficient_backward(tile: Tile, rows: Rows) -> Three:
    run = _aten._scaled_dot_product_efficient_attention_backward  # noqa: SLF001 - likewise
    k, v = (_every_head(x, tile.q.size(1)) for x in (tile.k, tile.v))
    more = -rows.lse.size(-1) % ALIGNED_ROWS
    lse = torch.nn.functional.pad(rows.lse, (0, more), value=float("inf"))
    none = torch.zeros((), dtype=torch.int64)
    wanted = [True, True, True, False]
    dq, dk, dv, _ = run(
        rows.grad, tile.q, k, v, None, rows.out, lse, none, none, 0.0, wanted, tile.causal,
        scale=tile.scale,
    )  # fmt: skip
    heads = tile.k.size(1)
    return dq, dk.unflatten(1, (heads, -1)).sum(2), dv.unflatten(1, (heads, -1)).sum(2)


def _every_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1)


def _own_forward(tile: Tile) -> Pair:
    return blockwise.forward(tile.q, tile.k, tile.v, causal=tile.causal, scale=tile.scale)


def _own_backward(tile: Tile, rows: Rows) -> Three:
    return blockwise.backward(rows, tile.q, tile.k, tile.v, causal=tile.causal, scale=tile.scale)


CPU_FLASH = Kernel(_cpu_forward, _cpu_backward)
CUDA_FLASH = Kernel(_flash_forward, _flash_backward, LANES)
CUDA_CUDNN = Kernel(_cudnn_forward, _cudnn_backward, LANES)
CUDA_EFFICIENT = Kernel(_efficient_forward, _efficient_backward, LANES)
