"""The view *Axes*: the cube of a product, pipelines, attention over ranks, a mesh of them all."""

from __future__ import annotations

from functools import lru_cache

from roundelay.contraction import DIMS, cut_along, shortest_lengths
from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.parallel.context.plan import LAYOUTS, METHODS
from roundelay.pipelines import StageCosts, bubble_formula, pipeline_called, pipeline_for, pipelines
from roundelay.view.attention import ring_picture, ulysses_picture
from roundelay.view.attention_svg import attention_frames
from roundelay.view.cube import cube_picture, cube_words
from roundelay.view.cube_svg import cube_svg
from roundelay.view.drawing import parted
from roundelay.view.languages import Language
from roundelay.view.mesh_svg import AXIS_ORDER, axis_words, mesh_svg
from roundelay.view.pipeline_picture import pipeline_picture
from roundelay.view.pipeline_svg import pipeline_svg
from roundelay.web.query import Query
from roundelay.web.view import Document, View

__all__ = ["axes"]

MOST_CUT = 4  # ranks of one cut
MOST_STAGES, MOST_MICRO_BATCHES = 16, 32
MOST_ATTENTION = 16
MOST_ALONG = 8  # ranks of one axis
MOST_MESH = 64
NO_SECOND = "-"


def _choices(query: Query) -> Document:
    """Return what there is to choose from."""
    del query
    words = sorted(maker.word for maker in pipelines)
    return {
        "dims": list(DIMS),
        "schedules": words,
        "interleaves": [word for word in words if pipeline_called(word).interleaves],
        "methods": list(METHODS),
        "layouts": list(LAYOUTS),
        "axes": list(AXIS_ORDER),
        "most": {"cut": MOST_CUT, "stages": MOST_STAGES, "micro_batches": MOST_MICRO_BATCHES,
                 "attention": MOST_ATTENTION, "along": MOST_ALONG, "mesh": MOST_MESH},
    }  # fmt: skip


def _cube(query: Query) -> Document:
    """Return a matrix product that is cut and was run, with a frame for each product of it."""
    dims = [query.choice("split", tuple(DIMS))]
    ranks = [query.whole("ranks", 2, low=1, high=MOST_CUT)]
    second = query.choice("second", (NO_SECOND, *DIMS))
    count = query.whole("ranks2", 2, low=1, high=MOST_CUT)
    if second != NO_SECOND:
        dims.append(second)
        ranks.append(count)
    return _cube_document(tuple(dims), tuple(ranks), query.language)


@lru_cache(maxsize=64)
def _cube_document(dims: tuple[str, ...], ranks: tuple[int, ...], language: Language) -> Document:
    cube = cut_along(list(dims), list(ranks), shortest_lengths(dims, ranks))
    from roundelay.launch.cut_matmul import run_cube  # noqa: PLC0415 - needs the native core

    picture = cube_picture(cube, run_cube(cube), language)
    drawing, style = parted(cube_svg(picture))
    return {
        "title": picture.title,
        "svg": drawing,
        "style": style,
        "frames": cube_words(picture),
        "command": f"roundelay explain matmul --split {','.join(dims)} "
        f"-n {','.join(map(str, ranks))}",
    }


def _pipeline(query: Query) -> Document:
    """Return the timeline of a schedule."""
    word = query.choice("schedule", sorted(maker.word for maker in pipelines), "1f1b")
    size = query.whole("ranks", 4, low=1, high=MOST_STAGES)
    count = query.whole("micro_batches", 8, low=1, high=MOST_MICRO_BATCHES)
    costs = StageCosts(1.0, 1.0, 1.0)
    schedule = pipeline_for(word, size=size, micro_batches=count)
    formula = bubble_formula(word, schedule, costs)
    picture = pipeline_picture(schedule, costs, formula=formula, language=query.language)
    drawing, style = parted(pipeline_svg(picture))
    return {
        "title": picture.title,
        "svg": drawing,
        "style": style,
        "bubble": picture.price.bubble,
        "makespan": picture.price.makespan,
        "peak": max(picture.peaks),
        "command": f"roundelay explain pipeline --schedule {word} -n {size} --stages "
        f"{schedule.stages} --micro-batches {count}",
    }


def _attention(query: Query) -> Document:
    """Return who computes which part of attention, step by step."""
    method = query.choice("method", METHODS)
    layout = query.choice("layout", LAYOUTS)
    causal = query.choice("mask", ("causal", "full")) == "causal"
    size = query.whole("ranks", 4, low=1, high=MOST_ATTENTION)
    make = ring_picture if method == "ring" else ulysses_picture
    picture = make(size, layout, causal=causal, language=query.language)
    drawn = [parted(svg) for svg in attention_frames(picture)]
    return {
        "title": picture.title,
        "about": picture.about,
        "ending": picture.ending,
        "style": drawn[0][1],
        "frames": [
            {"svg": svg, "head": frame.head, "told": " ".join(frame.told)}
            for (svg, _), frame in zip(drawn, picture.frames, strict=True)
        ],
        "command": f"roundelay explain attention --method {method} --layout {layout} "
        f"--{'causal' if causal else 'full'} -n {size}",
    }


def _mesh(query: Query) -> Document:
    """Return a mesh, with the groups along one of its axes."""
    usual = {"pp": 2, "dp": 2, "cp": 1, "tp": 2}
    lengths = {name: query.whole(name, usual[name], low=1, high=MOST_ALONG) for name in AXIS_ORDER}
    along = query.choice("along", AXIS_ORDER, "tp")
    size = 1
    for count in lengths.values():
        size *= count
    if size > MOST_MESH:
        raise InvalidArgumentError(
            f"A mesh of {rank_count(size)} is too much to draw. Take {MOST_MESH} or fewer."
        )
    drawing, style = parted(mesh_svg(lengths, along, query.language))
    named = ", ".join(f"{name}={count}" for name, count in lengths.items() if count > 1) or "dp=1"
    return {
        "svg": drawing,
        "style": style,
        "words": axis_words(lengths, along, query.language),
        "command": f"rd.Mesh({named}, comm=comm)",
        "size": size,
    }


axes = View(
    name="axes",
    answers={
        "choices": _choices,
        "cube": _cube,
        "pipeline": _pipeline,
        "attention": _attention,
        "mesh": _mesh,
    },
)
