"""The view *Tour*: the numbers of its chapters on ZeRO; its other pictures are the views' own."""

from __future__ import annotations

from roundelay.language import Language, say
from roundelay.networks import cluster_called
from roundelay.planning import (
    STRATEGIES,
    Candidate,
    MeshShape,
    Task,
    fullest_rank,
    gigabytes,
    large,
    step_time,
    transformer,
)
from roundelay.web.query import Query
from roundelay.web.view import Document, View

__all__ = ["tour"]

PARAMS = 7_500_000_000  # of ZeRO's paper
MEMORY = 80 * 10**9
SEQUENCE = 2048
#: What a rank sends in a step of one micro-batch: a call, and what goes through it.
SENDS = {
    "ddp": (("reduce-scatter", "gradients"), ("all-gather", "gradients")),
    "zero1": (("reduce-scatter", "gradients"), ("all-gather", "parameters")),
    "zero2": (("reduce-scatter", "gradients"), ("all-gather", "parameters")),
    "zero3": (("all-gather", "parameters"), ("all-gather", "parameters"),
              ("reduce-scatter", "gradients")),
}  # fmt: skip


def _zero(query: Query) -> Document:
    """Return what a rank holds and sends under each strategy, for the model of ZeRO's paper."""
    size = query.whole("ranks", 64, low=1, high=1024)
    language = query.language
    model = transformer(params=PARAMS, layers=32, hidden=4096)
    cluster = cluster_called("h100-ib")
    task = Task(model, cluster, size, MEMORY, batch=size, sequence=SEQUENCE)
    rows = [_row(task, name, language) for name in STRATEGIES]
    return {"params": large(PARAMS), "ranks": size, "memory": MEMORY, "rows": rows,
            "memory_text": gigabytes(MEMORY)}  # fmt: skip


def _row(task: Task, strategy: str, language: Language) -> Document:
    candidate = Candidate(strategy, "bf16", MeshShape(dp=task.gpus), micro_batch=1)
    held, sent = fullest_rank(task, candidate).held, step_time(task, candidate).sent
    parts = {"parameters": held.parameters, "gradients": held.gradients,
             "optimizer": held.optimizer}  # fmt: skip
    calls = SENDS[strategy]
    return {
        "strategy": strategy,
        "bytes": parts,
        "texts": {name: gigabytes(nbytes) for name, nbytes in parts.items()},
        "total": sum(parts.values()),
        "total_text": gigabytes(sum(parts.values())),
        "sent": sent,
        "sent_text": gigabytes(sent),
        "calls": [
            {"call": call, "what": what, "when": _when(strategy, at, language)}
            for at, (call, what) in enumerate(calls)
        ],
    }


def _when(strategy: str, at: int, language: Language) -> str:
    """Say when a call is made."""
    forward = say(language, "in forward", "前向时")
    backward = say(language, "in backward", "反向时")
    after = say(language, "after the step", "更新之后")
    if strategy == "zero3":
        return (forward, backward, backward)[at]
    return backward if at == 0 or strategy == "ddp" else after


tour = View(name="tour", answers={"zero": _zero})
