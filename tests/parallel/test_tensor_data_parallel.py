"""Replicas of a model whose layers are cut, under every strategy, train as one device does."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, Size  # noqa: E402

VOCABULARY = 29


def loss(model: Any, tokens: Any) -> Any:
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_as_one_device(strategy: str, *, sequence: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = GPT(Size(2, 4, 16, 8), VOCABULARY).double()
        tokens = torch.randint(VOCABULARY, (4, 8))
    device = copy.deepcopy(start)
    train(device, torch.optim.SGD(device.parameters(), lr=0.5), tokens)
    wanted = device.state_dict()

    def body(comm: rd.Communicator) -> None:
        mesh = rd.Mesh(dp=2, tp=2, comm=comm)
        model: Any = copy.deepcopy(start)
        rd.apply_plan(model, "gpt", mesh, sequence_parallel=sequence)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, prepared = rd.prepare(model, optimizer, strategy=strategy, comm=mesh["dp"])
        train(model, prepared, tokens.tensor_split(2)[mesh.place["dp"]])
        whole = rd.full_state_dict(model)  # comm=mesh["dp"] stands for the mesh
        for name, _ in start.named_parameters():
            error = (whole[name] - wanted[name]).abs().max() / wanted[name].abs().max()
            assert error <= 1e-12, name

    rd.run(body, 4, "threads")


def train(model: Any, optimizer: Any, tokens: Any) -> None:
    for _ in range(3):
        loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
