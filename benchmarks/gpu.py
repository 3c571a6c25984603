"""On one GPU: what `prepare` costs beside a plain loop, and whether memory is as predicted.

    python benchmarks/gpu.py            # a GPT of 124 M parameters, bf16 and fp16

The plain loop does by hand what mixed precision means: half weights, float32 masters, AdamW on
those. Both run in turn in one process; tokens per second are medians. Peak memory is compared with
2 + 2 + 12 bytes per parameter, and the 4 of the masters' gradients, plus what activations take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from gpt import GPT, SIZES, Size, loss_of  # noqa: E402 - the example's model

import roundelay as rd  # noqa: E402 - after the path

VOCABULARY = 50304  # GPT-2's, rounded up
STEPS, ROUNDS = 8, 7
Step = Callable[[torch.Tensor, torch.Tensor], float]


def plain(model: GPT, dtype: torch.dtype) -> Step:
    """Return a step of the loop that people write by hand."""
    masters = [one.detach().clone() for one in model.parameters()]
    model.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=3e-4)
    halves = list(model.parameters())

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(model, tokens, targets)
        loss.backward()
        for master, half in zip(masters, halves, strict=True):
            master.grad = None if half.grad is None else half.grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(halves, masters)
        for one in (*masters, *halves):
            one.grad = None
        return loss.item()

    return step


def prepared(model: GPT, precision: str, comm: rd.Communicator, strategy: str) -> Step:
    """Return a step of the same, by `prepare`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    _, optimizer = rd.prepare(model, optimizer, strategy=strategy, precision=precision, comm=comm)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(model, tokens, targets)
        (optimizer.scale(loss) if precision == "fp16" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def peak(make: Callable[[], Step], batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[Step, int]:
    """Return a step that has run twice, and the most bytes that it needed."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    for _ in range(2):
        step(*batch)
    return step, torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu.json")
    options = parser.parse_args()
    comm = rd.init()
    size: Size = SIZES["gpt2"]
    shape = (options.rows, size.context)
    tokens, targets = (torch.randint(VOCABULARY, shape, device="cuda") for _ in range(2))
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(size, VOCABULARY).cuda()

    contenders = {"plain bf16": lambda: plain(model(), torch.bfloat16)}
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        contenders[f"{strategy} bf16"] = lambda word=strategy: prepared(model(), "bf16", comm, word)
    contenders["ddp fp16"] = lambda: prepared(model(), "fp16", comm, "ddp")
    steps, rows = {}, {}
    for name, make in contenders.items():
        steps[name], rows[name] = peak(make, (tokens, targets))
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            began = time.perf_counter()
            losses[name] += [step(tokens, targets) for _ in range(STEPS)]
            times[name].append((time.perf_counter() - began) / STEPS)
    count = sum(one.numel() for one in model().parameters())
    base = tokens.numel() / statistics.median(times["plain bf16"])
    for name in steps:
        speed = tokens.numel() / statistics.median(times[name])
        found[name] = {
            "tokens_per_second": speed, "of_plain": speed / base, "peak_bytes": rows[name],
            "first_loss": losses[name][0], "last_loss": losses[name][-1],
        }  # fmt: skip
        curve = f"loss {losses[name][0]:.3f} → {losses[name][-1]:.3f}"
        held = f"peak {rows[name] / 2**20:8.0f} MiB"
        print(f"{name:12} {speed:10,.0f} tokens/s  {speed / base:6.3f} of plain  {held}  {curve}")
    found["parameters"] = count
    print(f"{count:,} parameters: 2 + 2 + 12 bytes each are {16 * count / 2**20:.0f} MiB")
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
