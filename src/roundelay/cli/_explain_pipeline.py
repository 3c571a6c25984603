"""`roundelay explain pipeline`: the timeline of a pipeline schedule, with its bubble."""

from __future__ import annotations

from pathlib import Path

import click

from roundelay.cli._types import console_for, glyphs_option, language_option
from roundelay.cli._write import check_out, write_text
from roundelay.errors import InvalidArgumentError
from roundelay.pipelines import (
    DEFAULT_MICRO_BATCHES,
    DEFAULT_STAGES,
    StageCosts,
    bubble_formula,
    load_pipeline,
    pipeline_for,
    pipeline_to_json,
)
from roundelay.view.languages import Language
from roundelay.view.pipeline_picture import PipelinePicture, pipeline_picture
from roundelay.view.terminal_text import Glyphs

MOST_BOXES = 50_000

EXAMPLES = """\b
Examples:
  roundelay explain pipeline --schedule 1f1b --stages 4 --micro-batches 8
  roundelay explain pipeline --schedule interleaved-1f1b --stages 8 -n 4
  roundelay explain pipeline --schedule zb-h1 --costs 1,1,1 --out zb.svg
  roundelay explain pipeline --schedule mine.json
"""


@click.command("explain pipeline", epilog=EXAMPLES)
@click.option(
    "--schedule",
    "word",
    default="1f1b",
    show_default=True,
    metavar="NAME",
    help="gpipe, 1f1b, interleaved-1f1b, zb-h1, or your own FILE.json.",
)
@click.option("--stages", type=int, help=f"How many stages.  [default: {DEFAULT_STAGES}]")
@click.option("-n", "--size", type=int, help="How many ranks; as many as stages, or half.")
@click.option(
    "--micro-batches",
    type=int,
    help=f"Into how many a batch is cut.  [default: {DEFAULT_MICRO_BATCHES}]",
)
@click.option(
    "--costs",
    default="1,1,1",
    show_default=True,
    metavar="F,B,W",
    help="Time of forward, gradient of the input, gradients of the weights.",
)
@click.option(
    "--transfer", type=float, default=0.0, show_default=True, help="Time from rank to rank."
)
@language_option
@click.option("--rank-name", default="GPU", show_default=True, help="What to call a rank.")
@glyphs_option
@click.option(
    "-o",
    "--out",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Write FILE.html, .svg or .json instead; may be given several times.",
)
def command(
    *,
    word: str,
    stages: int | None,
    size: int | None,
    micro_batches: int | None,
    costs: str,
    transfer: float,
    rank_name: str,
    language: Language,
    glyphs: Glyphs,
    out: tuple[Path, ...],
) -> None:
    """Show which rank computes what when, how much of the time is bubble, and what is kept."""
    for path in out:
        check_out(path, several=False)
    each = _costs(costs)
    formula = ""
    if word.endswith(".json"):
        if (stages, size, micro_batches) != (None, None, None):
            raise InvalidArgumentError(
                f"--schedule {word} says all that itself. Leave out --stages, -n and "
                f"--micro-batches."
            )
        schedule = load_pipeline(word)
    else:
        schedule = pipeline_for(word, stages=stages, size=size, micro_batches=micro_batches)
        formula = "" if transfer else bubble_formula(word, schedule, each)
    boxes = sum(map(len, schedule.ranks))
    if boxes > MOST_BOXES:
        raise InvalidArgumentError(
            f"{schedule.name} has {boxes} actions: too many to draw. Take fewer micro-batches."
        )
    picture = pipeline_picture(
        schedule, each, transfer=transfer, formula=formula, rank_name=rank_name, language=language
    )
    for path in out:
        _write(path, picture)
    if not out:
        from roundelay.view.pipeline_terminal import pipeline_lines  # noqa: PLC0415 - seldom both

        console = console_for()
        for line in pipeline_lines(picture, width=console.width, glyphs=glyphs):
            console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _costs(text: str) -> StageCosts:
    try:
        forward, inputs, weights = (float(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgumentError(
            f"--costs takes three numbers, F,B,W, as in 1,1,1, not '{text}'."
        ) from None
    return StageCosts(forward, inputs, weights)


def _write(path: Path, picture: PipelinePicture) -> None:
    from roundelay.view.pipeline_svg import pipeline_html, pipeline_svg  # noqa: PLC0415 - see above

    kind = path.suffix.lower()
    if kind == ".json":
        again = f"draw it again with: roundelay explain pipeline --schedule {path}"
        write_text(path, pipeline_to_json(picture.schedule), again)
    else:
        write_text(path, pipeline_html(picture) if kind == ".html" else pipeline_svg(picture))
