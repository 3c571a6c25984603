"""What does dividing the work cost? ZeRO-1, 2 and 3 beside DDP, and ZeRO-3 beside FSDP2.

Steps of a GPT of about ten million parameters with AdamW on two ranks, turn and turn about in the
same processes; FSDP2 once on gloo and once on our own torch backend. Writes results/zero.json.

    python benchmarks/zero.py              all amounts of tokens
    python benchmarks/zero.py few          one of them, the others stay as they are
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

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import roundelay as rd
import roundelay.torch
from roundelay import _core

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, SIZES, loss_of

FILE = Path(__file__).parent / "results" / "zero.json"
RANKS = 2
ROUNDS = 15
AMOUNTS = {"few": (1, 32), "many": (4, 128)}  # rows and tokens of each, of every rank in a step
OURS = ("ddp", "zero1", "zero2", "zero3")
THEIRS = {"fsdp2_gloo": "gloo", "fsdp2_roundelay": roundelay.torch.BACKEND}

Step = Callable[[], None]


def stepper(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> Step:
    """Return what trains one step."""

    def step() -> None:
        loss_of(model, tokens, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all of them use."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def fsdp(model: GPT, group: dist.ProcessGroup) -> GPT:
    """Divide a model as torch does it: block by block, then the rest."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def join(comm: rd.Communicator, store: str) -> None:
    """Be a rank of torch's too, with one thread and the same random numbers as the others."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        roundelay.torch.BACKEND, init_method=f"file://{store}", rank=comm.rank,
        world_size=comm.size,
    )  # fmt: skip


def be_rank(comm: rd.Communicator, store: str, amount: str) -> dict[str, list[float]]:
    """Measure as one rank: every step of every round, as the slowest rank saw it."""
    join(comm, store)
    made = torch.Generator().manual_seed(comm.rank)
    tokens = torch.randint(0, 256, AMOUNTS[amount], generator=made)
    first = GPT(SIZES["medium"])
    steps: dict[str, Step] = {}
    for name in OURS:
        mine = copy.deepcopy(first)
        model, optimizer = rd.prepare(mine, adam(mine), strategy=name, comm=comm)
        steps[name] = stepper(model, optimizer, tokens)
    for name, backend in THEIRS.items():
        divided = fsdp(copy.deepcopy(first), dist.new_group(backend=backend))
        steps[name] = stepper(divided, adam(divided), tokens)
    found = in_turns(comm, steps)
    dist.destroy_process_group()
    return found


def in_turns(comm: rd.Communicator, steps: dict[str, Step]) -> dict[str, list[float]]:
    """Take one step of each, round by round, each round from another one on."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(ROUNDS + 2):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            comm.barrier()
            began = time.perf_counter()
            steps[name]()
            seconds = np.array([time.perf_counter() - began])
            comm.all_reduce(seconds, "max")
            if number > 1:  # the first two are to get warm: ZeRO-3 learns its order in one
                times[name].append(float(seconds[0]))
    return times


def summed_up(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and ratios of steps of the same round."""

    def ratio(above: str, below: str) -> float:
        pairs = zip(times[above], times[below], strict=True)
        return round(statistics.median(one / two for one, two in pairs), 3)

    return {
        "milliseconds": {
            name: round(1e3 * statistics.median(one), 1) for name, one in times.items()
        },
        "to_ddp": {name: ratio(name, "ddp") for name in OURS[1:]},
        "fsdp2_to_zero3": {name: ratio(name, "zero3") for name in THEIRS},
    }


def main() -> None:
    """Measure, write the result and say it."""
    result = json.loads(FILE.read_text()) if FILE.exists() else {}
    result |= {
        "command": "python benchmarks/zero.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "instruction_set": _core.instruction_set(),
        "ranks": RANKS,
        "rounds": ROUNDS,
        "parameters": sum(one.numel() for one in GPT(SIZES["medium"]).parameters()),
    }
    for amount in sys.argv[1:] or AMOUNTS:
        with tempfile.TemporaryDirectory() as folder:
            times = rd.run(lambda comm: be_rank(comm, f"{folder}/store", amount), RANKS)[0]  # noqa: B023
        rows, length = AMOUNTS[amount]
        result[f"{amount}_tokens"] = {"tokens": rows * length, **summed_up(times)}
        print(amount, json.dumps(result[f"{amount}_tokens"], indent=1), flush=True)
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
