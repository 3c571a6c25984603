"""Attention over ranks is one device's: outputs and gradients, for every way to divide it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

SIZES = (1, 2, 3, 4, 8)
LENGTHS = (24, 29)  # even on every size; odd
HEADS = {"one for each": (8, 8), "grouped": (8, 2), "one for all": (8, 1), "odd": (6, 3)}
BATCHES: dict[str, tuple[int, ...]] = {
    "none": (), "one": (2,), "two": (2, 3), "no rows": (0,), "no rows of two": (2, 0),
}  # fmt: skip


def drawn(seed: int, *shape: int, dtype: Any = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def tensors(
    length: int,
    heads: tuple[int, int],
    *,
    batch: tuple[int, ...] = (2,),
    dims: tuple[int, int] = (8, 8),
) -> list[Any]:
    """Return q, k, v and the gradient of the output."""
    shapes = [(*batch, heads[0], length, dims[0]), (*batch, heads[1], length, dims[0]),
              (*batch, heads[1], length, dims[1]), (*batch, heads[0], length, dims[1])]  # fmt: skip
    return [drawn(seed, *shape) for seed, shape in enumerate(shapes)]


def plain(q: Any, k: Any, v: Any, *, causal: bool, scale: float | None = None) -> Any:
    """Return attention as the formula has it."""
    k, v = (x.repeat_interleave(q.size(-3) // k.size(-3), -3) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.size(-1)) if scale is None else scale)
    if causal:
        length = q.size(-2)
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return scores.softmax(-1) @ v


def one_device(four: list[Any], *, causal: bool, scale: float | None = None) -> list[Any]:
    """Return the output and the gradients of q, k and v, of one device."""
    q, k, v = (x.clone().requires_grad_() for x in four[:3])
    out = plain(q, k, v, causal=causal, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), four[3])]


def on_ranks(comm: rd.Communicator, four: list[Any], layout: str, **how: Any) -> list[Any]:
    """Return the same of all ranks together."""
    parts = [rd.shard_sequence(x, comm, -2, layout=layout) for x in four]
    q, k, v = (x.requires_grad_() for x in parts[:3])
    out = rd.attention(q, k, v, comm=comm, layout=layout, **how)
    results = [out.detach(), *torch.autograd.grad(out, (q, k, v), parts[3])]
    assert [x.shape for x in results] == [x.shape for x in (parts[3], *parts[:3])]
    return [rd.unshard_sequence(x, comm, -2, layout=layout) for x in results]


def assert_near(results: list[Any], expected: list[Any], within: float = 1e-12) -> None:
    for result, right in zip(results, expected, strict=True):
        assert (result.dtype, result.shape) == (right.dtype, right.shape)
        if not right.numel():
            continue
        error = (result - right).abs().max() / right.abs().max()
        assert error < within


def fits(method: str, heads: tuple[int, int], size: int) -> bool:
    return method == "ring" or heads[0] % size == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_is_that_of_one_device(
    method: str,
    layout: str,
    causal: bool,  # noqa: FBT001
    heads: str,
    length: int,
    size: int,
) -> None:
    if not fits(method, HEADS[heads], size):
        pytest.skip("refused, which another test says")
    four = tensors(length, HEADS[heads])
    expected = one_device(four, causal=causal)
    how = {"method": method, "causal": causal}
    for results in rd.run(lambda comm: on_ranks(comm, four, layout, **how), size, "threads"):
        assert_near(results, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dims", [(8, 4), (3, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_other_shapes_and_scales(method: str, batch: str, dims: tuple[int, int], size: int) -> None:
    four = tensors(13, (6, 2), batch=BATCHES[batch], dims=dims)
    for causal in (False, True):
        expected = one_device(four, causal=causal, scale=0.3)
        how = {"method": method, "causal": causal, "scale": 0.3}
        for results in rd.run(
            lambda c, how=how: on_ranks(c, four, "zigzag", **how), size, "threads"
        ):
            assert_near(results, expected)


def test_compiled_models_leave_attention_to_the_ranks() -> None:
    """Traced, a collective would run when torch compiles, or never."""

    def body(comm: rd.Communicator) -> list[list[Any]]:
        @torch.compile(backend="eager")  # type: ignore[untyped-decorator, unused-ignore]
        def doubled(q: Any, k: Any, v: Any) -> Any:
            return rd.attention(q * 2, k, v, comm=comm, causal=True) + 1

        found = []
        for length in (12, 15):
            q, k, v, _ = (rd.shard_sequence(x, comm, -2) for x in tensors(length, (4, 2)))
            right = rd.attention(q * 2, k, v, comm=comm, causal=True) + 1
            found.append([doubled(q, k, v).tolist(), right.tolist()])
        return found

    for rank in rd.run(body, 2, "threads"):
        for compiled, right in rank:
            assert compiled == right


def test_an_epoch_may_end_with_a_batch_that_some_ranks_have_no_rows_of() -> None:
    rows = drawn(5, 5, 8, 4)

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4).double()

        def forward(self, x: Any) -> Any:
            y = self.linear(x).unsqueeze(1)
            return torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)

    def train(net: Any, optimizer: Any, loader: Any, comm: Any = None) -> Any:
        for (batch,) in loader:
            if comm is None:
                loss = net(batch).square().mean()
            else:
                with rd.context_parallel(comm):
                    loss = net(rd.shard_sequence(batch, comm)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return net

    def body(comm: rd.Communicator) -> Any:
        mesh, net = rd.Mesh(dp=2, cp=2, comm=comm), copy.deepcopy(one)
        data = torch.utils.data.TensorDataset(rows)
        model, optimizer = rd.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), mesh=mesh)
        loader = rd.loader(data, 4, mesh=mesh, model=model, shuffle=False, quiet=True)
        return rd.full_state_dict(train(model, optimizer, loader, mesh["cp"]))["linear.weight"]

    one = Net()
    every = rd.run(body, 4, "threads")
    train(one, torch.optim.SGD(one.parameters(), lr=0.1), [(rows[:4],), (rows[4:],)])
    for found in every:
        torch.testing.assert_close(found, one.linear.weight.detach(), rtol=1e-12, atol=1e-14)
