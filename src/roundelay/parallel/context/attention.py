"""`rd.attention`: attention over a sequence that is divided between ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from roundelay.arguments import number, shown
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.parallel.context.agreement import agree
from roundelay.parallel.context.local import local_attention
from roundelay.parallel.context.plan import LAYOUTS, METHODS, RingPlan, spans_so_long
from roundelay.parallel.context.ring import ring_attention
from roundelay.parallel.context.ulysses import ulysses_attention
from roundelay.parallel.cut_tensor import unmarked
from roundelay.parallel.passes import calling_layer

__all__ = ["attention"]

DIMS = 3  # at least: heads, tokens, dim
FOLDED = 4  # with one dim of batch, as kernels take them
#: What all ranks must be told alike.
ALIKE = ("method", "layout", "causal", "batch", "heads", "key heads", "dim", "value dim", "scale",
         "dtype", "requires_grad", "layer")  # fmt: skip


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 - as torch marks its own
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    comm: Communicator,
    method: str = "ring",
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks.

    Shapes are those of `scaled_dot_product_attention`, [batch, heads, tokens, dim], with the tokens
    of this rank; there may be fewer heads of keys and values. `ring` passes keys and values around
    while blocks compute, N - 1 times, and holds no more than some ranks' tokens. `ulysses`
    exchanges heads for tokens by two all-to-alls, and needs a multiple of N heads. `layout` is the
    one by which `rd.shard_sequence` divided the sequence: with `causal`, `zigzag` gives every rank
    as much to do. Lengths may differ. Masks and dropout are refused.
    """
    if not isinstance(comm, Communicator):
        raise InvalidArgumentError(
            f"attention needs comm=, the ranks that share the sequence: mesh['cp'], say; not "
            f"{shown(comm)}."
        )
    problem = _wrong_way(method, layout, causal, scale) or _wrong_extras(attn_mask, dropout_p)
    problem = problem or _wrong_kinds(q, k, v) or _wrong_shapes(q, k, v)
    problem = problem or _wrong_heads(q, k, method, comm.size)
    if problem:
        refuse(comm, problem)
    q, k, v = (_cast(unmarked(x, inside=True)) for x in (q, k, v))
    factor = 1 / math.sqrt(q.size(-1)) if scale is None else float(scale)
    if comm.size == 1 and q.dim() == FOLDED and q.size(-2):  # nothing to compare, nor to fold
        return local_attention(q, k, v, comm=comm, causal=causal, scale=factor)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    facts = (method, layout, causal, str(list(q.shape[:-3])), q.size(-3), k.size(-3), q.size(-1),
             v.size(-1), factor, str(q.dtype), grad, calling_layer(comm))  # fmt: skip
    alike = dict(zip(ALIKE, facts, strict=True))
    lengths = agree("attention", comm, alike, q.size(-2))
    if not sum(lengths):
        raise InvalidArgumentError("attention needs a token at least; no rank has one.")
    batch = q.shape[:-3]
    if not math.prod(batch):  # rows that a rank has none of, as all that share its sequences
        k, v = (x.repeat_interleave(q.size(-3) // x.size(-3), -3) for x in (k, v))
        return q @ k.transpose(-1, -2) @ v
    q, k, v = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (q, k, v))
    if comm.size == 1:
        out = local_attention(q, k, v, comm=comm, causal=causal, scale=factor)
    elif method == "ring":
        plan = RingPlan(tuple(spans_so_long(lengths, layout)), causal)
        out = ring_attention(q, k, v, comm=comm, plan=plan, scale=factor)
    else:
        spans = spans_so_long(lengths, layout)
        out = ulysses_attention(q, k, v, comm=comm, spans=spans, causal=causal, scale=factor)
    return out.reshape(*batch, *out.shape[1:])


def refuse(comm: Communicator, problem: str) -> None:
    """Refuse a call of attention on all ranks, by what is wrong on this one."""
    agree("attention", comm, dict.fromkeys(ALIKE, 0), 0, problem)


def _cast(x: torch.Tensor) -> torch.Tensor:
    """Return what torch's own attention would make of a tensor where autocast is on."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _wrong_way(method: Any, layout: Any, causal: Any, scale: Any) -> str:
    """Return what is wrong with how attention was asked for; nothing if it is right."""
    for word, known, kind in ((method, METHODS, "method"), (layout, LAYOUTS, "layout")):
        if word not in known:
            return f"attention has no {kind} {shown(word)}. Known: {', '.join(known)}."
    if not isinstance(causal, bool):
        return f"attention takes causal=True or False, not {shown(causal)}."
    try:
        finite = scale is None or math.isfinite(number("scale", scale))
    except InvalidArgumentError:
        finite = False
    if not finite:
        return f"attention takes a number as scale, or None for 1/√dim, not {shown(scale)}."
    return ""


def _wrong_extras(attn_mask: Any, dropout_p: Any) -> str:
    if attn_mask is not None:
        return (
            "attention over ranks takes no attn_mask: no rank has the whole square that it covers. "
            "causal=True is the mask that it knows. Leave padding out of the loss instead, or "
            "give each sequence a call of its own."
        )
    if dropout_p:
        return (
            f"attention over ranks drops nothing, and dropout_p is {shown(dropout_p)}. Set the "
            f"model's dropout of attention to 0, or drop of the output, which every rank has."
        )
    return ""


def _wrong_kinds(q: Any, k: Any, v: Any) -> str:
    """Return what is wrong with the tensors themselves."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        is_tensor = isinstance(x, torch.Tensor)
        if not is_tensor or not x.is_floating_point() or x.dim() < DIMS:
            told = f"{x.dtype} of shape {list(x.shape)}" if is_tensor else shown(x)
            return (
                f"attention takes tensors of real numbers [batch, heads, tokens, dim], and {name} "
                f"is {told}."
            )
    alike = q.dtype == k.dtype == v.dtype or len({_cast(x).dtype for x in (q, k, v)}) == 1
    if not alike or not q.device == k.device == v.device:
        named = {"q": q, "k": k, "v": v}
        told = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in named.items())
        return f"attention needs one dtype and one device, not {told}."
    return ""


def _wrong_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Return what does not go together."""
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if of_q == of_k == of_v and 0 not in (*of_q[:-2], of_q[-1]):
        return ""
    shapes = f"q {list(of_q)}, k {list(of_k)}, v {list(of_v)}"
    if of_q[-1] != of_k[-1]:
        return f"attention needs queries and keys of one dim, not {shapes}."
    if of_q[:-3] != of_k[:-3] or of_k[:-1] != of_v[:-1]:
        return f"attention needs one batch, and keys and values alike but for dim, not {shapes}."
    if of_q[-2] != of_k[-2]:
        return (
            f"attention over ranks is of one sequence with itself: as many keys as queries, not "
            f"{shapes}. For another sequence's keys, have all of them on every rank, by "
            f"rd.unshard_sequence, and call torch's own attention."
        )
    if any(0 in (shape[-3], shape[-1]) for shape in (of_q, of_k, of_v)):
        return f"attention has nothing to do where there are no heads, or dim is 0: {shapes}."
    return ""


def _wrong_heads(q: torch.Tensor, k: torch.Tensor, method: str, size: int) -> str:
    heads, shared = q.size(-3), k.size(-3)
    if heads % shared:
        return (
            f"attention needs heads of queries that divide by those of keys and values: {heads} "
            f"and {shared} do not."
        )
    if method == "ulysses" and heads % size:
        return (
            f"method='ulysses' gives every rank as many heads, and {heads} do not divide by "
            f"{rank_count(size)}. Take method='ring', which takes any number, or ranks that divide "
            f"the heads."
        )
    return ""
