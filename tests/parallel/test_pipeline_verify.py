"""`rd.verify` says yes to pipelines, and names what first leaves one device."""

from __future__ import annotations

import re
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from tests.parallel.mesh_models import (  # noqa: E402 - only with torch
    adam,
    divide,
    in_stages,
    loss_of,
    make_data,
    make_net,
)
from tests.parallel.test_pipeline import Words, built, words_batch, words_loss  # noqa: E402

from roundelay.errors import InvalidArgumentError  # noqa: E402 - only with torch

MESHES = [({"pp": 2, "dp": 2}, "zero1"), ({"dp": 2, "pp": 2, "tp": 2}, "ddp"), ({"pp": 4}, "zero3"),
          ({"pp": 1}, "ddp"), ({"pp": 1, "dp": 2}, "zero2"), ({"tp": 2, "pp": 1}, "ps"),
          ({"cp": 2, "pp": 1}, "zero3")]  # fmt: skip


def loss(model: Any, x: Any, target: Any) -> Any:
    return words_loss(model(x), target)


def words(change: Any = None, *, stages: int = 2, **options: Any) -> Any:
    """Verify a pipeline of words; `change` is done to it on every rank."""

    def cut(model: Any, mesh: Any) -> Any:
        pipe = rd.Pipeline(model, comm=mesh["pp"], loss=words_loss, micro_batches=4,
                           stages=["blocks.4"][: stages - 1], **options)  # fmt: skip
        if change is not None:
            change(pipe)
        return pipe

    return rd.verify(lambda: built(Words), adam, [words_batch(16)] * 2, loss=loss, clip=0.1,
                     mesh={"dp": 2, "pp": stages}, divide=cut)  # fmt: skip


@pytest.mark.parametrize(("axes", "strategy"), MESHES)
def test_yes_to_pipelines_on_meshes(axes: Any, strategy: str) -> None:
    def cut(model: Any, mesh: Any) -> Any:
        return in_stages(divide(model, mesh), mesh)

    verdict = rd.verify(make_net, adam, make_data(2), loss=loss_of, strategy=strategy, clip=0.1,
                        mesh=axes, divide=cut)  # fmt: skip
    assert verdict.same, str(verdict)


def wrong_output(pipe: Any) -> None:
    names = dict(pipe.named_modules())
    if "blocks.6.up" not in names:
        return
    module = names["blocks.6.up"]
    module.register_forward_hook(lambda _, __, out: out * (1 + 1e-6 * (pipe.micro_batch == 2)))


def wrong_gradient(pipe: Any) -> None:
    if hasattr(pipe, "tokens"):
        pipe.get_parameter("blocks.1.up.bias").register_hook(lambda grad: grad * 1.001)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_first_that_differs_is_named(schedule: str, stages: int) -> None:
    assert words(schedule=schedule, stages=stages).same
    first = words(wrong_output, schedule=schedule, stages=stages).first
    assert (first.kind, first.parameter, first.step) == ("activation", "blocks.6.up", 0)
    first = words(wrong_gradient, schedule=schedule, stages=stages).first
    assert (first.kind, first.parameter, first.step) == ("gradient", "blocks.1.up.bias", 0)


@pytest.mark.parametrize("stages", [1, 2])
def test_rows_that_do_not_divide_are_refused(stages: int) -> None:
    def cut(model: Any, mesh: Any) -> Any:
        return rd.Pipeline(model, comm=mesh["pp"], loss=words_loss, micro_batches=1)

    with pytest.raises(InvalidArgumentError, match=re.escape("15 do not divide by that")):
        rd.verify(lambda: built(Words), adam, [words_batch(15)], loss=loss,
                  mesh={"dp": 2, "pp": stages}, divide=cut)  # fmt: skip
