"""What a plan says: formulas give their numbers, reasons are sentences, refusals say the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundelay.errors import InvalidArgumentError, NetworkError, UnknownNameError
from roundelay.networks import cluster_called, load_cluster
from roundelay.planning import (
    STRATEGIES,
    MeshShape,
    PlanChoices,
    Task,
    TrainingPlan,
    advice,
    as_document,
    plan,
    reason,
    scaling,
    transformer,
    why,
)

H100 = cluster_called("h100-ib")
SEVEN = transformer(params=7_500_000_000, layers=32, hidden=4096)


def planned(wanted: PlanChoices | None = None, **options: int) -> TrainingPlan:
    given: dict[str, Any] = {
        "gpus": 64,
        "memory": 80 * 10**9,
        "batch": 2048,
        "sequence": 4096,
        **options,
    }
    return plan(Task(SEVEN, H100, **given), wanted)


MESHES = [MeshShape(dp=64), MeshShape(16, 4), MeshShape(16, 2, 2), MeshShape(4, 2, 2, 4)]


@pytest.mark.parametrize("strategy", [*STRATEGIES, "ps", "ps-async"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_formula_gives_its_number(mesh: MeshShape, recompute: str, strategy: str) -> None:
    if strategy.startswith("ps") and mesh.size > mesh.data:
        return
    axes = {name: getattr(mesh, name) for name in ("dp", "tp", "cp", "pp")}
    found = planned(PlanChoices(strategies=(strategy,), recompute=(recompute,), **axes))
    one = found.nearest
    terms = why(found.task, one)
    for term in terms:
        # Only digits and signs, and max: what a reader would type into a calculator.
        assert not set(term.numbers) - set("0123456789.e+-·/(), max")
        value = eval(term.numbers.replace("·", "*"), {"__builtins__": {}, "max": max})
        assert value == pytest.approx(term.value, rel=2e-5, abs=1e-12), term
    named = {term.what: term.value for term in terms}
    assert named["total"] == one.bytes.total
    assert named["step"] == one.time.total
    assert named["activations"] == one.bytes.activations


def test_the_document_is_the_plan() -> None:
    found = planned()
    document = json.loads(json.dumps(as_document(found, list(found.options), reasons=True)))
    assert document["best"]["bytes"]["total"] == found.best.bytes.total  # type: ignore[union-attr]
    assert document["reason"] == reason(found)
    assert document["looked_at"] == len(document["options"]) == len(found.options)
    for one in document["options"]:
        parts = [one["bytes"][name] for name in
                 ("parameters", "gradients", "optimizer", "activations", "transient")]  # fmt: skip
        assert one["bytes"]["total"] == sum(parts)
        assert one["fits"] is (one["bytes"]["total"] <= document["memory"])
        times = {key: value for key, value in one["seconds"].items() if key != "hidden"}
        total = times.pop("total")
        assert total == pytest.approx(sum(times.values()))


def test_the_reason_names_what_is_gained() -> None:
    said = reason(planned(PlanChoices(tp=1, cp=1, pp=1), gpus=8, batch=8))
    assert said.startswith("zero")
    assert "ddp would need" in said
    assert said.endswith(".")
    one = reason(planned(PlanChoices(strategies=("zero2",), tp=1, cp=1, pp=1), batch=64))
    assert "zero3 would send 50 % more" in one


def test_nothing_fits_says_what_would() -> None:
    wanted = PlanChoices(recompute=("none",))
    found = planned(wanted, gpus=1, batch=8)
    assert found.best is None
    assert reason(found) == ""
    said = advice(found, wanted)
    for words in ("Nothing fits in 80 GB", "too much", "on the host", "GPUs, ", "GPUs of "):
        assert words in said
    # What it names does fit.
    assert planned(wanted, gpus=4, batch=32).best is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"params": 7_500_000_000, "layers": 4, "hidden": 512}, "do not go with 4 layers"),
        ({"params": 1_000_000, "layers": 32, "hidden": 4096}, "do not go with 32 layers"),
        ({"layers": 4}, "params=, or by its layers= and hidden="),
    ],
)
def test_a_model_that_can_not_be(options: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        transformer(**options)


@pytest.mark.parametrize("params", [125_000_000, 1_300_000_000, 7_500_000_000, 70_553_706_496])
@pytest.mark.parametrize("vocabulary", [None, 32_000, 128_256])
def test_models_have_as_many_parameters_as_were_asked_for(
    params: int, vocabulary: int | None
) -> None:
    if params == 125_000_000 and vocabulary == 128_256:
        return  # that table alone would be larger
    assert transformer(params=params, vocabulary=vocabulary).params == params


def test_no_mesh_says_what_must_divide() -> None:
    with pytest.raises(InvalidArgumentError, match="No mesh of 13 ranks with tp=4"):
        planned(PlanChoices(tp=4), gpus=13)
    with pytest.raises(InvalidArgumentError, match="micro-batches of 3"):
        planned(PlanChoices(micro_batches=(3,)))


def test_a_precision_that_the_cluster_lacks() -> None:
    with pytest.raises(InvalidArgumentError, match=r"v100-ib does not say .* in bf16"):
        plan(Task(SEVEN, cluster_called("v100-ib"), 64, 32 * 10**9, 2048, 2048))


def test_scaling_never_beats_the_processors() -> None:
    found = planned()
    curves = scaling(found.task, PlanChoices())
    alone = dict(curves.pop("compute alone"))
    assert set(curves) == set(STRATEGIES)
    assert any(curves.values())
    for line in curves.values():
        for gpus, speed in line:
            assert 0 < speed <= alone[gpus] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bandwidth": 0}, "bandwidth"),
        ({"per_host": 0}, "per_host"),
        ({"source": " "}, "where the figures are from"),
        ({"flops": {"bf16": -1}}, "bf16"),
        ({"flops": {"int3": 1}}, "int3"),
        ({"colour": 1}, "colour"),
        ({"roundelay_cluster": 2}, "roundelay_cluster"),
    ],
)
def test_a_bad_file_says_where(tmp_path: Path, change: dict[str, object], words: str) -> None:
    good = {"roundelay_cluster": 1, "name": "mine", "source": "measured", "per_host": 4,
            "latency": 1e-6, "bandwidth": 1e9, "nic_latency": 1e-5, "nic_bandwidth": 1e9,
            "reduce_bandwidth": 1e9}  # fmt: skip
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(good), encoding="utf-8")
    assert load_cluster(file).name == "mine"
    assert cluster_called("mine", tmp_path) == load_cluster(file)
    file.write_text(json.dumps({**good, **change}), encoding="utf-8")
    with pytest.raises(NetworkError, match=words):
        load_cluster(file)


def test_an_unknown_cluster_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="h100-ib"):
        cluster_called("h100ib")
