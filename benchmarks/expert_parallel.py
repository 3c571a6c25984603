"""How quickly tokens get to their experts and back, beside torch's all_to_all_single on gloo.

Both do the same in the same processes, turn and turn about: ranks tell each other how many tokens
go where, rows are sorted by expert, travel, are sorted again, and come back to their places. Only
what carries them differs: our rows lie where other ranks read them. `torch` is the same by torch
alone, as it is written without us. `exchange` is the two all-to-alls alone, on ordinary memory that
is there already. Ratios are medians of those of
each round, as the slowest rank saw it. Writes results/expert_parallel.json.

    python benchmarks/expert_parallel.py
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import roundelay as rd
from roundelay import _core
from roundelay.parallel.expert.dispatch import planned
from roundelay.parallel.expert.router import Queues, Router, Routing

FILE = Path(__file__).parent / "results" / "expert_parallel.json"
RANKS = (2, 4)
EXPERTS, TOP_K = 8, 2
AMOUNTS = {"few tokens": (64, 256), "some tokens": (512, 512), "many tokens": (4096, 1024)}
ROUNDS = 31

Ways = dict[str, Callable[[], torch.Tensor]]


class Gloo:
    """The few calls that a dispatch makes, by torch's gloo."""

    def __init__(self, comm: rd.Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the counts of every rank."""
        every = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(every), x.contiguous())
        return every

    def empty(self, length: int, dtype: str) -> Any:
        """Return memory of this process, which is kept as ours is."""
        return np.empty(length, dtype)

    def all_to_all(self, x: Any, *, out: Any, axis: int, counts: list[list[int]]) -> Any:
        """Send so many rows from each rank to each."""
        del axis
        came, sent = torch.as_tensor(out), torch.as_tensor(x)
        dist.all_to_all_single(came, sent, [row[self.rank] for row in counts], counts[self.rank])
        return out


def by_torch(x: torch.Tensor, routing: Routing, gloo: Gloo) -> torch.Tensor:
    """Dispatch and combine by torch's own functions."""
    flat = routing.experts.reshape(-1)
    every = gloo.all_gather(torch.bincount(flat, minlength=EXPERTS))
    to_each = every.view(gloo.size, gloo.size, -1)
    here = to_each[:, gloo.rank].tolist()  # from each rank to each expert
    sent, received = to_each[gloo.rank].sum(1).tolist(), [sum(theirs) for theirs in here]
    order = flat.argsort(stable=True)
    came = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(came, x[order // TOP_K], received, sent)
    pieces = came.split([count for theirs in here for count in theirs])
    experts = [torch.cat(pieces[at :: len(here[0])]) for at in range(len(here[0]))]
    by_expert = [rows.split([theirs[at] for theirs in here]) for at, rows in enumerate(experts)]
    said = torch.cat([piece for theirs in zip(*by_expert, strict=True) for piece in theirs])
    back = x.new_empty(len(order), *x.shape[1:])
    dist.all_to_all_single(back, said, sent, received)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return (back[places].view(len(x), TOP_K, -1) * routing.weights[..., None]).sum(1)


@torch.no_grad()
def be_rank(comm: rd.Communicator, store: str, tokens: int, width: int) -> dict[str, list[float]]:
    """Measure as one rank: every round, as the slowest rank saw it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size
    )
    made = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(tokens, width, generator=made)
    torch.manual_seed(0)
    routing = Router(width, EXPERTS, top_k=TOP_K)(x)
    gloo = Gloo(comm)
    first = Queues(comm.all_gather(routing.counts()), None).taken()
    there = first.view(comm.size, comm.size, -1).sum(2).tolist()
    back = [list(column) for column in zip(*there, strict=True)]
    rows = torch.randn(sum(there[comm.rank]), width)
    came, returned = torch.zeros(sum(back[comm.rank]), width), torch.zeros_like(rows)

    def whole(way: Any) -> torch.Tensor:
        queues = Queues(way.all_gather(routing.counts()), None)
        kept = queues.kept(routing, comm.rank)
        plan = planned(routing.experts, kept, queues.taken(), way)
        return plan.gather(plan.scatter(x), routing.weights)

    def alone(way: Any) -> torch.Tensor:
        way.all_to_all(rows, out=came, axis=0, counts=there)
        return torch.as_tensor(way.all_to_all(came, out=returned, axis=0, counts=back)).clone()

    ways: Ways = {}
    for name, way in {"ours": comm, "gloo": gloo}.items():
        ways[f"{name} dispatch and combine"] = lambda way=way: whole(way)
        ways[f"{name} exchange"] = lambda way=way: alone(way)
    ways["torch dispatch and combine"] = lambda: by_torch(x, routing, gloo)
    torch.testing.assert_close(ways["ours dispatch and combine"](), by_torch(x, routing, gloo))
    for what in ("dispatch and combine", "exchange"):
        if not torch.equal(ways[f"ours {what}"](), ways[f"gloo {what}"]()):
            raise SystemExit(f"{what}: the two differ.")
    times = in_turns(comm, ways)
    dist.destroy_process_group()
    return times


def in_turns(comm: rd.Communicator, ways: Ways) -> dict[str, list[float]]:
    """Go each way once, round by round, each round from another one on."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(ROUNDS + 3):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            comm.barrier()
            began = time.perf_counter()
            ways[name]()
            seconds = np.array([time.perf_counter() - began])
            comm.all_reduce(seconds, "max")
            if number > 2:  # noqa: PLR2004 - the first are to get warm
                times[name].append(float(seconds[0]))
    return times


def summed_up(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and how much longer gloo takes in the same round."""
    result: dict[str, Any] = {}
    for what in ("dispatch and combine", "exchange"):
        ours, gloo = times[f"ours {what}"], times[f"gloo {what}"]
        ratios = [theirs / mine for mine, theirs in zip(ours, gloo, strict=True)]
        result[what] = {
            "microseconds": round(1e6 * statistics.median(ours), 1),
            "gloo_microseconds": round(1e6 * statistics.median(gloo), 1),
            "gloo_over_ours": round(statistics.median(ratios), 2),
        }
    theirs = times["torch dispatch and combine"]
    ratios = [a / b for a, b in zip(theirs, times["ours dispatch and combine"], strict=True)]
    result["dispatch and combine"] |= {
        "torch_microseconds": round(1e6 * statistics.median(theirs), 1),
        "torch_over_ours": round(statistics.median(ratios), 2),
    }
    return result


def main() -> None:
    """Measure, write the result and say it."""
    result: dict[str, Any] = {
        "command": "python benchmarks/expert_parallel.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "experts": EXPERTS,
        "top_k": TOP_K,
        "rounds": ROUNDS,
        "rows": [],
    }
    for size in RANKS:
        for name, (tokens, width) in AMOUNTS.items():
            with tempfile.TemporaryDirectory() as folder:
                times = rd.run(be_rank, size, args=(f"{folder}/store", tokens, width))[0]
            row = {"ranks": size, "tokens": tokens, "width": width, **summed_up(times)}
            result["rows"].append(row)
            print(name, json.dumps(row, indent=1), flush=True)
    FILE.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
