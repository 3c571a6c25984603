"""The loss of logits that are cut is torch's of the whole, for every option and cut."""

from __future__ import annotations

from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch, InvalidArgumentError

torch = pytest.importorskip("torch")

from roundelay.parallel.functions import counts_of  # noqa: E402 - only with torch
from roundelay.parallel.tensor import cross_entropy as module  # noqa: E402

nn = torch.nn
SIZES = (1, 2, 3, 4, 8)
VOCABULARY = 21
cross_entropy: Any = module.cross_entropy  # torch's backward is not typed


def drawn(*shape: int, dtype: Any = torch.float64, scale: float = 3.0) -> Any:
    generator = torch.Generator().manual_seed(4)
    x = scale * torch.randn(*shape, VOCABULARY, dtype=torch.float64, generator=generator)
    targets = torch.randint(VOCABULARY, shape, generator=generator)
    targets.view(-1)[::3] = -100
    return x.to(dtype), targets


def part(x: Any, comm: rd.Communicator, counts: list[int] | None = None) -> Any:
    counts = counts or counts_of(VOCABULARY, comm.size)
    return x.split(counts, -1)[comm.rank].clone().requires_grad_()


def theirs(x: Any, targets: Any, **options: Any) -> Any:
    """torch's, which has the vocabulary as the second dim."""
    loss = nn.functional.cross_entropy(x.flatten(0, -2), targets.flatten(), **options)
    return loss.view(targets.shape) if options.get("reduction") == "none" else loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_as_torch(size: int, shape: tuple[int, ...], reduction: str, smoothing: float) -> None:
    x, targets = drawn(*shape)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    whole = x.clone().requires_grad_()
    wanted = theirs(whole, targets, **options)
    weight = torch.linspace(1, 2, wanted.numel(), dtype=torch.float64).view(wanted.shape)
    (wanted * weight).sum().backward()

    def body(comm: rd.Communicator) -> None:
        for told in (None, VOCABULARY):
            mine = part(x, comm)
            loss = cross_entropy(mine, targets, comm, vocabulary=told, **options)
            torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
            (loss * weight).sum().backward()
            torch.testing.assert_close(mine.grad, part(whole.grad, comm), rtol=1e-12, atol=1e-14)

    rd.run(body, size, "threads")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype(dtype: str) -> None:
    kind = getattr(torch, dtype)
    x, targets = drawn(12, dtype=kind)
    whole = x.float().clone().requires_grad_()
    wanted = theirs(whole, targets)
    wanted.backward()

    def body(comm: rd.Communicator) -> None:
        mine = part(x, comm)
        loss = cross_entropy(mine, targets, comm)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
        loss.backward()
        assert mine.grad.dtype == kind
        torch.testing.assert_close(mine.grad.float(), part(whole.grad, comm), rtol=1e-2, atol=1e-4)

    rd.run(body, 3, "threads")


def test_a_cut_of_ones_own_and_large_logits_and_another_ignored() -> None:
    x, targets = drawn(12, scale=300.0)
    targets[targets == -100] = 5
    x[:, 3] = -torch.inf
    targets[targets == 3] = 4
    whole = x.clone().requires_grad_()
    wanted = theirs(whole, targets, ignore_index=5)
    wanted.backward()

    def body(comm: rd.Communicator) -> None:
        counts = [1, 18, 2]
        mine = part(x, comm, counts)
        loss = cross_entropy(mine, targets, comm, ignore_index=5)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        loss.backward()
        torch.testing.assert_close(mine.grad, part(whole.grad, comm, counts), rtol=1e-12, atol=0)

    rd.run(body, 3, "threads")


def test_nothing_to_learn_from() -> None:
    x, targets = drawn(4)
    targets.fill_(-100)

    def body(comm: rd.Communicator) -> None:
        assert cross_entropy(part(x, comm), targets, comm).isnan()
        assert cross_entropy(part(x, comm), targets, comm, reduction="sum") == 0
        mine = part(x, comm)
        cross_entropy(mine, targets, comm, reduction="sum").backward()
        assert not mine.grad.any()

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_row_and_a_rank_without_logits(smoothing: float) -> None:
    x, targets = drawn(3)
    for logits, target in ((x, targets), (x[1], targets[1])):
        whole = logits.clone().requires_grad_()
        wanted = nn.functional.cross_entropy(whole, target, label_smoothing=smoothing)
        wanted.backward()

        def body(comm: rd.Communicator) -> None:
            counts = [0, VOCABULARY - 3, 3]
            mine = part(logits, comm, counts)  # noqa: B023 - called at once
            loss = cross_entropy(mine, target, comm, label_smoothing=smoothing)  # noqa: B023
            loss.backward()
            torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)  # noqa: B023
            expected = part(whole.grad, comm, counts)  # noqa: B023
            torch.testing.assert_close(mine.grad, expected, rtol=1e-12, atol=1e-14)

        rd.run(body, 3, "threads")


#: What one rank gives otherwise than the others.
APART: dict[str, dict[str, Any]] = {
    "targets": {},
    "reduction": {"reduction": "sum"},
    "ignore_index": {"ignore_index": 1},
    "label_smoothing": {"label_smoothing": 0.6},
    "refused": {"reduction": "max"},
    "vocabulary": {"vocabulary": VOCABULARY + 9},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", APART)
def test_ranks_that_ask_for_different_losses_are_told(name: str, size: int) -> None:
    x, targets = drawn(8)
    targets.clamp_(0)

    def body(comm: rd.Communicator) -> None:
        odd = comm.rank == size - 1
        options = {"label_smoothing": 0.1, "vocabulary": VOCABULARY} | (APART[name] if odd else {})
        mine = targets.roll(1) if odd and name == "targets" else targets
        refused = odd and name in ("refused", "vocabulary")
        with pytest.raises(InvalidArgumentError if refused else CollectiveMismatch) as caught:
            cross_entropy(part(x, comm), mine, comm, **options)
        assert "cross_entropy" in str(caught.value) or refused

    rd.run(body, size, "threads")


def test_it_sends_two_numbers_for_a_token() -> None:
    tokens = 4096
    x, targets = drawn(tokens)

    def body(comm: rd.Communicator) -> int:
        mine = part(x, comm)
        before = comm.traffic()
        cross_entropy(mine, targets, comm, vocabulary=VOCABULARY).backward()
        after = comm.traffic()
        assert before is not None
        assert after is not None
        return after[comm.rank].sent - before[comm.rank].sent

    assert rd.run(body, 3, "threads") == [2 * 2 * tokens * 8] * 3


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "target": ((2, 7), torch.tensor([3, 21]), {}, "target 21 is outside"),
    "negative": ((2, 7), torch.tensor([3, -1]), {}, "target -1 is outside"),
    "shape": ((2, 7), torch.tensor([3]), {}, "a target for each row"),
    "probabilities": ((2, 7), torch.rand(2, 7), {}, "token numbers"),
    "reduction": ((2, 7), torch.tensor([3, 1]), {"reduction": "max"}, "mean, sum, none"),
    "smoothing": ((2, 7), torch.tensor([3, 1]), {"label_smoothing": 2}, "from 0 to 1"),
    "vocabulary": ((2, 7), torch.tensor([3, 1]), {"vocabulary": 30}, "has 10 logits, not 7"),
    "words": ((2, 7), torch.tensor([3, 1]), {"label_smoothing": "a"}, "is a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused(name: str) -> None:
    shape, targets, options, words = REFUSED[name]

    def body(comm: rd.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match=words):
            cross_entropy(torch.zeros(shape), targets, comm, **options)

    rd.run(body, 3, "threads")


def test_a_second_derivative_is_refused() -> None:
    x, targets = drawn(4)

    def body(comm: rd.Communicator) -> None:
        mine = part(x, comm)
        loss = cross_entropy(mine, targets, comm)
        with pytest.raises(InvalidArgumentError, match="second derivative"):
            torch.autograd.grad(loss, mine, create_graph=True)

    rd.run(body, 2, "threads")


def test_logits_that_are_whole_are_refused() -> None:
    """Their vocabulary would count once for each rank."""

    def body(comm: rd.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match="all 2 ranks have the same 21"):
            cross_entropy(*drawn(12), comm)
        zero = torch.zeros(12, VOCABULARY)  # as a head that is zero in the beginning gives
        assert cross_entropy(zero, drawn(12)[1], comm).isfinite()

    rd.run(body, 2, "threads")
