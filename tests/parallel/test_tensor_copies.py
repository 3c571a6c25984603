"""A model with a plan is copied as any other, and never pickled: a rank has a part of it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import InvalidArgumentError

torch = pytest.importorskip("torch")

from roundelay.parallel.tensor._match import KINDS  # noqa: E402 - only with torch

nn = torch.nn


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.heads = 2, 4
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        q, k, v = self.up(self.norm(x)).chunk(3, -1)
        return self.drop(self.down(q * k * v))


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.end = nn.Embedding(9, 8), Block(), nn.Identity()

    def forward(self, tokens: Any) -> Any:
        return self.end(self.block(self.embed(tokens)))


WHOLE = {"embed": "replicate", "block.*": "replicate"}
PARTS = {**WHOLE, "block.up": "qkv:head_dim", "block.down": "row:head_dim"}
SEQUENCE = {
    "embed": "embedding", "block.norm": "norm", "block.drop": "dropout", "block.up": "qkv:head_dim",
    "block.down": "row:head_dim", "end": "gather",
}  # fmt: skip
#: A plan in which each word is what stands in the way, and whether the sequence is divided.
PLANS: dict[str, tuple[dict[str, str], bool]] = {
    "column": ({**WHOLE, "block.up": "column gather"}, False),
    "dropout": ({**WHOLE, "block.drop": "dropout"}, False),
    "embedding": ({**WHOLE, "embed": "embedding"}, False),
    "gather": (SEQUENCE, True),
    "norm": ({**PARTS, "block.norm": "norm sharded", "block": "region"}, False),
    "qkv": (PARTS, False),
    "region": ({**PARTS, "block": "region:heads", "block.norm": "norm sharded"}, False),
    "replicate": (WHOLE, False),
    "row": (PARTS, False),
    "split": ({**SEQUENCE, "embed": "replicate", "block": "split"}, True),
}


def pickled(value: Any) -> None:
    pickle.dumps(value)


def saved(value: Any) -> None:
    torch.save(value, io.BytesIO())


def divided(comm: rd.Communicator, word: str, *, prepared: bool) -> Any:
    torch.manual_seed(3)
    plan, sequence_parallel = PLANS[word]
    model = Model().eval()
    mesh = rd.Mesh(tp=comm.size, comm=comm)
    if not prepared:
        rd.apply_plan(model, plan, mesh, sequence_parallel=sequence_parallel)
        return model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return rd.prepare(model, optimizer, mesh=mesh, plan=plan, sequence_parallel=sequence_parallel)[
        0
    ]


def test_every_word_is_here() -> None:
    assert PLANS.keys() == KINDS.keys()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("how", [pickled, saved])
@pytest.mark.parametrize("word", PLANS)
def test_a_pickle_is_refused_with_the_way_out(word: str, how: Any, *, prepared: bool) -> None:
    def body(comm: rd.Communicator) -> str:
        model = divided(comm, word, prepared=prepared)
        with pytest.raises(InvalidArgumentError) as caught:
            how({"model": model})
        return str(caught.value)

    for rank, told in enumerate(rd.run(body, 2, "threads")):
        assert f"rank {rank} of 2" in told
        assert "rd.full_state_dict(model)" in told
        assert "rd.save" in told


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("word", PLANS)
def test_a_copy_computes_alike_and_is_apart(word: str, *, prepared: bool) -> None:
    tokens = torch.arange(8).view(2, 4)

    def body(comm: rd.Communicator) -> None:
        model = divided(comm, word, prepared=prepared)
        twin = copy.deepcopy(model)
        assert type(twin.block.up) is type(model.block.up)
        assert torch.equal(twin(tokens), model(tokens))
        expected = model(tokens)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(model(tokens), expected)
        assert not torch.equal(twin(tokens), expected)

    rd.run(body, 2, "threads")


def test_a_copy_of_a_layer_is_of_that_layer_alone() -> None:
    def body(comm: rd.Communicator) -> None:
        model = divided(comm, "region", prepared=False)
        memo: dict[int, Any] = {}
        copy.deepcopy(model.block.up, memo)
        assert id(model.block.up) in memo
        assert id(model) not in memo
        assert id(model.embed) not in memo

    rd.run(body, 2, "threads")
