"""Real models beside the planner: counted on the meta device, and as the ledger measures them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import roundelay as rd
from roundelay.cli._group import roundelay
from roundelay.networks import cluster_called
from roundelay.planning import Candidate, MeshShape, Task, fullest_rank, transformer

torch = pytest.importorskip("torch")

from roundelay.training.count_model import count_model  # noqa: E402 - only with torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from gpt import GPT, Size, loss_of  # noqa: E402 - from the folder above

SCRIPT = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from gpt import GPT, SIZES

def make():
    return GPT(SIZES["gpt2"], 50257)

def raises():
    return 1 / 0

def other():
    return 3
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(roundelay, words, prog_name="roundelay")


def test_a_model_is_counted(tmp_path: Path) -> None:
    script = tmp_path / "models.py"
    script.write_text(SCRIPT, encoding="utf-8")
    found = json.loads(run("plan", "--model", f"{script}:make", "--gpus", "8", "--json").stdout)
    model = found["model"]
    assert (model["layers"], model["hidden"], model["vocabulary"]) == (12, 768, 50257)
    assert model["params"] == 50257 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    for name, said in (("raises", "ZeroDivisionError"), ("other", "must return a torch.nn.Module"),
                       ("none", "no function 'none'")):  # fmt: skip
        result = run("plan", "--model", f"{script}:{name}", "--gpus", "8")
        assert result.exit_code == 2
        assert said in result.stderr


@pytest.mark.parametrize("sizes", [(2, 2, 64, 32), (3, 4, 32, 16)])
def test_counted_as_by_formula(sizes: tuple[int, int, int, int]) -> None:
    """Our GPT is the transformer of the formulas, tensor by tensor."""
    layers, heads, width, context = sizes
    counted = count_model(lambda: GPT(Size(*sizes)))
    known = transformer(layers=layers, hidden=width, heads=heads, vocabulary=256,
                        positions=context)  # fmt: skip
    assert counted.params == known.params
    assert counted.layer == known.layer
    assert counted.shared == known.shared
    assert sorted(counted.tensors(1, 0)) == sorted(known.tensors(1, 0))


def test_a_model_without_layers_is_one_unit() -> None:
    counted = count_model(lambda: torch.nn.Linear(64, 64))
    assert (counted.params, counted.layers) == (64 * 65, 1)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_as_the_ledger_measures(precision: str, strategy: str, size: int) -> None:
    """Bytes that are held, to the byte; activations but for a few numbers of positions."""
    shape, rows, bucket = Size(2, 2, 32, 16), 3, 16 << 10

    def body(comm: rd.Communicator) -> Any:
        torch.manual_seed(0)
        model = GPT(shape)
        kind: Any = rd.Ddp(bucket_bytes=bucket)
        if strategy.startswith("zero"):
            kind = rd.Zero(int(strategy[-1]), bucket_bytes=bucket)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = rd.prepare(
            model, optimizer, strategy=kind, precision=precision, comm=comm
        )
        tokens = torch.randint(0, 256, (rows, shape.context))
        targets = tokens.clone()
        loss: Any = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        return rd.ledger(model, forward=lambda: loss_of(model, tokens, targets)).entries

    model = transformer(layers=2, hidden=32, heads=2, vocabulary=256, positions=16)
    task = Task(model, cluster_called("h100-ib"), size, 10**9, rows * size, 16, bucket=bucket)
    found = fullest_rank(task, Candidate(strategy, precision, MeshShape(dp=size), rows))
    entries = rd.run(body, size, "threads")[0]
    for entry in entries:
        assert entry.predicted.parameters == found.held.parameters
        assert entry.predicted.gradients == found.held.gradients
        assert entry.predicted.transient == found.held.transient
        assert entry.activations == pytest.approx(found.activations, rel=0.03)
    # Padding lies with the last ranks: the first has as much as the planner says.
    assert max(entry.predicted.optimizer for entry in entries) == found.held.optimizer
