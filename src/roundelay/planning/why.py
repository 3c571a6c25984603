"""Every number of a plan as its formula, the same with numbers in it, and what comes out."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from roundelay.networks import Cluster
from roundelay.planning.activations import kept_around, kept_by_layer, kept_of_token
from roundelay.planning.candidate import PRECISIONS, Task
from roundelay.planning.collective_time import (
    RankGroup,
    across_bandwidth,
    across_latency,
    all_gather,
    all_reduce,
    one_message,
    reduce_scatter,
    rounds_between,
)
from roundelay.planning.memory import rows_of
from roundelay.planning.rows import PARTS_AFTER_STEP, TURNS, waiting
from roundelay.planning.search import Planned
from roundelay.planning.step_time import FOLD_TRAFFIC, groups_of, messages_in_a_row, volumes_of

__all__ = ["Term", "why"]


@dataclass(frozen=True, slots=True)
class Term:
    """One number and where it comes from; `numbers` is arithmetic that gives `value`."""

    what: str
    formula: str
    numbers: str
    value: float
    unit: Literal["bytes", "seconds", "operations"] = "bytes"


def why(task: Task, one: Planned) -> list[Term]:
    """Return each part of the bytes and seconds of one way to train, in the order of the table."""
    return [*_bytes(task, one), *_seconds(task, one)]


def _bytes(task: Task, one: Planned) -> Iterator[Term]:
    candidate, held = one.candidate, one.bytes.held
    mesh, width, stage = candidate.mesh, candidate.widths(task), one.bytes.stage
    units = [sum(unit) for unit in task.model.divided(mesh.tp).units(mesh.pp, stage)]
    numel, size, strategy = sum(units), mesh.data, candidate.strategy
    kept = width.state if strategy == "ps-async" else width.optimizer  # servers update masters
    parts = [("parameters", width.parameter, held.parameters, "zero3"),
             ("gradients", width.gradient, held.gradients, "zero2"),
             ("optimizer", kept, held.optimizer, "zero1")]  # fmt: skip
    for word, each, nbytes, since in parts:
        divided = strategy.startswith("zero") and strategy >= since and size > 1
        formula, numbers = f"{each} B·Ψ", f"{each}·{numel}"
        if strategy.startswith("ps") and word == "parameters":
            formula, numbers = f"{each} B·Ψ, and what the server updates", f"{nbytes}"
        elif strategy.startswith("zero") and each:
            padding = nbytes * (size if divided else 1) // each - numel
            over = f"/{size}" if divided else ""
            formula = f"{each} B·(Ψ + padding){'/N' if divided else ''}"
            numbers = f"{each}·({numel} + {padding}){over}"
        yield Term(word, formula, numbers, nbytes)
    yield from _activations(task, one)
    yield _buffers(task, one)
    buffers = held.transient
    around, *layers = units
    if one.bytes.gathered:
        two = sorted(layers)[-2:]
        inner = " + ".join(map(str, [around, *two]))
        yield Term("gathered", f"{width.parameter} B·(what lies around the layers + two layers)",
                   f"{width.parameter}·({inner})", one.bytes.gathered)  # fmt: skip
    total = [held.parameters, held.gradients, held.optimizer, one.bytes.activations, buffers,
             one.bytes.gathered]  # fmt: skip
    yield Term("total", "all of it", " + ".join(map(str, total)), one.bytes.total)


def _buffers(task: Task, one: Planned) -> Term:
    candidate, nbytes = one.candidate, one.bytes.held.transient
    mesh, width, strategy = candidate.mesh, candidate.widths(task), candidate.strategy
    if strategy.startswith("ps"):
        inboxes = mesh.data + 1 if strategy == "ps" else 1
        each = task.model.params * width.gradient
        return Term("buffers", "bytes of a message·(messages out and in, and a server's inboxes)",
                    f"{each}·{nbytes // each}" if inboxes else f"{nbytes}", nbytes)  # fmt: skip
    if not nbytes:
        return Term("buffers", "none", "0", 0)
    rows = rows_of(task, candidate, one.bytes.stage)
    parts = [-(-row // mesh.data) for row in rows]
    stage = int(strategy[-1])
    several = stage == 1 or candidate.micro_batches(task) > 1
    turns = heapq.nlargest(TURNS, (part * mesh.data for part in parts)) if stage > 1 else []
    results = waiting([part * width.gradient for part in parts]) if several else 0
    after = max(parts) if stage < 3 else 0  # noqa: PLR2004 - a stage
    return Term(
        "buffers",
        f"{width.gradient} B·(rows filled by turns) + results on their way + "
        f"{PARTS_AFTER_STEP} parts after the step",
        f"{width.gradient}·({' + '.join(map(str, turns)) or 0}) + {results} + "
        f"{PARTS_AFTER_STEP}·{after}·{width.parameter}",
        nbytes,
    )


def _activations(task: Task, one: Planned) -> Iterator[Term]:
    candidate, stage = one.candidate, one.bytes.stage
    mesh, kept, model = candidate.mesh, candidate.kept(task), task.model
    flying = min(candidate.micro_batches(task), mesh.pp - stage)
    layers, last = model.layers // mesh.pp, stage == mesh.pp - 1
    tokens = candidate.micro_batch * task.sequence // mesh.cp
    each = kept_by_layer(model, candidate.micro_batch, task.sequence, kept)
    around = kept_around(model, candidate.micro_batch, task.sequence, kept, last=last)
    between, inputs, inner = kept_of_token(model, task.sequence, kept)
    spread = mesh.tp if kept.sequence_parallel else 1
    formula = "t·(norms/sp + inputs + inside of attention and perceptron/tp)"
    if kept.recompute == "full":
        formula = "t·(the input of the layer/sp)"
    numbers = f"{tokens}·({between}/{spread} + {inputs} + {inner}/{mesh.tp})"
    yield Term("a layer keeps", formula, numbers, each)
    formula, numbers = "t·8 B", f"{tokens}·8"
    if last:
        formula = "t·(8 B for a token and for its target + the last norm + 4 B for each logit/tp)"
        norm = 2 * model.hidden * kept.itemsize + 8
        numbers = f"{tokens}·(8 + 8 + {norm} + 4·{model.vocabulary}/{mesh.tp})"
    yield Term("around layers", formula, numbers, around)
    again = one.bytes.activations - flying * (layers * each + around)
    more = f" + {again}" if again else ""
    yield Term("activations", "micro-batches in flight·(layers·a layer + around)"
               + (" + one layer computed again" if again else ""),
               f"{flying}·({layers}·{each} + {around}){more}", one.bytes.activations)  # fmt: skip


def _seconds(task: Task, one: Planned) -> Iterator[Term]:
    candidate, time, cluster = one.candidate, one.time, task.cluster
    mesh, model = candidate.mesh, task.model
    volumes, groups = volumes_of(task, candidate), groups_of(task, candidate)
    count = candidate.micro_batches(task)
    rate = f"({cluster.flops[candidate.precision]:g}·{task.mfu:g})"
    parts = mesh.tp * mesh.cp * mesh.pp
    yield Term("forward", "micro-batches·(2Ψt + 2Lsht)/parts/(peak·mfu)",
               f"{count}·(2·{model.params}·{volumes.tokens} + 2·{model.layers}·{task.sequence}·"
               f"{model.hidden}·{volumes.tokens})/{parts}/{rate}",
               time.forward, "seconds")  # fmt: skip
    yield Term("backward", "2·forward", f"2·{time.forward:.9g}", time.backward, "seconds")
    if time.recompute:
        yield Term(
            "recompute", "forward once more", f"{time.forward:.9g}", time.recompute, "seconds"
        )
    width = candidate.widths(task)
    moved = width.parameter + width.gradient + 2 * width.optimizer
    owners = mesh.data if candidate.strategy.startswith("zero") else 1
    yield Term("update", "bytes that the optimizer reads and writes / memory's bandwidth",
               f"{volumes.numel}/{owners}·{moved}/({FOLD_TRAFFIC}·{cluster.reduce_bandwidth:g})",
               time.update, "seconds")  # fmt: skip
    if mesh.tp > 1:
        sums = 6 if candidate.recompute == "full" else 4
        each = all_reduce(cluster, groups.tensor, volumes.activation)
        yield Term("tp waits", "micro-batches·layers·sums of activations·all-reduce",
                   f"{count}·{volumes.layers}·{sums}·{each:.9g}", time.tensor,
                   "seconds")  # fmt: skip
    if mesh.cp > 1:
        hop = one_message(cluster, groups.context, volumes.keys_values)
        inner = volumes.attention / task.rate(candidate.precision)
        yield Term("cp waits", "micro-batches·layers·(hops beyond attention, forward and backward)",
                   f"{count}·{volumes.layers}·(max(0, {mesh.cp - 1}·{hop:.9g} - {inner:.9g}) + "
                   f"max(0, {2 * mesh.cp - 1}·{hop:.9g} - 2·{inner:.9g}))",
                   time.context, "seconds")  # fmt: skip
    if mesh.pp > 1:
        each = (time.forward + time.backward + time.recompute + time.tensor + time.context) / count
        yield Term("bubble", "(p - 1)·a micro-batch", f"{mesh.pp - 1}·{each:.9g}", time.bubble,
                   "seconds")  # fmt: skip
        hop = one_message(cluster, groups.stages, volumes.message)
        yield Term("pp waits", "messages in a row·one message",
                   f"{messages_in_a_row(mesh.pp, count)}·{hop:.9g}", time.pipeline,
                   "seconds")  # fmt: skip
    yield from _along_data(task, one, groups.data)
    spent = " + ".join(f"{part:.9g}" for part in (time.compute, time.bubble, time.communication))
    yield Term("step", "computed + bubble + waited for", spent, time.total, "seconds")


def _along_data(task: Task, one: Planned, group: RankGroup) -> Iterator[Term]:
    candidate, cluster, time = one.candidate, task.cluster, one.time
    volumes, item = volumes_of(task, candidate), PRECISIONS[candidate.precision]
    strategy, count = candidate.strategy, candidate.micro_batches(task)
    if group.size == 1 or strategy.startswith("ps"):
        return
    row = volumes.numel * item / volumes.buckets
    of = f"one of {volumes.buckets}, {group.inside} x {group.hosts} ranks: latencies + bytes/B"
    scatter, gather = (call(cluster, group, row) for call in (reduce_scatter, all_gather))
    yield Term("reduce-scatter", f"{of} + bytes/fold", _spelled(cluster, group, row, folds=True),
               scatter, "seconds")  # fmt: skip
    yield Term("all-gather", of, _spelled(cluster, group, row, folds=False), gather, "seconds")
    ahead, back = time.forward / count, (time.backward + time.recompute) / count
    parts = volumes.buckets

    def beside(each: float, computed: float) -> str:
        return f"max({each:.9g}, {parts}·{each:.9g} - {computed:.9g})"

    if strategy == "ddp":
        formula, numbers = "max(both, buckets·both - backward)", beside(scatter + gather, back)
    elif strategy == "zero3":
        formula = "micro-batches·(gathers beyond forward + gathers and scatters beyond backward)"
        numbers = f"{count}·({beside(gather, ahead)} + {beside(scatter + gather, back)})"
    else:
        passes = count if strategy == "zero2" else 1
        formula = "passes·scatters beyond backward + buckets·gather after the step"
        numbers = f"{passes}·{beside(scatter, back)} + {parts}·{gather:.9g}"
    yield Term("dp waits", formula, numbers, time.data, "seconds")


def _spelled(cluster: Cluster, group: RankGroup, nbytes: float, *, folds: bool) -> str:
    """Write a collective's time as arithmetic: inside hosts, then between them."""
    found = []
    fold = f" + {{0:.9g}}/{cluster.reduce_bandwidth:g}" if folds else ""
    if group.inside > 1:
        part = nbytes * (group.inside - 1) / group.inside
        found.append(f"{cluster.latency:g} + {part:.9g}/{cluster.bandwidth:g}" + fold.format(part))
    if group.hosts > 1:
        steps, sent = rounds_between(cluster, group, nbytes / group.inside, folds=folds)
        across = across_bandwidth(cluster, group.inside, group.sharing)
        found.append(f"{steps}·{across_latency(cluster):.9g} + {sent:.9g}/{across:g}"
                     + fold.format(sent))  # fmt: skip
    return " + ".join(found)
