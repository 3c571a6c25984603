"""A plan as JSON: what the table shows, and all that it leaves out."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from roundelay.html_table import html_table
from roundelay.language import Language
from roundelay.planning.model import counted
from roundelay.planning.reason import four_digits, gigabytes, reason
from roundelay.planning.search import Planned, TrainingPlan
from roundelay.planning.why import why
from roundelay.planning.why_chinese import in_chinese

__all__ = ["as_document", "option_document", "plan_html"]

Json = dict[str, Any]  # JSON of any shape


def option_document(one: Planned) -> Json:
    """Return one way to train: what it is, its bytes, its seconds."""
    candidate, held, time = one.candidate, one.bytes.held, one.time
    return {
        "strategy": candidate.strategy,
        "precision": candidate.precision,
        "mesh": asdict(candidate.mesh),
        "micro_batch": candidate.micro_batch,
        "recompute": candidate.recompute,
        "fits": one.fits,
        "spare": one.spare,
        "bytes": {
            "parameters": held.parameters,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "activations": one.bytes.activations,
            "transient": one.bytes.transient,
            "gathered": one.bytes.gathered,
            "total": one.bytes.total,
        },
        "seconds": {
            **{name: getattr(time, name)
               for name in ("forward", "backward", "recompute", "bubble", "update", "data",
                            "tensor", "context", "pipeline", "total", "hidden")},
        },
        "communication_share": time.share,
        "sent": time.sent,
        "tokens_per_second": one.tokens_per_second,
    }  # fmt: skip


def as_document(
    found: TrainingPlan,
    shown: list[Planned],
    *,
    reasons: bool = False,
    language: Language = "en",
) -> Json:
    """Return a plan with the rows that were asked for; `reasons` adds each formula of the best."""
    task, best = found.task, found.best
    model = task.model
    document: Json = {
        "roundelay_plan": 1,
        "model": {
            "params": model.params,
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "vocabulary": model.vocabulary,
        },
        "network": task.cluster.name,
        "gpus": task.gpus,
        "memory": task.memory,
        "batch": task.batch,
        "sequence": task.sequence,
        "mfu": task.mfu,
        "optimizer": task.optimizer,
        "looked_at": len(found.options),
        "fitting": sum(one.fits for one in found.options),
        "best": None if best is None else option_document(best),
        "reason": reason(found, language),
        "options": [option_document(one) for one in shown],
    }
    if reasons:
        terms = why(task, best or found.nearest)
        document["why"] = [asdict(in_chinese(term) if language == "zh" else term) for term in terms]
    return document


def plan_html(found: TrainingPlan) -> str:
    """Return the table as HTML: each strategy along dp, then the quickest meshes; the best bold."""
    rows = [one for section in found.shown() for one in section]
    head = ["strategy", "mesh", "rows", "parameters", "gradients", "optimizer",
            "activations", "transient", "total", "spare", "step (s)", "waits"]  # fmt: skip
    several = len({one.candidate.precision for one in rows}) > 1
    words = [_words(one, several) for one in rows]
    task = found.task
    gpus = counted(task.gpus, "GPU")
    title = f"{four_digits(task.model.params)} parameters on {gpus}, {task.cluster.name}"
    at = next((at for at, one in enumerate(rows) if one is found.best), None)
    notes = [f"Best: {reason(found)}"] if found.best is not None else ["Nothing fits."]
    return html_table(head, words, title=title, notes=notes, marked=at)


def _words(one: Planned, several: bool) -> list[str]:  # noqa: FBT001 - precisions
    candidate, held = one.candidate, one.bytes.held
    parts = (held.parameters, held.gradients, held.optimizer, one.bytes.activations,
             one.bytes.transient, one.bytes.total)  # fmt: skip
    again = "*" if candidate.recompute == "full" else ""
    sign = "+" if one.fits else "-"
    return [candidate.strategy + several * f", {candidate.precision}", str(candidate.mesh),
            f"{candidate.micro_batch}{again}", *map(gigabytes, parts),
            f"{sign}{gigabytes(abs(one.spare))}", f"{one.time.total:.3g}",
            f"{100 * one.time.share:.1f} %"]  # fmt: skip
