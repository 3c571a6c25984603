"""Ring attention: keys and values travel around the ranks while blocks compute.

Forward sends the keys and values N - 1 times. Backward does so again, and their gradients travel
along and go home: N times. Rows of several blocks are put together by their log-sum-exp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.context.kernels import Rows, Tile, block_backward, block_forward
from roundelay.parallel.context.plan import Block, RingPlan
from roundelay.parallel.passes import going_back, number_of

__all__ = ["Ring", "ring_attention"]


class Ring(NamedTuple):
    """How one call goes: by which plan, on which ranks, under which number."""

    comm: Communicator
    plan: RingPlan
    scale: float
    number: int  # of the call among those of the communicator
    rank: int  # in the plan, which may be one rank's alone


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    comm: Communicator,
    plan: RingPlan,
    scale: float,
) -> torch.Tensor:
    """Return the attention of this rank's queries to all ranks' keys."""
    ring = Ring(comm, plan, scale, number_of(comm), comm.rank if plan.size > 1 else 0)
    kind: Any = _RingAttention  # Any: torch does not say what it takes
    out: torch.Tensor = kind.apply(q, k, v, ring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # Any: torch's
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring
    ) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _forward(q.detach(), k.detach(), v.detach(), ring)
        # One more than torch's own attention saves: by that a checkpoint which computes again
        # without us is told.
        ctx.save_for_backward(q, k, v, out, lse, lse.new_empty(0))
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, _ = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            rows = Rows(grads[0].detach().contiguous(), out.detach(), lse)
            results = _backward(q.detach(), k.detach(), v.detach(), rows, ctx.ring)
        if torch.is_grad_enabled():
            once: Any = _Once
            results = once.apply(*results, grads[0], q, k, v)
        return *results, None


class _Once(torch.autograd.Function):
    """Gradients that have none of their own."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
        del ctx
        return tuple(tensor.clone() for tensor in tensors[:3])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        del ctx, grads
        raise InvalidArgumentError(
            "attention over ranks by method='ring' has no second derivative. method='ulysses' has "
            "the one of torch's own attention; or leave out create_graph=True."
        )


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Go around once; return the output and the log-sum-exp of each row."""
    plan, rank = ring.plan, ring.rank
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = q.new_zeros(*q.shape[:-1], v.size(-1), dtype=wide)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
    travelling = _Travelling(k, v, ring)
    for step in range(plan.size):
        block = plan.block(rank, step)
        travelling.send(step)
        if block is not None:
            theirs = travelling.here(step)
            part, part_lse = block_forward(_tile(q, *theirs, block, ring.scale))
            if step == 0:  # its own keys, which every row sees
                out, lse = part.to(wide), part_lse
            else:
                _merge(_rows(out, block), lse[..., slice(*block.queries)], part, part_lse)
        travelling.wait()
    return out.to(q.dtype), lse


def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, ring: Ring
) -> list[torch.Tensor]:
    """Go around once more; return the gradients of queries, keys and values."""
    plan, rank = ring.plan, ring.rank
    if plan.size > 1:  # a rank that is not here, or at another call, is told
        with going_back("rd.attention", ring.comm, ring.number) as ranks:
            ranks.all_gather(np.empty(0, np.uint8))
    dq = q.new_zeros(q.shape, dtype=rows.lse.dtype)
    travelling = _Travelling(k, v, ring)
    gradients = _Gradients(k, v, ring, rows.lse.dtype)
    for step in range(plan.size):
        block = plan.block(rank, step)
        travelling.send(step)
        parts = None
        if block is not None:
            tile = _tile(q, *travelling.here(step), block, ring.scale)
            mine = slice(*block.queries)
            seen = Rows(_rows(rows.grad, block), _rows(rows.out, block), rows.lse[..., mine])
            dq_part, *parts = block_backward(tile, seen)
            _rows(dq, block).add_(dq_part)
        gradients.add(step, block, parts)
        travelling.wait()
    return [dq.to(q.dtype), *(grad.to(k.dtype) for grad in gradients.home())]


def _tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float) -> Tile:
    keys = slice(*block.keys)
    return Tile(_rows(q, block), k[..., keys, :], v[..., keys, :], block.causal, scale)


def _rows(x: torch.Tensor, block: Block) -> torch.Tensor:
    return x[..., slice(*block.queries), :]


def _merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Put another block's rows together with those so far, in place."""
    weight = torch.sigmoid(part_lse - lse)  # of the new block
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


class _Travelling:
    """Keys and values of one rank after the other, in two buffers that take turns."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, ring: Ring) -> None:
        self.ring, self.k, self.v = ring, k, v
        self.buffers: list[torch.Tensor] = []
        self.exchange: Any = None  # what is under way
        if ring.plan.size > 1:
            longest = max(map(ring.plan.length, range(ring.plan.size)))
            room = _elements(k, v, longest)
            self.buffers = [k.new_empty(room) for _ in range(2)]
            for mine, place in zip((k, v), self._views(0), strict=True):
                place.copy_(mine)

    def _views(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that lie in a step's buffer."""
        length = self.ring.plan.length(self.ring.plan.source(self.ring.rank, step))
        return _unpacked(self.buffers[step % 2], self.k, self.v, length)

    def here(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that this rank has in a step."""
        return (self.k, self.v) if step == 0 else self._views(step)

    def send(self, step: int) -> None:
        """Begin to hand on what is here, and to take what comes next; the last step has neither."""
        if step < self.ring.plan.size - 1:
            self.exchange = _hand_on(self.ring, self.buffers, step, self.k, self.v, tag=0)

    def wait(self) -> None:
        """Wait until what comes next is here."""
        if self.exchange is not None:
            self.exchange.wait()
            self.exchange = None


class _Gradients:
    """Gradients of keys and values, which travel one step behind these and come home."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, ring: Ring, dtype: torch.dtype) -> None:
        self.ring, self.k, self.v = ring, k, v
        longest = max(map(ring.plan.length, range(ring.plan.size)))
        room = _elements(k, v, longest)
        self.buffers = [k.new_zeros(room, dtype=dtype) for _ in range(min(2, ring.plan.size))]
        self.exchange: Any = None

    def add(self, step: int, block: Block | None, parts: list[torch.Tensor] | None) -> None:
        """Add this rank's part to the sum of those before it, and hand that on."""
        if self.exchange is not None:
            self.exchange.wait()
        if block is not None and parts is not None:
            for total, part in zip(self._views(step), parts, strict=True):
                total[..., slice(*block.keys), :].add_(part)
        if self.ring.plan.size > 1:
            self.exchange = _hand_on(self.ring, self.buffers, step, self.k, self.v, tag=1)

    def _views(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.ring.plan.length(self.ring.plan.source(self.ring.rank, step))
        return _unpacked(self.buffers[step % 2], self.k, self.v, length)

    def home(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of this rank's own keys and values, once they are back."""
        if self.exchange is None:
            return self._views(0)
        self.exchange.wait()
        return self._views(self.ring.plan.size)


def _elements(k: torch.Tensor, v: torch.Tensor, length: int) -> int:
    return k.size(0) * k.size(1) * length * (k.size(-1) + v.size(-1))


def _unpacked(
    buffer: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of so many tokens that lie in a buffer, one after the other."""
    keys, values = ((x.size(0), x.size(1), length, x.size(-1)) for x in (k, v))
    first = _elements(k, k[..., :0], length)
    return (
        buffer[:first].view(keys),
        buffer[first : _elements(k, v, length)].view(values),
    )


def _hand_on(
    ring: Ring,
    buffers: list[torch.Tensor],
    step: int,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tag: int,
) -> Any:
    """Begin to send a step's buffer to the next rank, and to fill the other one."""
    comm, plan = ring.comm, ring.plan
    sent, came = (plan.length(plan.source(comm.rank, at)) for at in (step, step + 1))
    return comm.start.sendrecv(
        buffers[step % 2][: _elements(k, v, sent)],
        (comm.rank + 1) % comm.size,
        buffers[(step + 1) % 2][: _elements(k, v, came)],
        (comm.rank - 1) % comm.size,
        tag=2 * ring.number + tag,
        inner=True,
    )
