"""How quick DDP is beside torch's own, and what `prepare` costs where nothing is shared.

Steps of a GPT of about ten million parameters with AdamW, turn and turn about in one run: ours and
torch's DistributedDataParallel, on gloo and on our own torch backend, on two ranks; and on one rank
ours beside plain torch. `alone` is a step without any exchange: what is above it is communication.
Writes results/ddp.json.

    python benchmarks/ddp.py              all amounts of tokens
    python benchmarks/ddp.py few          one of them, the others stay as they are
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from zero import AMOUNTS, GPT, SIZES, THEIRS, Step, adam, in_turns, join, stepper

import roundelay as rd
import roundelay.torch
from roundelay import _core

FILE = Path(__file__).parent / "results" / "ddp.json"
RANKS = 2


def be_rank(comm: rd.Communicator, store: str, amount: str) -> dict[str, list[float]]:
    """Measure as one rank of several: every step of every round, as the slowest rank saw it."""
    join(comm, store)
    tokens = torch.randint(0, 256, AMOUNTS[amount])
    first = GPT(SIZES["medium"])
    steps: dict[str, Step] = {}
    alone = copy.deepcopy(first)
    steps["alone"] = stepper(alone, adam(alone), tokens)
    mine = copy.deepcopy(first)
    model, optimizer = rd.prepare(mine, adam(mine), strategy="ddp", comm=comm)
    steps["ours"] = stepper(model, optimizer, tokens)
    if comm.size > 1:
        for name, backend in THEIRS.items():
            group = dist.new_group(backend=backend)
            wrapped = DistributedDataParallel(copy.deepcopy(first), process_group=group)
            steps[name.replace("fsdp2", "torch")] = stepper(wrapped, adam(wrapped), tokens)
    found = in_turns(comm, steps)
    dist.destroy_process_group()
    return found


def summed_up(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, how much of a step is communication, and ratios within rounds."""

    def ratio(above: str, below: str) -> float:
        pairs = zip(times[above], times[below], strict=True)
        return round(statistics.median(one / two for one, two in pairs), 3)

    median = {name: statistics.median(one) for name, one in times.items()}
    return {
        "milliseconds": {name: round(1e3 * one, 1) for name, one in median.items()},
        "communication": {
            name: round(1 - ratio("alone", name), 3) for name in times if name != "alone"
        },
        "to_ours": {name: ratio(name, "ours") for name in times if name != "ours"},
    }


def main() -> None:
    """Measure, write the result and say it."""
    result = json.loads(FILE.read_text()) if FILE.exists() else {}
    result |= {
        "command": "python benchmarks/ddp.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "parameters": sum(one.numel() for one in GPT(SIZES["medium"]).parameters()),
    }
    for amount in sys.argv[1:] or AMOUNTS:
        for size in (1, RANKS):
            with tempfile.TemporaryDirectory() as folder:
                times = rd.run(lambda comm: be_rank(comm, f"{folder}/store", amount), size)[0]  # noqa: B023
            key = f"{size} ranks, {amount} tokens"
            result[key] = summed_up(times)
            print(key, json.dumps(result[key], indent=1), flush=True)
            FILE.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
