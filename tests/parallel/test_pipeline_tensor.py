"""A plan divides the layers of a pipeline, by the whole model's names, whoever has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from tests.parallel.mesh_models import ranks_of, shown  # noqa: E402 - only with torch
from tests.parallel.test_pipeline import (  # noqa: E402 - likewise
    EXACT,
    Block,
    _building,
    built,
    words_loss,
)
from tests.parallel.test_pipeline_data_parallel import adam, alone, train  # noqa: E402

from roundelay.errors import (  # noqa: E402 - with torch
    CollectiveMismatch,
    InvalidArgumentError,
    RankFailed,
)

nn = torch.nn
PLAN = {"tokens": "embedding", "blocks.*": "replicate", "blocks.*.norm": "norm",
        "blocks.*.up": "column", "blocks.*.down": "row", "norm": "norm",
        "head": "column gather"}  # fmt: skip


class Text(nn.Module):  # type: ignore[misc, name-defined]
    """As `Words`, of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def batch() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, 12, (8, 4), generator=generator) for _ in "xy")


def pipeline(comm: Any, axes: dict[str, int], model: Any, plan: Any, **options: Any) -> Any:
    mesh = rd.Mesh(comm=comm, **axes)
    with _building:
        mine = copy.deepcopy(model)
    pipe = rd.Pipeline(mine, comm=mesh["pp"], loss=words_loss, micro_batches=4,
                       schedule=options.pop("schedule", "1f1b"))  # fmt: skip
    return mesh, *rd.prepare(pipe, adam(pipe.parameters()), mesh=mesh, plan=plan, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize(
    ("axes", "strategy"),
    [({"pp": 2, "tp": 2}, "ddp"), ({"dp": 2, "pp": 2, "tp": 2}, "zero2"),
     ({"tp": 2, "pp": 4}, "zero3")], ids=lambda it: it if isinstance(it, str) else shown(it),
)  # fmt: skip
def test_a_plan_for_the_whole_model(
    axes: dict[str, int], strategy: str, schedule: str, *, sequence: bool
) -> None:
    model = built(Text)
    losses, norms, whole, _ = alone(model, batch())

    def body(comm: Any) -> Any:
        mesh, pipe, optimizer = pipeline(comm, axes, model, PLAN, strategy=strategy,
                                         sequence_parallel=sequence, schedule=schedule)  # fmt: skip
        found = train(mesh, pipe, optimizer, batch())
        return *found, rd.full_state_dict(pipe)

    for mine, clipped, state in rd.run(body, ranks_of(axes), "threads"):
        assert mine == pytest.approx(losses, rel=EXACT)
        assert clipped == pytest.approx(norms, rel=EXACT)
        for name, value in whole.state_dict().items():
            assert float((state[name] - value).abs().max()) <= EXACT, name


@pytest.mark.parametrize(
    ("change", "said"),
    [({"blocks.9": "replicate"}, "Patterns that match no module: blocks.9"),
     ({"head": "replicate"}, "tokens.weight and head.weight are one parameter in two stages")],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_on_all_ranks(change: Any, said: str) -> None:
    model = built(Text)

    def body(comm: Any) -> str:
        with pytest.raises((InvalidArgumentError, CollectiveMismatch)) as caught:
            pipeline(comm, {"pp": 2, "tp": 2}, model, {**PLAN, **change})
        return str(caught.value)

    assert all(said in told for told in rd.run(body, 4, "threads"))


@pytest.mark.parametrize(("more", "sequence", "words"), [
    ({"blocks.*": "region", "blocks.*.norm": "norm sharded"}, False, "goes around them"),
    ({"head": "replicate", "tokens": "replicate"}, True, "needs a place"),
    ({"head": "column gather", "norm": "replicate"}, True, "norm.weight, which"),
])  # fmt: skip
def test_a_plan_with_wrong_gradients_is_refused(
    more: dict[str, str], words: str, *, sequence: bool
) -> None:
    """As without a pipeline: the stage where it is wrong tells, and all hear of it."""
    model = built(Text)

    def body(comm: Any) -> str:
        with pytest.raises((InvalidArgumentError, CollectiveMismatch, RankFailed)) as caught:
            _, pipe, _ = pipeline(
                comm, {"pp": 2, "tp": 2}, model, PLAN | more, sequence_parallel=sequence
            )
            pipe.step(*batch())
        return str(caught.value)

    for told in rd.run(body, 4, "threads"):
        assert words in told
