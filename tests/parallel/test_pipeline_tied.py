"""Copies of a parameter that stages share stay equal, or all ranks are told that they do not."""

from __future__ import annotations

from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from tests.parallel.mesh_models import STRATEGIES  # noqa: E402 - only with torch
from tests.parallel.test_pipeline import Words, built, words_batch  # noqa: E402
from tests.parallel.test_pipeline_data_parallel import prepared, train  # noqa: E402

from roundelay.errors import CollectiveMismatch  # noqa: E402 - likewise

AXES: list[dict[str, int]] = [{"pp": 2}, {"pp": 3}, {"dp": 2, "pp": 2}]


def spoil(kind: str, mesh: Any, pipe: Any, optimizer: Any) -> None:
    """Do on all ranks of the last stage what the others do not."""
    if mesh.place["pp"] != mesh.size("pp") - 1:
        return
    if kind == "rate":
        optimizer.param_groups[0]["lr"] = 0.5
    if kind == "write":
        with torch.no_grad():
            dict(pipe.named_parameters())["head.weight"].mul_(1.5)


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("kind", ["nothing", "rate", "write"])
def test_copies_that_differ_are_told_on_every_rank(kind: str, axes: dict[str, int]) -> None:
    model, batch = built(Words), words_batch(24)

    def one(comm: Any, strategy: str, end: str) -> str:
        mesh, pipe, optimizer = prepared(comm, model, axes, strategy=strategy, micro_batches=2)
        train(mesh, pipe, optimizer, batch)
        if kind == "rate":  # of one step alone, so that it shows in the copies
            rows = [part.tensor_split(mesh.size("dp"))[mesh.place.get("dp", 0)] for part in batch]
            optimizer.zero_grad()
            pipe.step(*rows)
            rate = optimizer.param_groups[0]["lr"]
            spoil(kind, mesh, pipe, optimizer)
            optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
        else:
            spoil(kind, mesh, pipe, optimizer)
        try:
            train(mesh, pipe, optimizer, batch) if end == "step" else rd.full_state_dict(pipe)
        except CollectiveMismatch as error:
            return str(error)
        return "nothing"

    def body(comm: Any) -> dict[tuple[str, str], str]:
        grid = [(strategy, end) for strategy in STRATEGIES for end in ("step", "state")]
        return {(strategy, end): one(comm, strategy, end) for strategy, end in grid}

    words = "nothing" if kind == "nothing" else "is shared by stages of this pipeline"
    ranks = int(torch.tensor([*axes.values()]).prod())
    for found in rd.run(body, ranks, "threads"):
        assert all(words in told for told in found.values()), found
