"""What does one slow worker cost? Loss over wall-clock time, synchronous, asynchronous and between.

Four workers train the same small network for the same time. Either one of them takes ten times as
long for every step, or each of them for one step in ten, by chance. Writes
results/parameter_server.json, and for the first case the picture results/parameter_server.svg.
"""

from __future__ import annotations

import json
import platform
import random
import time
from pathlib import Path
from typing import Any

import torch

import roundelay as rd
from roundelay.view.chart import Axis, chart

RESULTS = Path(__file__).parent / "results"
RANKS, SLOW = 4, 3  # how many workers, and which of them is slow
STEP_S, SLOW_S = 0.004, 0.040  # that a step takes at least, besides its arithmetic
SECONDS = 4.0  # of training
STUMBLES = 0.1  # of all steps, where everybody is slow at times
BOUND = 3
RATE = 0.05
CASES = ("one slow worker", "each slow at times")
STRATEGIES = {
    "sync": rd.ParameterServer(),
    f"ssp, bound {BOUND}": rd.ParameterServer(mode="ssp", staleness=BOUND),
    "async": rd.ParameterServer(mode="async"),
}


def make_model() -> torch.nn.Module:
    """Return the same small network every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def batch_of(generator: torch.Generator, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and what a fixed teacher says of them."""
    x = torch.randn(rows, 16, generator=generator)
    return x, (torch.sin(x[:, :4]).sum(1, keepdim=True) + x[:, 4:5] * x[:, 5:6])


def be_rank(comm: Any, strategy: rd.ParameterServer, case: str) -> dict[str, Any]:
    """Train until the time is over; the first worker looks at the loss now and then."""
    torch.set_num_threads(1)
    model = make_model()
    model, optimizer = rd.prepare(
        model, torch.optim.SGD(model.parameters(), lr=RATE), strategy=strategy, comm=comm
    )
    mine = torch.Generator().manual_seed(100 + comm.rank)
    judge = batch_of(torch.Generator().manual_seed(7), 2048)
    chance = random.Random(comm.rank)  # noqa: S311 - not for secrets
    curve: list[tuple[float, float]] = []
    comm.barrier()
    began, steps = time.monotonic(), 0
    while _goes_on(comm, strategy, began):
        if comm.rank == 0 and (not curve or time.monotonic() - began > curve[-1][0] + 0.1):
            with torch.no_grad():
                loss = torch.nn.functional.mse_loss(model(judge[0]), judge[1])
            curve.append((time.monotonic() - began, float(loss)))
        slow = comm.rank == SLOW if case == "one slow worker" else chance.random() < STUMBLES
        time.sleep(SLOW_S if slow else STEP_S)
        x, y = batch_of(mine, 16)
        torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    told = rd.staleness(model)
    return {
        "curve": curve,
        "steps": steps,
        "staleness": [[age, count] for age, count in told.counts.items()],
        "most": told.most,
        "bound": told.bound,
        "text": str(told),
    }


def _goes_on(comm: Any, strategy: rd.ParameterServer, began: float) -> bool:
    """Stop at the same step where all wait for one another; else each by its own clock."""
    left = time.monotonic() - began < SECONDS
    if strategy.mode != "sync":
        return left
    told = torch.tensor([float(left)])
    comm.broadcast(told)
    return bool(told.item())


def measured(name: str, strategy: rd.ParameterServer, case: str) -> dict[str, Any]:
    """Run one strategy, say how it went, and return it."""
    ranks = rd.run(be_rank, RANKS, args=(strategy, case))
    first, steps = ranks[0], [one["steps"] for one in ranks]
    updates = first["steps"] if strategy.mode == "sync" else sum(steps)
    loss = round(first["curve"][-1][1], 5)
    print(f"{case}, {name}: steps {steps}, loss {loss}\n{first['text']}", flush=True)
    return {
        "steps": steps,
        "gradients_per_second": round(sum(steps) / SECONDS, 1),
        "updates_per_second": round(updates / SECONDS, 1),
        "last_loss": loss,
        "staleness": {
            "counts": first["staleness"], "most": first["most"], "bound": first["bound"],
        },
        "curve": [[round(at, 3), round(loss, 5)] for at, loss in first["curve"]],
    }  # fmt: skip


def main() -> None:
    """Measure, write the results and the picture, and say it."""
    # Torch imports much when the first optimizer is made: here, and not in every forked rank.
    torch.optim.SGD(make_model().parameters(), lr=RATE)
    found = {case: {name: measured(name, strategy, case) for name, strategy in STRATEGIES.items()}
             for case in CASES}  # fmt: skip
    result = {
        "command": "python benchmarks/parameter_server.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ranks": RANKS,
        "slow_rank": SLOW,
        "seconds_of_a_step": STEP_S,
        "seconds_of_a_slow_step": SLOW_S,
        "seconds": SECONDS,
        "cases": found,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "parameter_server.json").write_text(json.dumps(result, indent=1) + "\n")
    picture = chart(
        {name: one["curve"] for name, one in found[CASES[0]].items()},
        title=f"{RANKS} workers, one of them {SLOW_S / STEP_S:.0f} times slower",
        across=Axis("seconds"),
        up=Axis("loss", base=10),
    )
    (RESULTS / "parameter_server.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
