"""How much faster is torch.distributed with our backend than with gloo? In the same processes.

All-reduces of four sizes on two and four ranks, and steps of a GPT of about ten million
parameters with torch's DDP and FSDP2, turn and turn about. Writes results/torch_backend.json.

    python benchmarks/torch_backend.py            everything
    python benchmarks/torch_backend.py 4_ranks    one part, the others stay as they are
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import roundelay.torch  # noqa: F401 - registers the backend
from roundelay import _core

FILE = Path(__file__).parent / "results" / "torch_backend.json"
PAGE = Path(__file__).parent.parent / "docs" / "torch.md"
TABLE = re.compile(r"(<!-- table: speed -->\n).*?(<!-- /table -->\n)", re.DOTALL)
SIZES = {1 << 10: 200, 64 << 10: 60, 1 << 20: 12, 64 << 20: 3}  # bytes, and calls in a row
ROUNDS = 21
STEPS = 11
TOKENS = {"few tokens": 32, "many tokens": 512}  # of every rank, in a step

Times = dict[str, list[float]]
Groups = dict[str, dist.ProcessGroup]


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to what came before, then think about it."""
        batch, length, width = x.shape
        parts = self.attend(self.first(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    """A small language model of about ten million parameters."""

    def __init__(self, width: int = 256, layers: int = 12, words: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))
        self.words = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next words."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.words(x)


def in_turns(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run each in turn, round by round; return the median, of the slowest rank each time.

    Who comes after a step without exchange finds the caches otherwise, so that all take that place.
    """
    times: Times = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            seconds = torch.tensor([runs[name]()], dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:  # the first is to get warm
                times[name].append(seconds.item())
    return {name: statistics.median(found) for name, found in times.items()}


def all_reduces(groups: Groups) -> list[dict[str, Any]]:
    """Time dist.all_reduce at every size."""
    rows = []
    for nbytes, calls in SIZES.items():
        x = torch.zeros(nbytes // 4)

        def run(group: dist.ProcessGroup, x: torch.Tensor = x, calls: int = calls) -> float:
            began = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(x, group=group)
            return (time.perf_counter() - began) / calls

        found = in_turns({name: lambda g=group: run(g) for name, group in groups.items()}, ROUNDS)
        rows.append({"bytes": nbytes, **_compared(found)})
    return rows


def training(groups: Groups) -> list[dict[str, Any]]:
    """Time steps of DDP and FSDP2, and of the model alone, which sends nothing."""
    rows = []
    for kind, wrap in {"DDP": _ddp, "FSDP2": _fsdp}.items():
        for amount, tokens in TOKENS.items():
            models = {name: wrap(GPT(), group) for name, group in groups.items()}
            runs = {name: _stepper(model, tokens) for name, model in models.items()}
            found = in_turns({**runs, "alone": _stepper(GPT(), tokens)}, STEPS)
            alone = found.pop("alone")
            share = 1 - alone / found["gloo"]
            row = {"what": kind, "tokens": tokens, **_compared(found)}
            row["gloo_communicates_percent"] = round(100 * share, 1)
            rows.append(row)
            del models, runs, amount
    return rows


def _ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def _fsdp(model: GPT, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _stepper(model: nn.Module, tokens: int) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = torch.Generator().manual_seed(dist.get_rank())
    words = torch.randint(0, 1024, (max(1, tokens // 128), min(tokens, 128)), generator=made)

    def step() -> float:
        began = time.perf_counter()
        scores = model(words)
        nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def _compared(seconds: dict[str, float]) -> dict[str, Any]:
    micro = {name: round(each * 1e6, 2) for name, each in seconds.items()}
    return {"microseconds": micro, "ratio": round(seconds["gloo"] / seconds["roundelay"], 2)}


PARTS: dict[str, tuple[int, Callable[[Groups], list[dict[str, Any]]]]] = {
    "2_ranks": (2, all_reduces),
    "4_ranks": (4, all_reduces),
    "training_2_ranks": (2, training),
}


def be_rank(part: str, rank: int, store: str, answer: int) -> None:
    """Measure as one rank; rank 0 writes what was found."""
    size, measure = PARTS[part]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("roundelay", init_method=f"file://{store}", rank=rank, world_size=size)
    ours = dist.group.WORLD
    groups = {"roundelay": ours, "gloo": dist.new_group(backend="gloo")}
    rows = measure(groups)
    if rank == 0:
        os.write(answer, json.dumps(rows).encode())
    dist.destroy_process_group()


def measured(part: str) -> list[dict[str, Any]]:
    """Fork the ranks of a part and return its rows."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(PARTS[part][0]):
            child = os.fork()
            if child == 0:
                os.close(reading)
                be_rank(part, rank, f"{folder}/store", writing)
                os._exit(0)
            children.append(child)
        os.close(writing)
        with os.fdopen(reading, "rb") as answer:
            rows: list[dict[str, Any]] = json.loads(answer.read())
        for child in children:
            os.waitpid(child, 0)
    return rows


def page(result: dict[str, Any]) -> str:
    """Return the tables of all parts that were measured, in Markdown."""
    lines = []
    for part in filter(result.get, PARTS):
        ranks, rows = PARTS[part][0], result[part]
        what = "a step of" if part.startswith("training") else "all_reduce of"
        lines += [f"| {what} | roundelay, ms | gloo, ms | ratio |", "|---|---:|---:|---:|"]
        for row in rows:
            name = f"{row['bytes'] >> 10} KiB" if "bytes" in row else (
                f"{row['what']}, {row['tokens']} tokens; with gloo "
                f"{row['gloo_communicates_percent']:.0f} % is communication"
            )  # fmt: skip
            ours, gloo = (row["microseconds"][one] / 1000 for one in ("roundelay", "gloo"))
            lines.append(f"| {name}, {ranks} ranks | {ours:.3g} | {gloo:.3g} | {row['ratio']}x |")
        lines.append("")
    where = f"{result['cores']} cores ({result['instruction_set']}), torch {result['torch']}"
    return "\n".join([*lines, f"Measured on {where}, with `{result['command']}`.", ""])


def main() -> None:
    """Measure, write the result and say it."""
    result = json.loads(FILE.read_text()) if FILE.exists() else {}
    result |= {
        "command": "python benchmarks/torch_backend.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "instruction_set": _core.instruction_set(),
        "parameters": sum(parameter.numel() for parameter in GPT().parameters()),
    }
    for part in sys.argv[1:] or PARTS:
        result[part] = measured(part)
        for row in result[part]:
            print(part, row, flush=True)
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(result, indent=2) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda found: found[1] + page(result) + found[2], text))


if __name__ == "__main__":
    main()
