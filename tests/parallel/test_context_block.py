"""`with rd.context_parallel(…)`: a model's own attention goes over all ranks, or is refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402 - only with torch

nn = torch.nn
F = nn.functional
LAYOUTS = ["contiguous", "zigzag"]


class Model(nn.Module):  # type: ignore[misc, name-defined]
    """Two layers of grouped attention with learnt places, as a user would write them."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(32, 12)
        self.queries = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.others = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.again: Any = None  # in which block to compute again
        self.double()

    def layer(self, x: Any, number: int) -> Any:
        batch, length, _ = x.shape
        q = self.queries[number](x).view(batch, length, 4, 3).transpose(1, 2)
        k, v = self.others[number](x).view(batch, length, 2, 2, 3).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + seen.transpose(1, 2).reshape(batch, length, 12)

    def contexts(self) -> tuple[Any, Any]:
        return nullcontext(), self.again()

    def forward(self, x: Any, places: Any) -> Any:
        x = x + self.places(places)
        for number in range(2):
            if self.again is None:
                x = self.layer(x, number)
            else:
                x = checkpoint(self.layer, x, number, use_reentrant=False, context_fn=self.contexts)
        return x


def whole_model() -> tuple[Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(), torch.randn(2, 13, 12, dtype=torch.float64)


def gradients(model: Any) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointed"])
def test_a_model_is_the_one_of_one_device(
    again: bool,  # noqa: FBT001
    layout: str,
    method: str,
    size: int,
) -> None:
    model, x = whole_model()
    out = model(x, torch.arange(13))
    (out**2).sum().backward()

    def body(comm: rd.Communicator) -> None:
        mine = copy.deepcopy(model)
        mine.zero_grad()
        block = partial(rd.context_parallel, comm, method=method, layout=layout)
        mine.again = block if again else None
        shard = rd.shard_sequence(x, comm, layout=layout)
        places = rd.sequence_positions(13, comm, layout=layout)
        with block():
            part = mine(shard, places)
        (part**2).sum().backward()
        torch.testing.assert_close(
            rd.unshard_sequence(part, comm, layout=layout), out, rtol=1e-12, atol=1e-12
        )
        for grad, right in zip(gradients(mine), gradients(model), strict=True):
            total = comm.all_reduce(grad)
            torch.testing.assert_close(total, right, rtol=1e-11, atol=1e-12)

    rd.run(body, size, "threads")


def test_backward_behind_the_block() -> None:
    model, x = whole_model()

    def body(comm: rd.Communicator) -> None:
        mine = copy.deepcopy(model)
        shard = rd.shard_sequence(x, comm)
        with rd.context_parallel(comm):
            out = mine(shard, rd.sequence_positions(13, comm))
        out.sum().backward()
        mine.again = nullcontext
        with rd.context_parallel(comm):
            out = mine(shard, rd.sequence_positions(13, comm))
        with pytest.raises(Exception, match="different number of tensors"):
            out.sum().backward()  # computed again without the block, it would be another result

    rd.run(body, 2, "threads")


def attend(**how: Any) -> Any:
    def body(comm: rd.Communicator) -> None:
        q = torch.ones(1, 4, 3, 2)
        with rd.context_parallel(comm):
            F.scaled_dot_product_attention(q, q, q, **how)

    return body


def by_module(comm: rd.Communicator) -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.ones(1, 3, 4)
    with rd.context_parallel(comm):
        module(x, x, x)


def by_hand(comm: rd.Communicator) -> None:
    q = torch.ones(1, 3, 4)
    with rd.context_parallel(comm):
        (q @ q.mT).softmax(-1) @ q


def by_none(comm: rd.Communicator) -> None:
    with rd.context_parallel(comm):
        torch.ones(2, 3).softmax(-1)


def with_fewer_heads(comm: rd.Communicator) -> None:
    q, k = torch.ones(1, 4, 3, 2), torch.ones(1, 2, 3, 2)
    with rd.context_parallel(comm):
        F.scaled_dot_product_attention(q, k, k)


def by_old_checkpoint(comm: rd.Communicator) -> None:
    q = torch.ones(1, 4, 3, 2, requires_grad=True)
    with rd.context_parallel(comm):
        checkpoint(F.scaled_dot_product_attention, q, q, q, use_reentrant=True)


WRONG = {
    "mask": (attend(attn_mask=torch.ones(3, 3)), "attn_mask"),
    "dropout": (attend(dropout_p=0.5), "dropout"),
    "module": (by_module, "MultiheadAttention"),
    "by hand": (by_hand, "square"),
    "none": (by_none, "called scaled_dot"),
    "fewer heads": (with_fewer_heads, "enable_gqa"),
    "checkpoint": (by_old_checkpoint, "use_reentrant"),
}


def refused(comm: rd.Communicator, body: Any, word: str) -> None:
    with pytest.raises(rd.RoundelayError, match=word):
        body(comm)
    comm.barrier()


@pytest.mark.parametrize("name", WRONG)
def test_what_would_be_wrong_is_refused(name: str) -> None:
    rd.run(refused, 2, "threads", WRONG[name])


def test_behind_the_block_all_is_as_before() -> None:
    def body(comm: rd.Communicator) -> None:
        q = torch.ones(1, 4, 3, 2)
        with rd.context_parallel(comm):
            F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(ZeroDivisionError), rd.context_parallel(comm):
            raise ZeroDivisionError
        if comm.rank == 0:  # alone: nobody else calls
            F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 3))

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_blocks_in_blocks_and_calls_in_them(method: str) -> None:
    """What a rank computes alone in a call is nobody's attention but its own."""

    def body(comm: rd.Communicator) -> None:
        q = torch.arange(24.0).view(1, 4, 3, 2) * (1 + comm.rank)
        right = rd.attention(q, q, q, comm=comm, method=method)
        with rd.context_parallel(comm, method=method):
            F.scaled_dot_product_attention(q, q, q)
            with rd.context_parallel(comm, method=method):
                inside = F.scaled_dot_product_attention(q, q, q)
                ours = rd.attention(q, q, q, comm=comm, method=method)
        assert torch.equal(inside, right)
        assert torch.equal(ours, right)

    rd.run(body, 2, "threads")
