"""The view Training: the same batch through every strategy, as one step."""

from __future__ import annotations

from roundelay.networks import cluster_called, cluster_names
from roundelay.view.training_step import STRATEGY_NAMES, StepChoices, step_document
from roundelay.view.training_step.choices import (
    MOST_LAYERS,
    MOST_RANKS,
    MOST_STALENESS,
    SHOWN_PRECISIONS,
    SLOWNESS,
)
from roundelay.view.training_step.words import strategy_names
from roundelay.web.query import Query
from roundelay.web.view import Document, View

__all__ = ["training"]

NOBODY = "none"
USUAL = StepChoices()


def clusters_shown() -> list[str]:
    """Return the clusters that say what a rank computes in every precision that is shown."""
    return [name for name in cluster_names()
            if {*SHOWN_PRECISIONS} <= {*cluster_called(name).flops}]  # fmt: skip


def _choices(query: Query) -> Document:
    """Return what can be chosen."""
    names = strategy_names(query.language)
    return {
        "strategies": [{"name": name, "words": names[name]} for name in STRATEGY_NAMES],
        "precisions": SHOWN_PRECISIONS,
        "clusters": clusters_shown(),
        "cluster": USUAL.cluster,
        "most": {"ranks": MOST_RANKS, "layers": MOST_LAYERS, "staleness": MOST_STALENESS},
        "slowness": SLOWNESS,
    }


def _step(query: Query) -> Document:
    """Return one step under one strategy."""
    ranks = query.whole("ranks", USUAL.ranks, low=1, high=MOST_RANKS)
    late = query.choice("straggler", [NOBODY, *map(str, range(ranks))])
    choices = StepChoices(
        strategy=query.choice("strategy", STRATEGY_NAMES),
        ranks=ranks,
        layers=query.whole("layers", USUAL.layers, low=1, high=MOST_LAYERS),
        buckets=query.whole("buckets", USUAL.buckets, low=1, high=MOST_LAYERS),
        precision=query.choice("precision", SHOWN_PRECISIONS, USUAL.precision),
        straggler=None if late == NOBODY else int(late),
        staleness=query.whole("staleness", USUAL.staleness, low=0, high=MOST_STALENESS),
        cluster=query.choice("cluster", clusters_shown(), USUAL.cluster),
    )
    return step_document(choices, query.language)


training = View(name="training", answers={"choices": _choices, "step": _step})
