"""A plan is right or refused: whatever words it has, no gradient is silently another."""

from __future__ import annotations

import copy
from itertools import product
from random import Random
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import InvalidArgumentError

torch = pytest.importorskip("torch")

from roundelay.parallel.sharding import sharding_of  # noqa: E402 - only with torch

nn = torch.nn
TOKENS, WIDTH = 4, 6


class Inner(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, *, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.PReLU()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        y = self.down(self.act(self.up(self.norm(x))))
        return x + y if self.residual else y


class Model(nn.Module):  # type: ignore[misc, name-defined]
    """A residual inside of the inner module, or around it."""

    def __init__(self, *, residual: bool) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), Inner(residual=residual)
        self.end = nn.Identity()

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        y = self.inner(x)
        return self.end(y if self.inner.residual else x + y)


def starts() -> dict[bool, Any]:
    torch.manual_seed(4)
    return {one: Model(residual=one).double() for one in (False, True)}


START = starts()
X = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
#: Words for each module; a plan says one of them, or nothing, of each.
WORDS: dict[str, list[str]] = {
    "first": ["replicate", "column gather", "column whole gather"],
    "inner": ["", "region", "split"],
    "inner.norm": ["norm", "norm sharded", "norm gather", "replicate"],
    "inner.up": ["column", "column gather", "column whole", "replicate"],
    "inner.act": ["replicate", "norm", "norm sharded"],
    "inner.down": ["row", "row whole", "column gather", "replicate"],
    "end": ["", "gather", "split"],
}
EVERY = [dict(zip(WORDS, words, strict=True)) for words in product(*WORDS.values())]
PLANS = Random(5).sample(EVERY, len(EVERY) // 4)


def gradients(model: Any) -> tuple[Any, dict[str, Any]]:
    """Return output and gradients, whole, of a loss that tells tokens and features apart."""
    out = model(X)
    weight = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
    (out * weight).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        cut = sharding_of(parameter)
        found[name] = parameter.grad if cut is None else cut.whole(parameter.grad)
    return out.detach(), found


def verdict(comm: rd.Communicator, plan: dict[str, str], how: tuple[bool, bool]) -> str:
    """Say what comes of a plan: 'refused', 'right', or what is wrong."""
    residual, sequence_parallel = how
    model = copy.deepcopy(START[residual])
    words = {name: word for name, word in plan.items() if word}
    try:
        mesh = rd.Mesh(tp=comm.size, comm=comm)
        rd.apply_plan(model, words, mesh, sequence_parallel=sequence_parallel)
        out, grads = gradients(model)
    except InvalidArgumentError:
        return "refused"
    except RuntimeError as error:
        if "must match the size" in str(error):  # torch's own: the model adds other lengths
            return "refused"
        raise
    wanted, expected = gradients(copy.deepcopy(START[residual]))
    if out.shape != wanted.shape or not torch.allclose(out, wanted, rtol=1e-10):
        return "another output"
    wrong = [name for name in grads if not torch.allclose(grads[name], expected[name], rtol=1e-10)]
    return f"other gradients of {', '.join(wrong)}" if wrong else "right"


@pytest.mark.parametrize("how", [*product([False, True], repeat=2)])
@pytest.mark.parametrize("part", range(16))
def test_every_plan_is_right_or_refused(part: int, how: tuple[bool, bool]) -> None:
    """Also where a rank is never told: outputs and gradients are one device's, or nothing is."""
    mine = PLANS[part::16]

    def body(comm: rd.Communicator) -> list[str]:
        return [verdict(comm, plan, how) for plan in mine]

    for rank, verdicts in enumerate(rd.run(body, 2, "threads")):
        for plan, said in zip(mine, verdicts, strict=True):
            assert said in ("right", "refused"), (rank, plan, said)


def between(layer: str) -> dict[str, str]:
    """Return a plan that is right, for a residual around the inner module."""
    right = {"first": "replicate", "inner.norm": "replicate", "inner.up": "column",
             "inner.act": "norm sharded", "inner.down": "row"}  # fmt: skip
    return right | ({layer.partition("=")[0]: layer.partition("=")[2]} if layer else {})


#: What differs from a plan that is right, whether the residual is inside, and words of the refusal.
SAID: dict[str, tuple[str, bool, list[str]]] = {
    "residual in a region": ("inner=region", True, ["inner.norm", "'norm sharded'"]),
    "whole parameter on features": ("inner.act=replicate", False,
                                    ["The parameter inner.act.weight", "inner.up.", "'norm sh"]),
    "summed for nothing": ("inner.norm=norm sharded", False,
                           ["gradients of inner.norm summed", "first.", "'replicate'"]),
}  # fmt: skip


def refusal(comm: rd.Communicator, plan: dict[str, str], how: tuple[bool, bool]) -> str:
    residual, sequence_parallel = how
    model = copy.deepcopy(START[residual])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = rd.Mesh(tp=comm.size, comm=comm)
    with pytest.raises(InvalidArgumentError) as caught:
        rd.prepare(model, optimizer, mesh=mesh, plan=plan, sequence_parallel=sequence_parallel)[0](
            X
        )
    return str(caught.value)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SAID)
def test_what_is_wrong_is_named_on_all_ranks(name: str, size: int) -> None:
    change, residual, words = SAID[name]
    for told in rd.run(lambda comm: refusal(comm, between(change), (residual, False)), size,
                       "threads"):  # fmt: skip
        assert all(word in told for word in words), told


def test_a_residual_in_a_region_is_named() -> None:
    plan = between("inner=region") | {"inner.norm": "norm sharded"}
    for told in rd.run(lambda comm: refusal(comm, plan, (True, False)), 2, "threads"):
        assert "What inner brings in" in told
        assert "A residual stays outside of a 'region'" in told


@pytest.mark.parametrize(("more", "words"), [
    ({}, ["output of the model is this rank's share", "by inner", "Say 'gather'"]),
    ({"end": "split"}, ["end divides the sequence", "divided already: 2 tokens", "'split' once"]),
    ({"first": "norm", "": "split", "end": "gather"}, ["inner divides", "divided already"]),
])  # fmt: skip
def test_what_is_wrong_with_tokens_is_named(more: dict[str, str], words: list[str]) -> None:
    plan = between("") | {"inner": "split", "inner.norm": "norm"} | more
    for told in rd.run(lambda comm: refusal(comm, plan, (True, True)), 2, "threads"):
        assert all(word in told for word in words), told


def test_shorter_sequences_are_no_shards() -> None:
    """A layer before the split sees any length: also half of one that was divided before."""

    def body(comm: rd.Communicator) -> list[tuple[int, ...]]:
        model = copy.deepcopy(START[True])
        plan = between("") | {"inner": "split", "inner.norm": "norm", "end": "gather"}
        mesh = rd.Mesh(tp=comm.size, comm=comm)
        rd.apply_plan(model, plan, mesh, sequence_parallel=True)
        with torch.no_grad():  # nobody has seen the graph yet
            return [tuple(model(X[:, :length]).shape) for length in (4, 2, 4)]

    assert rd.run(body, 2, "threads") == [[(2, n, WIDTH) for n in (4, 2, 4)]] * 2
