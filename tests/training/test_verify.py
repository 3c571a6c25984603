"""`rd.verify` says yes to what is the same, and names what is not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.cli._group import roundelay  # noqa: E402
from roundelay.errors import InvalidArgumentError  # noqa: E402
from roundelay.training.prepare import known_strategies  # noqa: E402
from roundelay.training.strategies.ddp import Ddp  # noqa: E402

STRATEGIES = known_strategies()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name, one in STRATEGIES.items() if one.synchronous])
def test_every_synchronous_strategy_is_the_same(awkward: Any, name: str, size: int) -> None:
    found = rd.verify(awkward.model, awkward.adam, awkward.batches(4), loss=awkward.loss,
                      strategy=name, ranks=size, clip=0.05)  # fmt: skip
    assert found.same, str(found)
    assert "the same as one device" in str(found)


@dataclass(frozen=True, slots=True)
class Forgetful(Ddp):
    """Averages nothing from the third step on."""

    names: ClassVar[dict[str, Any]] = {}

    def share(self, setup: Any) -> Any:
        made: Any = super(Forgetful, self).share(setup)
        send, calls = made._send, [None]

        def forget() -> None:
            calls.append(None)
            if len(calls) <= 3:
                send()
                return
            made._spans.append(None)
            made._waits.append(lambda: None)
            made._next += 1

        made._send = forget
        return made


def test_the_first_step_and_parameter_that_differ_are_named(awkward: Any) -> None:
    found = rd.verify(awkward.model, awkward.adam, awkward.batches(5), loss=awkward.loss,
                      strategy=Forgetful(), ranks=2)  # fmt: skip
    assert not found.same
    assert found.first is not None
    assert found.first.step == 2
    assert found.first.parameter in awkward.model().state_dict()
    assert "NOT the same" in str(found)
    assert f"step 2, rank {found.first.rank}: {found.first.parameter}" in str(found)


@pytest.mark.parametrize("name", [name for name, one in STRATEGIES.items() if not one.synchronous])
def test_what_depends_on_timing_is_refused(awkward: Any, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not synchronous"):
        rd.verify(awkward.model, awkward.adam, awkward.batches(1), loss=awkward.loss, strategy=name)


JOB = """
import torch

def job():
    x = torch.arange(21.0, dtype=torch.float64).reshape(7, 3) / 7
    return {
        "make_model": lambda: torch.nn.Linear(3, 2).double(),
        "make_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "batches": [(x,)] * 3,
        "loss": lambda model, x: model(x).square().mean(),
    }

def wrong():
    return 3
"""


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOB)
    done = CliRunner().invoke(roundelay, ["verify", f"{script}:job", "-n", "3", "--json"])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.output)
    assert (found["same"], found["ranks"], found["steps"], found["first"]) == (True, 3, 3, None)
    coarse = ["verify", f"{script}:job", "--precision", "bf16", "--tolerance", "1e-9"]
    done = CliRunner().invoke(roundelay, coarse)
    assert done.exit_code == 1
    assert "NOT the same as one device" in " ".join(done.output.split())
    for place in ("nowhere.py:job", f"{script}", f"{script}:nothing", f"{script}:wrong"):
        assert CliRunner().invoke(roundelay, ["verify", place]).exit_code == 2, place


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}
WAYS: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1}, "four": {"ranks": 4, "strategy": "zero2"},
    "mesh": {"mesh": {"dp": 2, "tp": 2}, "plan": {"0": "column", "2": "row", "4": "replicate"}},
}  # fmt: skip


def halves(precision: str, kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 16), torch.nn.GELU()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(4)]
    return rd.verify(
        lambda: model, OPTIMIZERS[kind], batches, precision=precision, clip=1.0,
        loss=lambda model, x, y: (model(x) - y).square().mean(), **options,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_sixteen_bits_are_compared_with_sixteen_bits(way: str, kind: str, precision: str) -> None:
    found = halves(precision, kind, **WAYS[way])
    assert found.same, str(found)
    assert found.largest.relative == 0 if way == "one" else found.largest.relative < 0.03


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_wrong_training_in_sixteen_bits_is_told(kind: str, precision: str) -> None:
    def wrong(model: Any, mesh: Any) -> None:
        if mesh.place["dp"] == 1:
            model[2].register_forward_hook(lambda _, __, out: out * 4)

    found = halves(precision, kind, mesh={"dp": 2}, divide=wrong)
    assert not found.same
    assert "of its norm" in str(found.first)


@pytest.mark.parametrize("divide", [None, lambda *_: None])
def test_stages_that_nobody_cuts_are_refused(divide: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="nothing cuts the model into stages"):
        halves("fp32", "sgd", mesh={"dp": 2, "pp": 2}, divide=divide)


class Attention(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Whose result does not depend on the bias of its keys: that has no gradient but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Any) -> Any:
        made = [layer(x).unflatten(-1, (-1, 4)) for layer in (self.q, self.k, self.v)]
        q, k, v = (one.transpose(1, 2) for one in made)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mesh", [None, {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_that_adam_makes_large_is_no_difference(dtype: Any, mesh: Any) -> None:
    def verdict(loss: Any) -> Any:
        rows = torch.Generator().manual_seed(1)
        return rd.verify(
            lambda: Attention().to(dtype), lambda given: torch.optim.Adam(given, lr=0.01),
            ((torch.randn(4, 5, 8, generator=rows).to(dtype),) for _ in range(4)),
            loss=loss, mesh=mesh,
            plan={"[qkv]": "column:4", "o": "row"} if mesh and "tp" in mesh else None,
        )  # fmt: skip

    found = verdict(lambda model, x: model(x).square().mean())
    assert found.same, str(found)

    def wrong(model: Any, x: Any) -> Any:  # on ranks, which have fewer rows or heads
        model.q.bias.register_hook(lambda grad: grad * (1 if len(x) * len(grad) == 32 else 1.01))
        return model(x).square().mean()

    assert not verdict(wrong).same


HALVES = [torch.bfloat16, torch.float16]
SCALES = [2.0**power for power in range(6, 25, 3)]  # from what never overflows to what always does


def in_halves(precision: Any, kind: str, mesh: Any, change: Any = None, **options: Any) -> Any:
    """Verify attention between norms; `change` is done to it on ranks."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(8), Attention(), torch.nn.LayerNorm(8), Attention()
    )
    batches = [(torch.randn(4, 6, 8), torch.randn(4, 6, 8)) for _ in range(3)]
    return rd.verify(
        lambda: model, OPTIMIZERS[kind], batches, precision=precision, mesh=mesh, divide=change,
        loss=lambda model, x, y: (model(x).float() - y).square().mean(),
        plan={"*.[qkv]": "column:4", "*.o": "row", "[02]": "norm"} if "tp" in mesh else None,
        **options,
    )  # fmt: skip


MESHES = [{"dp": 2}, {"dp": 4}, {"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 1, "dp": 3}]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("compute", HALVES, ids=str)
def test_rounding_of_sixteen_bits_is_no_difference(
    compute: Any, kind: str, mesh: dict[str, int], clip: float | None
) -> None:
    """The biases of keys have no gradient, and those of norms begin at zero."""
    found = in_halves(rd.Precision(compute=compute), kind, mesh, clip=clip)
    assert found.same, str(found)
    assert found.largest.relative > 0  # something was compared


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)
def test_overflow_on_one_side_is_no_difference(mesh: dict[str, int], scale: float) -> None:
    found = in_halves(rd.Precision(compute=torch.float16, loss_scale=scale), "adam", mesh)
    assert found.same, str(found)
    assert found.largest.relative > 0


def louder(model: Any, mesh: Any) -> None:
    if mesh.comm.rank == 1:
        model[2].register_forward_hook(lambda _, __, out: out * 2)


def silent(model: Any, mesh: Any) -> None:
    del mesh
    model[1].v.bias.register_hook(torch.zeros_like)


def turned(model: Any, mesh: Any) -> None:
    del mesh
    model[0].bias.register_hook(lambda grad: -grad)


@pytest.mark.parametrize("scale", [None, *SCALES[::2]])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("change", [louder, silent, turned])
@pytest.mark.parametrize("compute", HALVES, ids=str)
def test_wrong_training_is_told_beside_rounding(
    compute: Any, change: Any, kind: str, mesh: dict[str, int], scale: float | None
) -> None:
    """Also at a scale at which all steps would be skipped, and nothing compared."""
    precision = rd.Precision(compute=compute, loss_scale=scale)
    assert not in_halves(precision, kind, mesh, change).same
