"""The view *Planner*: `roundelay plan` with sliders; the same task, table, reason and formulas."""

from __future__ import annotations

import shlex
from decimal import Decimal

from roundelay.networks import cluster_called, cluster_names
from roundelay.planning import (
    MOST_GPUS,
    PRECISIONS,
    STRATEGIES,
    USUAL_SEQUENCE,
    PlanChoices,
    Planned,
    Task,
    TrainingPlan,
    advice,
    as_document,
    asked_choices,
    asked_task,
    gigabytes,
    large,
    plan,
    scaling,
    transformer,
)
from roundelay.view.chart import chart
from roundelay.view.drawing import parted
from roundelay.view.plan_chart import scaling_words
from roundelay.view.terminal_text import seconds_text
from roundelay.web.query import Query
from roundelay.web.view import Document, View

__all__ = ["planner"]

PARAMS = 7.5e9  # of the model that the page begins with: that of ZeRO's paper
GPUS = 64
ROWS = 8  # with other axes than dp
USUAL, ALL = "usual", "all"
PARTS = ("parameters", "gradients", "optimizer", "activations", "transient", "total")


def _choices(query: Query) -> Document:
    """Return the clusters, with what is usual."""
    del query
    clusters = [cluster_called(name) for name in cluster_names()]
    return {
        "networks": [
            {"name": one.name, "memory": (one.memory or 0) / 1e9, "source": one.source,
             "precisions": list(one.flops)} for one in clusters
        ],
        "precisions": [USUAL, *PRECISIONS, ALL],
        "params": PARAMS,
        "gpus": GPUS,
        "sequence": USUAL_SEQUENCE,
    }  # fmt: skip


def _asked(query: Query) -> tuple[Task, PlanChoices]:
    cluster = cluster_called(query.choice("network", cluster_names(), "h100-ib"))
    precision = query.choice("precision", [USUAL, *PRECISIONS, ALL])
    every = [name for name in PRECISIONS if name in cluster.flops]
    named = {USUAL: [], ALL: every}.get(precision, [precision])
    model = transformer(
        params=int(query.number("params", PARAMS, low=1e6, high=1e14)),
        layers=query.whole("layers", 0, low=1, high=100_000) or None,
        hidden=query.whole("hidden", 0, low=1, high=1 << 24) or None,
    )
    task = asked_task(
        model,
        cluster,
        gpus=query.whole("gpus", GPUS, low=1, high=MOST_GPUS),
        memory=int(query.number("memory", 0, low=1, high=1e6) * 1e9) or None,
        batch=query.whole("batch", 0, low=1, high=1 << 30) or None,
        sequence=query.whole("sequence", USUAL_SEQUENCE, low=1, high=1 << 24),
    )
    return task, asked_choices(cluster, precisions=named)


def _plan(query: Query) -> Document:
    """Return the table, the best with its reason, and every formula of it."""
    language = query.language
    task, wanted = _asked(query)
    found = plan(task, wanted)
    alone, others = found.shown(ROWS)
    document = as_document(found, [*alone, *others], reasons=True, language=language)
    for one, option in zip([*alone, *others], document["options"], strict=True):
        option |= {"best": one is found.best, "texts": _texts(one), "alone": one in alone}
    for term in document["why"]:
        value = term["value"]
        term["text"] = gigabytes(value) if term["unit"] == "bytes" else seconds_text(value)
    document["reason"] = document["reason"] or advice(found, wanted, language)
    document["note"] = bool(task.model.note)
    document["texts"] = {"params": large(task.model.params), "memory": gigabytes(task.memory)}
    document["command"] = _command(found)
    return document


def _texts(one: Planned) -> dict[str, str]:
    """Return the numbers of a row as the terminal writes them."""
    candidate, held = one.candidate, one.bytes.held
    parts = (held.parameters, held.gradients, held.optimizer, one.bytes.activations,
             one.bytes.transient, one.bytes.total)  # fmt: skip
    again = "*" if candidate.recompute == "full" else ""
    return {
        **dict(zip(PARTS, map(gigabytes, parts), strict=True)),
        "mesh": str(candidate.mesh),
        "rows": f"{candidate.micro_batch}{again}",
        "spare": f"{'+' if one.fits else '-'}{gigabytes(abs(one.spare))}",
        "step": seconds_text(one.time.total),
        "waits": f"{100 * one.time.share:.1f} %",
    }


def _command(found: TrainingPlan) -> str:
    """Return what a terminal takes for the same table."""
    task = found.task
    model = task.model
    precisions = dict.fromkeys(one.candidate.precision for one in found.options)
    memory = f"{Decimal(int(task.memory)) / 10**9:f}GB"
    words = ["roundelay", "plan", "--params", large(model.params), "--layers", str(model.layers),
             "--hidden", str(model.hidden), "--sequence", str(task.sequence), "--batch",
             str(task.batch), "--gpus", str(task.gpus), "--memory", memory,
             "--network", task.cluster.name]  # fmt: skip
    if len(precisions) > 1 or next(iter(precisions)) != next(iter(task.cluster.flops)):
        words += [word for name in precisions for word in ("--precision", name)]
    return shlex.join(words)


def _scaling(query: Query) -> Document:
    """Return the curve of each strategy over more and more GPUs, as a drawing and as numbers."""
    language = query.language
    task, wanted = _asked(query)
    curves = scaling(task, wanted)
    title, across, up = scaling_words(task, language)
    if language == "zh":
        curves = {name if name in STRATEGIES else "只计算": line for name, line in curves.items()}
    drawing, style = parted(chart(curves, title=title, across=across, up=up))
    return {"title": title, "curves": curves, "svg": drawing, "style": style}


planner = View(name="planner", answers={"choices": _choices, "plan": _plan, "scaling": _scaling})
