"""Sparse gradients, complex parameters, expanded buffers: as on one device, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError, NotFiniteError  # noqa: E402
from roundelay.training.prepare import known_strategies  # noqa: E402

nn = torch.nn


class Rows(nn.Module):  # type: ignore[misc, name-defined]
    """Rows that few ranks use; `tied` ones have a dense gradient, too."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 3, sparse=True)
        self.bag = nn.EmbeddingBag(7, 3, mode="sum", sparse=True)
        self.last = nn.Linear(3, 2)
        self.tied = tied

    def forward(self, x: Any) -> Any:
        few, rows = x > 6, self.embed(x)
        if bool(few.any()):  # other ranks don't use it
            rows = rows.index_add(0, few.nonzero()[:, 0], self.bag(x[few][:, None] % 7))
        found = self.last(rows)
        return found + (rows @ self.embed.weight.T).mean(1, keepdim=True) if self.tied else found


class Waves(nn.Module):  # type: ignore[misc, name-defined]
    """Complex parameters between real ones of odd sizes, and a buffer that was expanded."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        del tied
        self.first = nn.Linear(1, 3)
        self.turn = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(1, dtype=torch.complex128))
        self.last = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64).expand(4))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.first(x[:, None].double() / 9)).to(torch.complex128)
        return self.last((x @ self.turn + self.shift).abs())


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 9, (12,), generator=generator) for _ in range(4)]


def sgd(model: Any) -> Any:
    return (torch.optim.SGD(model.parameters(), lr=0.1),)


def heavy(model: Any) -> Any:
    return (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),)


def adagrad(model: Any) -> Any:
    return (torch.optim.Adagrad(model.parameters(), lr=0.1),)


def lazy(model: Any) -> Any:
    """Rows that no rank has used must not move, whose means would."""
    rows = [model.embed.weight, model.bag.weight]
    return torch.optim.SparseAdam(rows, lr=0.1), torch.optim.Adam(model.last.parameters(), lr=0.1)


def adam(model: Any) -> Any:
    return (torch.optim.Adam(model.parameters(), lr=0.1),)


def twice(loss: Any, model: Any, listed: Any, x: Any) -> None:
    """Two passes, both of them outside `rd.accumulate`."""
    for half in (x[:6], x[6:]):
        loss(model, half).backward()
    for one in listed:
        one.step()
        one.zero_grad()


CASES: list[tuple[Any, Any, bool]] = [
    (Rows, sgd, False),
    (Rows, lazy, False),
    (Rows, sgd, True),
    (Waves, adam, False),
]


def assert_clips(model: Any, listed: Any, x: Any) -> None:
    rd.backward(model(x).square().sum() * 1e3, weight=x.numel())
    if isinstance(model, Rows):
        assert model.embed.weight.grad.is_sparse != model.tied
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    whole = [one.to_dense() if one.is_sparse else one for one in grads]
    norm = float(torch.stack([one.abs().square().sum() for one in whole]).sum().sqrt())
    if len(listed) == 1:
        assert abs(float(listed[0].clip_grad_norm_(1.0)) - norm) <= 1e-9 * norm


DENSE = [(Rows, sgd, False), (Rows, heavy, False), (Rows, sgd, True), (Rows, adagrad, False)]
PASSES: dict[str, Any] = {"ddp": CASES, **dict.fromkeys(["zero1", "zero2", "zero3", "ps"], DENSE)}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own Adagrad
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", PASSES)
def test_ranks_do_what_one_device_does(name: str, size: int) -> None:
    """Where gradients can't stay sparse, those that may be are made dense."""
    starts = []
    for kind, optimizers, tied in PASSES[name]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            start = kind(tied=tied).double()
        whole = copy.deepcopy(start)
        listed = optimizers(whole)
        for x in batches():
            twice(lambda model, x: model(x).square().mean(), whole, listed, x)
        starts.append((start, optimizers, whole.state_dict()))

    def be_rank(comm: Any) -> None:
        def share(x: Any) -> Any:
            return x.tensor_split(comm.size)[comm.rank]

        def even(model: Any, x: Any) -> Any:
            return model(share(x)).square().mean()

        for start, optimizers, wanted in starts:
            model = copy.deepcopy(start)
            model, listed = rd.prepare(model, optimizers(model), strategy=name, comm=comm)
            for x in batches():
                twice(even, model, listed, x)
            assert rd.ledger(model).steps == 4
            for key, one in rd.full_state_dict(model).items():
                far = float((one - wanted[key]).abs().max())
                assert far <= 1e-12 * (1 + float(wanted[key].abs().max())), key
            if name == "ddp":
                assert_clips(model, listed, share(batches()[0]))

    rd.run(be_rank, size, "threads")


def test_numbers_that_are_not_finite_are_named() -> None:
    start = Rows().double()

    def be_rank(comm: Any) -> None:
        model = copy.deepcopy(start)
        model, _ = rd.prepare(model, sgd(model), strategy="ddp", comm=comm)
        scale = torch.inf if comm.rank == 1 else 1.0
        with pytest.raises(NotFiniteError, match=r"embed.weight(.|\n)*rank 1"):
            (model(torch.tensor([2, 4])).mean() * scale).backward()

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("name", [*known_strategies()])
def test_others_refuse_them_by_name(name: str) -> None:
    starts: list[tuple[Any, Any, str]] = [(Rows, lazy, "embed.weight"), (Waves, sgd, "turn")]

    def be_rank(comm: Any) -> None:
        for kind, optimizers, parameter in starts:
            model = kind().double()
            if name == "ddp":
                rd.prepare(model, optimizers(model), strategy=name, comm=comm)
                continue
            with pytest.raises(InvalidArgumentError, match=f"{parameter} is (sparse|complex)"):
                rd.prepare(model, optimizers(model), strategy=name, comm=comm)
        model = nn.Linear(3, 2)
        model, (own,) = rd.prepare(model, sgd(model), strategy=name, comm=comm)
        taken = torch.gather(model.weight, 0, torch.zeros(1, 3, dtype=torch.int64),
                             sparse_grad=True)  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=r"gradient of weight is sparse"):
            taken.sum().backward()
        own.zero_grad()

    rd.run(be_rank, 1, "threads")


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "ps"])
def test_in_mixed_precision_sparse_gradients_are_dense(name: str) -> None:
    def be_rank(comm: Any) -> Any:
        model = copy.deepcopy(start)
        model, (own,) = rd.prepare(model, sgd(model), strategy=name, comm=comm, precision="bf16")
        for x in batches():
            model(x).square().mean().backward()
            own.step()
            own.zero_grad()
        return rd.full_state_dict(model)["embed.weight"]

    starts = {}
    for sparse in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            start = Rows()
        start.embed.sparse = start.bag.sparse = sparse
        starts[sparse] = rd.run(be_rank, 2, "threads")
    for found, wanted in zip(starts[True], starts[False], strict=True):
        assert torch.equal(found, wanted)
