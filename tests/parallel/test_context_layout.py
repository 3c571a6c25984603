"""A sequence divided and put together is the sequence; positions say where tokens stand."""

from __future__ import annotations

from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from roundelay.parallel.context import blockwise, kernels  # noqa: E402 - only with torch

LAYOUTS = ["contiguous", "zigzag"]
NEAR = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 5, 16, 29])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_make_the_sequence(layout: str, length: int, size: int) -> None:
    """Gradients are those of the sum of what all ranks compute."""

    def body(comm: rd.Communicator) -> list[int]:
        for dim in (0, 1, -1):
            shape = [3, 4, 2]
            shape[dim] = length
            x = torch.arange(float(torch.Size(shape).numel())).view(shape).requires_grad_()
            shard = rd.shard_sequence(x, comm, dim, layout=layout)
            places = rd.sequence_positions(length, comm, layout=layout)
            assert torch.equal(shard, x.index_select(dim, places))
            whole = rd.unshard_sequence(shard, comm, dim, layout=layout)
            assert torch.equal(whole, x)
            weight = torch.arange(float(x.numel())).view(shape) + 1
            (grad,) = torch.autograd.grad((whole * whole * weight).sum(), x)
            assert torch.equal(
                grad.index_select(dim, places),
                comm.size * 2 * shard * weight.index_select(dim, places),
            )
            assert torch.equal(comm.all_reduce(grad), comm.size * 2 * x.detach() * weight)
        tokens = torch.arange(2 * length).view(2, length)
        shard = rd.shard_sequence(tokens, comm, layout=layout)
        assert torch.equal(rd.unshard_sequence(shard, comm, layout=layout), tokens)
        return places.tolist()

    every = rd.run(body, size, "threads")
    assert sorted(place for places in every for place in places) == list(range(length))
    assert max(map(len, every)) - min(map(len, every)) <= (1 if layout == "contiguous" else 2)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_contiguous_shards_may_have_any_lengths(method: str) -> None:
    lengths = [5, 0, 2]
    whole = torch.randn(1, 3, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    right = torch.nn.functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True)

    def body(comm: rd.Communicator) -> None:
        part = whole.split(lengths, -2)[comm.rank].clone().requires_grad_()
        out: Any = rd.attention(part, part, part, comm=comm, method=method, causal=True)
        torch.testing.assert_close(
            rd.unshard_sequence(out, comm, -2), right, rtol=1e-12, atol=1e-12
        )
        out.sum().backward()
        assert part.grad is not None

    rd.run(body, 3, "threads")


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_every_dtype(method: str, dtype: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    three = [torch.randn(1, 4, 40, 8, dtype=torch.float64, generator=draw) for _ in range(3)]
    exact = [x.to(dtype).double().requires_grad_() for x in three]
    right = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True)
    grads = torch.autograd.grad(right.sum(), exact)

    def body(comm: rd.Communicator) -> None:
        shards = [rd.shard_sequence(x.to(dtype), comm, -2, layout="zigzag") for x in three]
        parts = [x.requires_grad_() for x in shards]
        out = rd.attention(*parts, comm=comm, method=method, causal=True, layout="zigzag")
        mine = [out, *torch.autograd.grad(out.sum(), parts)]
        assert all(x.dtype is dtype for x in mine)
        for got, wanted in zip(mine, (right, *grads), strict=True):
            whole = rd.unshard_sequence(got.detach(), comm, -2, layout="zigzag").double()
            assert (whole - wanted).abs().max() < NEAR[dtype] * wanted.abs().max()

    rd.run(body, 4, "threads")


def test_autocast_is_that_of_torchs_own_attention() -> None:
    def body(comm: rd.Communicator) -> None:
        q = torch.ones(1, 2, 4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = rd.attention(q, q.bfloat16(), q, comm=comm)
        assert out.dtype is torch.bfloat16
        (grad,) = torch.autograd.grad(out.float().sum(), q)
        assert grad.dtype is torch.float32

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
def test_plain_products_are_what_kernels_compute(
    heads: tuple[int, int],
    causal: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever kernel there is for a device, a block is the same; some rows at a time, too."""
    monkeypatch.setattr(blockwise, "ROWS", 7)
    draw = torch.Generator().manual_seed(2)
    q, k, v, grad = (
        torch.randn(2, count, 20, 8, dtype=torch.float64, generator=draw)
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    tile = kernels.Tile(q, k, v, causal, 0.2)
    out, lse = kernels.block_forward(tile)
    mine = blockwise.forward(q, k, v, causal=causal, scale=0.2)
    rows = kernels.Rows(grad, out, lse)
    theirs = [out, lse, *kernels.block_backward(tile, rows)]
    ours = [*mine, *blockwise.backward(rows, q, k, v, causal=causal, scale=0.2)]
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["shared_memory", "gloo"])
def test_ranks_in_processes(engine: str) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used a GPU can't be forked")
    whole = torch.randn(1, 2, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    right = torch.nn.functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True)

    def body(comm: rd.Communicator) -> float:
        torch.set_num_threads(1)
        shard = rd.shard_sequence(whole, comm, -2, layout="zigzag").requires_grad_()
        out: Any = rd.attention(shard, shard, shard, comm=comm, causal=True, layout="zigzag")
        out.sum().backward()
        back = rd.unshard_sequence(out, comm, -2, layout="zigzag")
        return float((back.detach() - right).abs().max())

    assert max(rd.run(body, 3, engine)) < 1e-12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("tokens", [1, 100, 256])
@pytest.mark.parametrize("dims", [(64, 64), (20, 20), (8, 12), (136, 136)], ids=str)
def test_blocks_on_a_gpu(dims: tuple[int, int], tokens: int, dtype: Any) -> None:
    """Whichever kernel is chosen, a block is what plain products give."""
    draw = torch.Generator("cuda").manual_seed(3)
    shapes = [(6, dims[0]), (2, dims[0]), (2, dims[1]), (6, dims[1])]
    q, k, v, grad = (
        torch.randn(2, count, tokens, dim, device="cuda", generator=draw).to(dtype)
        for count, dim in shapes
    )
    for causal in (False, True):
        tile = kernels.Tile(q, k, v, causal, 0.2)
        out, lse = kernels.block_forward(tile)
        rows = kernels.Rows(grad, out, lse)
        theirs = [out, lse, *kernels.block_backward(tile, rows)]
        ours = [*blockwise.forward(q, k, v, causal=causal, scale=0.2),
                *blockwise.backward(rows, q, k, v, causal=causal, scale=0.2)]  # fmt: skip
        for got, right in zip(theirs, ours, strict=True):
            # Of a single token some gradients are 0, and what is there is rounding.
            assert (got - right).abs().max() <= 2 * NEAR[dtype] * right.abs().max() + 1e-5
