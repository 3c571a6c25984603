"""Every kind of cut layer alone: results, gradients, what it sends, and odd shapes and options."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from roundelay.parallel.sharding import sharding_of  # noqa: E402 - only with torch
from roundelay.parallel.tensor.plan import apply_plan  # noqa: E402

nn = torch.nn
SIZES = (1, 2, 3, 4, 8)
DTYPES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}


class Counted:
    """A communicator that lists its calls: what, and how many bytes the whole has."""

    def __init__(self, comm: Any, calls: list[tuple[str, int]] | None = None) -> None:
        self._comm = comm
        self.calls: list[tuple[str, int]] = [] if calls is None else calls

    def labelled(self, label: int) -> Counted:
        return Counted(self._comm.labelled(label), self.calls)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._comm, name)
        if name not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            return value

        def call(x: Any, *arguments: Any, **options: Any) -> Any:
            result = value(x, *arguments, **options)
            whole = result if name == "all_gather" else x
            self.calls.append((name, whole.nbytes))
            return result

        return call


def counted(comm: rd.Communicator) -> tuple[rd.Mesh, Counted]:
    mesh, counter = rd.Mesh(tp=comm.size, comm=comm), Counted(comm)
    mesh._groups["tp",] = counter  # type: ignore[assignment]
    return mesh, counter


class Pair(nn.Module):  # type: ignore[misc, name-defined]
    """Two linear layers with what lies between, in and around a sequence-parallel part."""

    def __init__(self, inputs: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.before = nn.Identity()
        self.norm = nn.LayerNorm(inputs)
        self.up = nn.Linear(inputs, inner, bias=bias)
        self.down = nn.Linear(inner, inputs, bias=bias)
        self.after = nn.Identity()

    def forward(self, x: Any) -> Any:
        x = self.before(x)
        return self.after(x + self.down(torch.tanh(self.up(self.norm(x)))))


PAIR = {"before": "split", "norm": "norm", "up": "column", "down": "row", "after": "gather"}


def drawn(seed: int, *shape: int, dtype: Any = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def fill(model: Any) -> Any:
    for at, parameter in enumerate(model.parameters()):
        parameter.data = drawn(at, *parameter.shape)
    return model


def compare(
    start: Any, plan: dict[str, str], x: Any, size: int, *, sequence: bool = False,
    tolerance: float = 1e-12, calls: Callable[[int], list[tuple[str, int]]] | None = None,
) -> None:  # fmt: skip
    """See that a model computes with a plan what it computes without, and sends what it should."""
    lonely, alone = copy.deepcopy(start), x.clone().requires_grad_(x.is_floating_point())
    wanted = lonely(alone)
    weight = drawn(99, *wanted.shape, dtype=wanted.dtype)
    (wanted * weight).sum().backward()

    def body(comm: rd.Communicator) -> None:
        mesh, counter = counted(comm)
        model, mine = copy.deepcopy(start), x.clone().requires_grad_(x.is_floating_point())
        apply_plan(model, plan, mesh, sequence_parallel=sequence)
        counter.calls.clear()
        found = model(mine)
        (found * weight).sum().backward()
        listed = counter.calls.copy()
        close(found, wanted, tolerance)
        if mine.grad is not None:
            close(mine.grad, alone.grad, tolerance)
        for (name, parameter), other in zip(
            model.named_parameters(), lonely.parameters(), strict=True
        ):
            sharding = sharding_of(parameter)
            whole = parameter.grad if sharding is None else sharding.whole(parameter.grad)
            close(whole, other.grad, tolerance, name)
        if calls is not None and size > 1:
            assert listed == calls(size)

    rd.run(body, size, "threads")


def close(found: Any, wanted: Any, tolerance: float, what: str = "") -> None:
    error = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert error <= tolerance, (what, float(error))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("inner", [8, 13])
def test_column_and_row(inner: int, size: int, *, sequence: bool, bias: bool) -> None:
    """Two sums of activations: as all-reduces, or as as many bytes in gathers and scatters."""
    x = drawn(0, 2, 24, 5)
    start = fill(Pair(5, inner, bias=bias).double())
    whole = 2 * 24 * 5 * 8
    small = [("all_reduce", 5 * 8)] if bias else []  # of the bias of `down`, added to shards

    def calls(size: int) -> list[tuple[str, int]]:
        del size
        if not sequence:
            return [("all_reduce", whole)] * 2
        forward = [("all_gather", whole), ("reduce_scatter", whole), ("all_gather", whole)]
        return [*forward, *small, ("all_gather", whole), ("reduce_scatter", whole),
                ("all_reduce", 2 * 5 * 8), ("all_gather", whole)]  # fmt: skip

    compare(start, PAIR, x, size, sequence=sequence, calls=calls)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype(dtype: str, size: int, *, sequence: bool) -> None:
    kind = getattr(torch, dtype)
    start = fill(Pair(6, 9, bias=True)).to(kind)
    x = drawn(0, 2, 6, 6, dtype=kind)
    compare(start, PAIR, x, size, sequence=sequence, tolerance=DTYPES[dtype])


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 3), (0, 3), (2, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_every_shape(shape: tuple[int, ...], size: int) -> None:
    x = drawn(0, *shape, 4)
    start = fill(Pair(4, 7, bias=True).double())

    def body(comm: rd.Communicator) -> None:
        model = copy.deepcopy(start)
        apply_plan(model, PAIR, rd.Mesh(tp=size, comm=comm))
        found = model(x)
        torch.testing.assert_close(found, start(x), rtol=1e-12, atol=1e-12)

    rd.run(body, size, "threads")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("padding", [None, 0, 10])
def test_embedding(size: int, padding: int | None) -> None:
    """One sum of activations forward; nothing backward."""
    start = nn.Embedding(11, 5, padding_idx=padding).double()
    start.weight.data = drawn(1, 11, 5)
    tokens = torch.arange(11).repeat(2)[:21].view(3, 7)
    compare(start, {"": "embedding"}, tokens, size, calls=lambda _: [("all_reduce", 3 * 7 * 5 * 8)])


@pytest.mark.parametrize("token", [11, -1, 400])
def test_a_token_that_nobody_has_is_refused_by_all(token: int) -> None:
    def body(comm: rd.Communicator) -> None:
        model = nn.Embedding(11, 5)
        apply_plan(model, {"": "embedding"}, rd.Mesh(tp=3, comm=comm))
        with pytest.raises(IndexError):
            model(torch.tensor([1, token]))

    rd.run(body, 3, "threads")


@pytest.mark.parametrize("size", SIZES)
def test_a_column_whose_outputs_are_gathered(size: int) -> None:
    start = fill(nn.Sequential(nn.Linear(4, 11), nn.Tanh(), nn.Linear(11, 3)).double())
    counts = [11 // size + (rank < 11 % size) for rank in range(size)]
    assert sum(counts) == 11
    compare(
        start, {"0": "column gather", "2": "replicate"}, drawn(0, 5, 4), size,
        calls=lambda _: [("all_gather", 5 * 11 * 8), ("all_reduce", 5 * 4 * 8)],
    )  # fmt: skip


class Shared(nn.Module):  # type: ignore[misc, name-defined]
    """Three layers on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.LayerNorm(4)

    def forward(self, x: Any, offset: Any = None) -> Any:
        gate = self.gate(x if offset is None else offset)
        return self.down(torch.sigmoid(gate) * self.up(x))


def test_a_region_brings_its_input_in_once() -> None:
    """One sum for layers that share their input; two without the region."""
    start = fill(nn.Sequential(Shared()).double())
    del start[0].scale
    words = {"0.gate": "column", "0.up": "column", "0.down": "row"}
    x, sent = drawn(0, 3, 5, 4), ("all_reduce", 3 * 5 * 4 * 8)
    compare(start, {"0": "region", **words}, x, 2, calls=lambda _: [sent] * 2)
    compare(start, words, x, 2, calls=lambda _: [sent] * 3)


def test_a_region_brings_in_whatever_else_has_a_gradient() -> None:
    start = fill(Shared().double())
    del start.scale
    inputs = [drawn(at, 3, 4) for at in range(2)]
    one = [x.clone().requires_grad_() for x in inputs]
    start(one[0], offset=one[1]).sum().backward()

    def body(comm: rd.Communicator) -> None:
        model = nn.ModuleDict({"block": copy.deepcopy(start)})
        words = {"block.gate": "column", "block.up": "column", "block.down": "row"}
        apply_plan(model, {"block": "region", **words}, rd.Mesh(tp=2, comm=comm))
        mine = [x.clone().requires_grad_() for x in inputs]
        model["block"](mine[0], offset=mine[1]).sum().backward()
        for found, wanted in zip(mine, one, strict=True):
            close(found.grad, wanted.grad, 1e-12)

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallel_sends_as_many_bytes(size: int) -> None:
    """By the communicator's own count: 2 (N - 1) / N of the activations for each sum, either way.

    Sequence parallel adds the gradients of small parameters, and here the two ends of its part.
    """
    start = fill(Pair(64, 96, bias=False).double())
    x = drawn(0, 4, 32, 64)
    whole = x.nbytes

    def body(comm: rd.Communicator, sequence: int) -> int:
        model = copy.deepcopy(start)
        apply_plan(model, PAIR, rd.Mesh(tp=size, comm=comm), sequence_parallel=bool(sequence))
        before = comm.traffic()
        model(x.clone().requires_grad_()).sum().backward()
        after = comm.traffic()
        assert before is not None
        assert after is not None
        return after[comm.rank].sent - before[comm.rank].sent

    sums = [2 * 2 * whole * (size - 1) // size] * size
    assert rd.run(body, size, "threads", (0,)) == sums
    ends = 2 * whole * (size - 1) // size
    sent = rd.run(body, size, "threads", (1,))
    assert all(total + ends <= more <= total + ends + (size - 1) * 2 * 64 * 8
               for total, more in zip(sums, sent, strict=True))  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallel_keeps_less_for_backward(size: int) -> None:
    """What a norm saves of its input shrinks to a share; what cut layers save stays as it is."""
    start = fill(Pair(16, 32, bias=False).double())
    x = drawn(0, 2, 24, 16)

    def body(comm: rd.Communicator, sequence: int) -> int:
        model, kept = copy.deepcopy(start), {}
        apply_plan(model, PAIR, rd.Mesh(tp=size, comm=comm), sequence_parallel=bool(sequence))

        def note(tensor: Any) -> Any:
            if tensor.dim() == 3:  # activations
                kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = model(x.clone().requires_grad_())
        assert result.requires_grad
        return sum(kept.values())

    before, after = (rd.run(body, size, "threads", (sequence,))[0] for sequence in (0, 1))
    means = 2 * 2 * 24 * 8  # a norm's mean and deviation of each token
    assert before - after == (x.nbytes + means) * (size - 1) // size


class Dropped(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Identity(), nn.Identity()
        self.up, self.down = nn.Linear(6, 64, bias=False), nn.Linear(64, 6, bias=False)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.25)

    def forward(self, x: Any) -> Any:
        seen = self.inner(self.up(self.before(x)))
        self.seen = seen.detach()
        return self.after(self.outer(self.down(seen)))


DROPPED = {"before": "split", "after": "gather", "up": "column", "down": "row",
           "inner": "dropout sharded", "outer": "dropout"}  # fmt: skip


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_masks_are_alike_where_activations_are(*, sequence: bool) -> None:
    start = fill(Dropped().double())
    x = drawn(0, 2, 8, 6)

    def body(comm: rd.Communicator) -> tuple[Any, Any]:
        model = copy.deepcopy(start)
        apply_plan(model, DROPPED, rd.Mesh(tp=2, comm=comm), sequence_parallel=sequence)
        mine = x.clone().requires_grad_()
        found = model(mine)
        found.sum().backward()
        every = comm.all_gather(found.detach())
        assert torch.equal(every[0], every[1])
        grads = comm.all_gather(mine.grad)
        assert torch.equal(grads[0], grads[1])
        seen = model.seen
        torch.testing.assert_close(model.eval()(x), copy.deepcopy(start).eval()(x))
        return found.detach().numpy(), seen.numpy()

    found, other = rd.run(body, 2, "threads")
    dropped = (found[0] == 0).mean()
    assert 0.05 < dropped < 0.5
    shards = [seen != 0 for _, seen in (found, other)]
    assert (shards[0] != shards[1]).any()
    if sequence:  # tokens of the two shards have masks of their own
        first, second = found[0][:, :4] == 0, found[0][:, 4:] == 0
        assert (first != second).any()


AGAIN = """
import torch
import roundelay as rd
from roundelay.parallel.tensor.plan import apply_plan

def body(comm):
    layers = torch.nn.Linear(6, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 6)
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.25))
    words = {"0": "column", "1": "dropout sharded", "2": "row", "3": "dropout"}
    apply_plan(model, words, rd.Mesh(tp=2, comm=comm))
    grads = []
    for again in (False, True):
        torch.manual_seed(comm.rank)
        x = torch.ones(4, 6, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if again else model(x)
        y.square().sum().backward()
        grads.append(x.grad)
    return bool(torch.equal(*grads) and grads[0].any())

print(rd.run(body, 2))
"""


def test_a_mask_is_drawn_again_for_a_checkpointed_block() -> None:
    """In processes: threads share torch's random numbers, which checkpointing sets back."""
    done = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout == "[True, True]\n"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_blocks_computed_again(*, sequence: bool, reentrant: bool) -> None:
    start = fill(Pair(5, 8, bias=True).double())
    x = drawn(0, 2, 6, 5)
    lonely, alone = copy.deepcopy(start), x.clone().requires_grad_()
    lonely(alone).square().sum().backward()

    def body(comm: rd.Communicator) -> None:
        model, mine = copy.deepcopy(start), x.clone().requires_grad_()
        apply_plan(model, PAIR, rd.Mesh(tp=2, comm=comm), sequence_parallel=sequence)
        found = torch.utils.checkpoint.checkpoint(model, mine, use_reentrant=reentrant)
        found.square().sum().backward()
        close(mine.grad, alone.grad, 1e-12)
        for parameter, other in zip(model.parameters(), lonely.parameters(), strict=True):
            sharding = sharding_of(parameter)
            close(sharding.whole(parameter.grad) if sharding else parameter.grad, other.grad, 1e-12)

    rd.run(body, 2, "threads")


def test_autocast_keeps_the_dtype_of_the_layer() -> None:
    start = fill(Pair(4, 8, bias=True)).float()

    def body(comm: rd.Communicator) -> None:
        model = copy.deepcopy(start)
        apply_plan(model, PAIR, rd.Mesh(tp=2, comm=comm))
        with torch.autocast("cpu", torch.bfloat16):
            assert model.down(model.up(drawn(0, 3, 4).float())).dtype == torch.bfloat16

    rd.run(body, 2, "threads")


def test_values_are_those_of_the_first_rank() -> None:
    def body(comm: rd.Communicator) -> tuple[Any, Any]:
        model = Pair(4, 8, bias=True).double()
        for parameter in model.parameters():
            parameter.data.fill_(comm.rank + 1)
        model.register_buffer("mask", torch.full((3,), comm.rank, dtype=torch.int64))
        apply_plan(model, PAIR, rd.Mesh(dp=2, tp=2, comm=comm))
        return {float(one.data.min()) for one in model.parameters()}, int(model.mask[0])

    assert rd.run(body, 4, "threads") == [({1.0}, 0), ({1.0}, 0), ({3.0}, 2), ({3.0}, 2)]
