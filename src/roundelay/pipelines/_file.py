"""Pipeline schedules as JSON, both ways, with limits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

from roundelay.errors import ScheduleError
from roundelay.pipelines._base import (
    KINDS,
    MOST_ACTIONS,
    MOST_MICRO_BATCHES,
    MOST_RANKS,
    MOST_STAGES,
    PipelineAction,
    PipelineSchedule,
)
from roundelay.schedule.strict_json import DocumentPath, is_name, parse, read

VERSION = 1
FIELDS = ("roundelay_pipeline", "name", "micro_batches", "placement", "ranks")
REQUIRED = ("roundelay_pipeline", "micro_batches", "ranks")


def pipeline_to_json(schedule: PipelineSchedule) -> str:
    """Write a pipeline schedule as JSON, one action per line.

    >>> from roundelay.pipelines import pipeline_called
    >>> print(pipeline_to_json(pipeline_called("gpipe")(1, 1)), end="")
    {
     "roundelay_pipeline": 1,
     "name": "gpipe",
     "micro_batches": 1,
     "placement": [0],
     "ranks": [
      [
       {"kind": "forward", "stage": 0, "micro_batch": 0},
       {"kind": "backward", "stage": 0, "micro_batch": 0}
      ]
     ]
    }
    """
    place = DocumentPath(schedule.name if is_name(schedule.name) else "pipeline")
    place.inside("name").name(schedule.name)
    ranks = ",\n".join(
        "  [\n" + ",\n".join(f"   {json.dumps(action._asdict())}" for action in actions) + "\n  ]"
        if actions
        else "  []"
        for actions in schedule.ranks
    )
    head = {
        "roundelay_pipeline": VERSION,
        "name": schedule.name,
        "micro_batches": schedule.micro_batches,
        "placement": list(schedule.placement),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    return "\n".join(["{", *lines, f' "ranks": [\n{ranks}\n ]', "}", ""])


def pipeline_from_json(text: str | bytes, *, place: str = "pipeline") -> PipelineSchedule:
    """Read a pipeline schedule; whatever is wrong raises `ScheduleError` that says where.

    The form is checked, and the limits; the meaning is for `prove_pipeline`.

    >>> pipeline_from_json('{"roundelay_pipeline": 1, "micro_batches": 0, "ranks": []}')
    Traceback (most recent call last):
        ...
    roundelay.errors.ScheduleError: pipeline: micro_batches: must be a whole number from 1 to 65536, not 0
    """  # noqa: E501 - as it is said
    top = DocumentPath(place)
    value = parse(text, top)
    top.keys(value, known=FIELDS, required=REQUIRED)
    document = cast("dict[str, object]", value)
    top.inside("roundelay_pipeline").whole(document["roundelay_pipeline"], VERSION, VERSION)
    stem = Path(place).stem
    name = top.inside("name").name(document.get("name", stem if is_name(stem) else "pipeline"))
    count = top.inside("micro_batches").whole(document["micro_batches"], 1, MOST_MICRO_BATCHES)
    ranks = top.inside("ranks")
    listed = ranks.list(document["ranks"], MOST_RANKS)
    if not listed:
        ranks.fail("is empty; a pipeline has a rank at least")
    placement = _placement(document.get("placement"), top.inside("placement"), len(listed))
    actions, left = [], MOST_ACTIONS
    for rank, items in enumerate(listed):
        mine = ranks.item(rank)
        actions.append(_actions(mine.list(items, left), mine, len(placement), count))
        left -= len(actions[-1])
    try:
        return PipelineSchedule(actions, count, placement=placement, name=name)
    except ScheduleError as error:
        top.fail(error.problem)


def save_pipeline(schedule: PipelineSchedule, path: str | os.PathLike[str]) -> None:
    """Write a pipeline schedule to a file."""
    text = pipeline_to_json(schedule)
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ScheduleError(
            os.fspath(path), f"can't be written: {error.strerror or error}"
        ) from error


def load_pipeline(path: str | os.PathLike[str]) -> PipelineSchedule:
    """Read a pipeline schedule from a file; it is called after the file if it has no name."""
    place = os.fspath(path)
    return pipeline_from_json(read(path, DocumentPath(place)), place=place)


def _placement(value: object, place: DocumentPath, size: int) -> list[int]:
    if value is None:
        return list(range(size))
    items = place.list(value, MOST_STAGES)
    return [place.item(stage).whole(rank, 0, size - 1) for stage, rank in enumerate(items)]


def _actions(
    items: list[object], place: DocumentPath, stages: int, micro_batches: int
) -> list[PipelineAction]:
    found = []
    for index, item in enumerate(items):
        where = place.item(index)
        where.keys(item, known=PipelineAction._fields, required=PipelineAction._fields)
        fields = cast("dict[str, object]", item)
        kind = next((known for known in KINDS if known == fields["kind"]), None)
        if kind is None:
            where.field("kind").fail(f"must be {' or '.join(map(repr, KINDS))}")
        stage = where.field("stage").whole(fields["stage"], 0, stages - 1)
        number = where.field("micro_batch").whole(fields["micro_batch"], 0, micro_batches - 1)
        found.append(PipelineAction(kind, stage, number))
    return found
