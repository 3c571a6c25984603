"""What do cut layers cost? A plan of ours beside torch's DTensor plan, on our backend and on gloo.

Forward and backward of a small LLaMA on two ranks, turn and turn about in the same processes.
torch's plan is the one of its tutorial: `PrepareModuleInput` around attention and perceptron, so
that both sides sum activations twice a layer, forward and backward. `compute_alone` is our pass
with sums left out, which gives wrong numbers in the time that no way of summing can be below.
Writes results/tensor_parallel.json.

    python benchmarks/tensor_parallel.py            all amounts of tokens
    python benchmarks/tensor_parallel.py few        one of them, the others stay as they are
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import roundelay as rd
import roundelay.torch
from roundelay import _core
from roundelay.parallel import functions

FILE = Path(__file__).parent / "results" / "tensor_parallel.json"
RANKS, ROUNDS = 2, 25
ALIKE = 1e-4  # losses of float32
WIDTH, HEADS, LAYERS, VOCABULARY = 256, 8, 4, 512
AMOUNTS = {"few": (1, 32), "many": (4, 128)}  # rows, and tokens of each
THEIRS = {"dtensor_roundelay": roundelay.torch.BACKEND, "dtensor_gloo": "gloo"}
PLAN = {
    "tokens": "embedding",
    "*norm*": "norm",
    "*.attention": "region",
    "*.attention.[qkv]": "column:head_width",
    "*.attention.out": "row:head_width",
    "*.perceptron": "region",
    "*.perceptron.gate": "column",
    "*.perceptron.up": "column",
    "*.perceptron.down": "row",
    "head": "column gather",
}

Step = Callable[[], float]


class Attention(nn.Module):
    """Attention by heads, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.head_width = WIDTH // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Look back."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return result


class Perceptron(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Think."""
        result: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """Both, each beside a way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.perceptron = Attention(), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what they add."""
        x = x + self.attention(self.norm_1(x))
        more: Tensor = self.perceptron(self.norm_2(x))
        return x + more


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens))))
        return logits


def dtensor(model: Model, group: dist.ProcessGroup) -> Model:
    """Cut a model as torch does it."""
    mesh = DeviceMesh.from_group(group, "cpu")
    prepared = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
    )
    inner = {
        "attention": prepared,
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "perceptron": prepared,
        "perceptron.gate": ColwiseParallel(),
        "perceptron.up": ColwiseParallel(),
        "perceptron.down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    return model


def stepper(model: nn.Module, tokens: Tensor) -> Step:
    """Return what does one forward and backward pass."""

    def step() -> float:
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    return step


def without_sums(step: Step) -> Step:
    """Return a step that computes as much and sums nothing."""

    def bare() -> float:
        with mock.patch.multiple(functions, copy=as_it_is, reduce=as_it_is):
            return step()

    return bare


def as_it_is(x: Tensor, comm: rd.Communicator) -> Tensor:
    """Return a tensor without asking others."""
    del comm
    return x


def be_rank(comm: rd.Communicator, store: str, amount: str) -> dict[str, list[float]]:
    """Measure as one rank: every step of every round, as the slowest rank saw it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        roundelay.torch.BACKEND, init_method=f"file://{store}", rank=comm.rank,
        world_size=comm.size,
    )  # fmt: skip
    tokens = torch.randint(VOCABULARY, AMOUNTS[amount])
    first, mesh = Model(), rd.Mesh(tp=RANKS, comm=comm)
    steps: dict[str, Step] = {"one_rank": stepper(copy.deepcopy(first), tokens)}
    for name, sequence in (("ours", False), ("ours_sequence", True)):
        model = copy.deepcopy(first)
        rd.apply_plan(model, PLAN, mesh, sequence_parallel=sequence)
        steps[name] = stepper(model, tokens)
    for name, backend in THEIRS.items():
        steps[name] = stepper(
            dtensor(copy.deepcopy(first), dist.new_group(backend=backend)), tokens
        )
    losses = {name: step() for name, step in steps.items()}
    model = copy.deepcopy(first)
    rd.apply_plan(model, PLAN, mesh)
    alone = stepper(model, tokens)
    alone()  # the first pass is looked at, and would be refused without its sums
    steps["compute_alone"] = without_sums(alone)
    if max(losses.values()) - min(losses.values()) > ALIKE:
        raise SystemExit(f"They do not compute the same: {losses}")
    found = in_turns(comm, steps)
    dist.destroy_process_group()
    return found


def in_turns(comm: rd.Communicator, steps: dict[str, Step]) -> dict[str, list[float]]:
    """Take one step of each, round by round, each round from another one on."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(ROUNDS + 2):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            comm.barrier()
            began = time.perf_counter()
            steps[name]()
            seconds = np.array([time.perf_counter() - began])
            comm.all_reduce(seconds, "max")
            if turn > 1:  # the first two are to get warm
                times[name].append(float(seconds[0]))
    return times


def summed_up(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and ratios of steps of the same round."""

    def ratio(above: str, below: str) -> float:
        pairs = zip(times[above], times[below], strict=True)
        return round(statistics.median(one / two for one, two in pairs), 3)

    return {
        "milliseconds": {
            name: round(1e3 * statistics.median(each), 2) for name, each in times.items()
        },
        "dtensor_to_ours": {name: ratio(name, "ours") for name in THEIRS},
        "dtensor_to_ours_sequence": {name: ratio(name, "ours_sequence") for name in THEIRS},
        "dtensor_to_compute_alone": {name: ratio(name, "compute_alone") for name in THEIRS},
        "ours_to_one_rank": ratio("ours", "one_rank"),
    }


def main() -> None:
    """Measure, write the result and say it."""
    result = json.loads(FILE.read_text()) if FILE.exists() else {}
    result |= {
        "command": "python benchmarks/tensor_parallel.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "instruction_set": _core.instruction_set(),
        "ranks": RANKS,
        "rounds": ROUNDS,
        "parameters": sum(each.numel() for each in Model().parameters()),
    }
    for amount in sys.argv[1:] or AMOUNTS:
        with tempfile.TemporaryDirectory() as folder:
            times = rd.run(lambda comm: be_rank(comm, f"{folder}/store", amount), RANKS)[0]  # noqa: B023
        rows, length = AMOUNTS[amount]
        result[amount] = {"rows": rows, "tokens": length, **summed_up(times)}
        print(f"{amount}: {result[amount]}", flush=True)
    FILE.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
