"""What attention over ranks can't do is refused on every rank, by name and with a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch, InvalidArgumentError

torch = pytest.importorskip("torch")

F = torch.nn.functional
Body = Callable[[rd.Communicator], Any]


def refused(body: Body, size: int = 2) -> list[BaseException]:
    """Return what each rank raises; the communicator is as good as before."""

    def rank_of(comm: rd.Communicator) -> BaseException:
        with pytest.raises(rd.RoundelayError) as caught:
            body(comm)
        comm.barrier()
        return caught.value

    errors: list[BaseException] = rd.run(rank_of, size, "threads")
    return errors


def x(*shape: int, dtype: Any = torch.float64) -> Any:
    return torch.ones(shape or (1, 4, 3, 2), dtype=dtype)


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "method": ("ring, ulysses", lambda c: rd.attention(x(), x(), x(), comm=c, method="rings")),
    "layout": ("zigzag", lambda c: rd.attention(x(), x(), x(), comm=c, layout="zag")),
    "unhashable layout": ("zigzag", lambda c: rd.attention(x(), x(), x(), comm=c, layout=[1])),  # type: ignore[arg-type]
    "causal": ("causal", lambda c: rd.attention(x(), x(), x(), comm=c, causal=1)),  # type: ignore[arg-type]
    "scale": ("scale", lambda c: rd.attention(x(), x(), x(), comm=c, scale=float("nan"))),
    "word": ("scale", lambda c: rd.attention(x(), x(), x(), comm=c, scale="1")),  # type: ignore[arg-type]
    "mask": ("attn_mask", lambda c: rd.attention(x(), x(), x(), comm=c, attn_mask=x(3, 3))),
    "dropout": ("dropout", lambda c: rd.attention(x(), x(), x(), comm=c, dropout_p=0.1)),
    "no tensor": ("q is", lambda c: rd.attention(None, x(), x(), comm=c)),  # type: ignore[arg-type]
    "whole numbers": ("int64", lambda c: rd.attention(x(), x(), x(dtype=torch.int64), comm=c)),
    "too few dims": ("v is", lambda c: rd.attention(x(), x(), x(3, 2), comm=c)),
    "other dim": ("one dim", lambda c: rd.attention(x(), x(1, 4, 3, 3), x(), comm=c)),
    "other batch": ("one batch", lambda c: rd.attention(x(2, 4, 3, 2), x(), x(), comm=c)),
    "other values": ("alike", lambda c: rd.attention(x(), x(), x(1, 2, 3, 2), comm=c)),
    "other keys": ("unshard", lambda c: rd.attention(x(), x(1, 4, 5, 2), x(1, 4, 5, 2), comm=c)),
    "nothing": ("dim is 0", lambda c: rd.attention(*(x(1, 4, 3, 0),) * 3, comm=c)),
    "no token": ("a token", lambda c: rd.attention(*(x(1, 4, 0, 2),) * 3, comm=c)),
    "dtypes": ("one dtype", lambda c: rd.attention(x(dtype=torch.float32), x(), x(), comm=c)),
    "groups": ("divide", lambda c: rd.attention(x(), *(x(1, 3, 3, 2),) * 2, comm=c)),
    "heads": ("method='ring'",
              lambda c: rd.attention(*(x(1, 3, 3, 2),) * 3, comm=c, method="ulysses")),
    "zigzag": ("shard_sequence",
               lambda c: rd.attention(*(x(1, 1, 3 + 2 * c.rank, 2),) * 3, comm=c, layout="zigzag")),
    "no dim": ("no dim", lambda c: rd.shard_sequence(x(), c, 4)),
    "no whole": ("tensor", lambda c: rd.unshard_sequence([1], c, 0)),  # type: ignore[arg-type]
    "no layout": ("zigzag", lambda c: rd.shard_sequence(x(), c, 2, layout="z")),
    "positions": ("whole number", lambda c: rd.sequence_positions(-1, c)),
    "positions'": ("zigzag", lambda c: rd.sequence_positions(4, c, layout="z")),
    "no comm": ("mesh", lambda c: rd.attention(x(), x(), x(), comm=c.rank)),
    "no comm'": ("mesh", lambda c: rd.context_parallel(c.rank)),
    "no such way": ("ring", lambda c: rd.context_parallel(c, method="rung")),
    "no such layout": ("zigzag", lambda c: rd.context_parallel(c, layout="rung")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    word, body = WRONG[name]
    for error in refused(body):
        assert isinstance(error, InvalidArgumentError)
        assert word in str(error)


OTHERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "causal": lambda rank: {"causal": rank == 1},
    "scale": lambda rank: {"scale": 1.0 + rank * 1e-9},
    "layout": lambda rank: {"layout": ["contiguous", "zigzag"][rank]},
    "method": lambda rank: {"method": ["ring", "ulysses"][rank]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_that_ask_for_different_things_are_told(name: str) -> None:
    def body(comm: rd.Communicator) -> None:
        q = x(1, 2, 4, 2)
        rd.attention(q, q, q, comm=comm, **OTHERS[name](comm.rank))

    for error in refused(body):
        assert isinstance(error, CollectiveMismatch)
        assert f"same {name} " in str(error)


@pytest.mark.parametrize(
    ("name", "shape"), [("batch", (2, 4, 3, 2)), ("heads", (1, 8, 3, 2)), ("dim", (1, 4, 3, 3))]
)
def test_ranks_with_different_shapes_are_told(name: str, shape: tuple[int, ...]) -> None:
    for error in refused(lambda c: rd.attention(*(x(*shape) if c.rank else x(),) * 3, comm=c)):
        assert isinstance(error, CollectiveMismatch)
        assert name in str(error)


def test_who_is_right_hears_of_who_is_wrong() -> None:
    def body(comm: rd.Communicator) -> None:
        rd.attention(x(), x(), x(), comm=comm, dropout_p=0.1 * comm.rank)

    kinds = [type(error) for error in refused(body, 3)]
    assert kinds == [CollectiveMismatch, InvalidArgumentError, InvalidArgumentError]
    assert "rank 1" in str(refused(body, 2)[0])


def test_a_rank_without_gradients_is_told() -> None:
    def body(comm: rd.Communicator) -> None:
        q = x().requires_grad_(comm.rank == 0)
        rd.attention(q, q, q, comm=comm)

    assert all("requires_grad" in str(error) for error in refused(body))


def test_sequences_of_other_lengths_are_told() -> None:
    for error in refused(lambda c: rd.shard_sequence(x(1, 4 + c.rank), c)):
        assert "length" in str(error)
    for error in refused(lambda c: rd.unshard_sequence(x(1 + c.rank, 4), c)):
        assert "shape" in str(error)


def test_a_second_derivative_is_refused() -> None:
    def body(comm: rd.Communicator) -> None:
        q = x().requires_grad_()
        out: Any = rd.attention(q, q, q, comm=comm)
        (grad,) = torch.autograd.grad((out * out).sum(), q, create_graph=True)
        torch.autograd.backward(grad.sum())

    for error in refused(body):
        assert "second derivative" in str(error)


def test_backward_in_another_order_is_told() -> None:
    def body(comm: rd.Communicator) -> None:
        q = x().requires_grad_()
        outs: list[Any] = [rd.attention(q, q, q, comm=comm) for _ in range(2)]
        for out in outs if comm.rank else reversed(outs):
            out.sum().backward()

    def rank_of(comm: rd.Communicator) -> None:
        with pytest.raises(CollectiveMismatch, match="label"):
            body(comm)

    rd.run(rank_of, 2, "threads")


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, q: Any, comm: rd.Communicator) -> Any:
        return rd.attention(q, q, q, comm=comm)


def test_ranks_that_are_in_other_layers_are_told() -> None:
    """Which is whose is known by who called first, of each rank's own modules."""

    def body(comm: rd.Communicator) -> None:
        layers = [Layer() for _ in range(3)]
        for layer in (*layers, *layers[::-1]):
            layer(x(), comm)
        layers[1 + comm.rank](x(), comm)

    for error in refused(body):
        assert isinstance(error, CollectiveMismatch)
        assert "the same layer on every rank, but it is Layer 2 on rank 0 and Layer 3" in str(error)
