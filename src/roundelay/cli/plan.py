"""`roundelay plan`: which strategy and mesh for a model, what a rank holds, what a step takes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from roundelay.cli import _choose as choose
from roundelay.cli._plan_table import print_plan, print_why
from roundelay.cli._script import function_at
from roundelay.cli._types import (
    COUNT,
    NBYTES,
    FiniteRange,
    console_for,
    glyphs_option,
    json_option,
)
from roundelay.cli._write import check_place, write_text
from roundelay.errors import DoesNotFitError, InvalidArgumentError, RoundelayError
from roundelay.planning import (
    MOST_GPUS,
    OPTIMIZERS,
    USUAL_SEQUENCE,
    ModelShape,
    PlanChoices,
    Task,
    advice,
    as_document,
    asked_choices,
    asked_task,
    check_heads,
    plan,
    scaling,
    transformer,
)
from roundelay.view.chart import chart
from roundelay.view.plan_chart import scaling_words
from roundelay.view.terminal_chart import terminal_chart
from roundelay.view.terminal_text import ASCII, Glyphs, safe

__all__ = ["command"]

IN_TERMINAL = "-"
WIDEST = 100  # columns of a chart

EXAMPLES = """\b
Examples:
  roundelay plan --params 7.5e9 --layers 32 --hidden 4096 --gpus 64 --network h100-ib
  roundelay plan --params 70B --gpus 512 --sequence 8192 --plot
  roundelay plan --model train.py:make_model --gpus 8 --memory 24GB --why
  roundelay plan --params 7.5e9 --gpus 64 --strategy zero2 --mesh tp=2 --json
"""


@click.command("plan", epilog=EXAMPLES)
@click.option("--params", type=COUNT, help="Parameters of the model: 7.5e9, 7.5B.")
@click.option("--layers", type=click.IntRange(1, 100_000), help="Its layers.")
@click.option("--hidden", type=click.IntRange(1, 1 << 24), help="Its width.")
@click.option("--heads", type=click.IntRange(1), help="Heads of attention.  [default: 128 wide]")
@click.option("--vocab", type=click.IntRange(1), help="Tokens that it knows.")
@click.option("--model", "script", metavar="FILE.py:FUNCTION", help="Count a real torch model.")
@click.option("--sequence", type=click.IntRange(1), default=USUAL_SEQUENCE, show_default=True,
              help="Tokens in a row.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1),
              help="Rows in a step, of all ranks together.  [default: 4 Mi tokens]")  # fmt: skip
@click.option("--gpus", type=click.IntRange(1, MOST_GPUS), required=True, help="How many ranks.")
@click.option("--memory", type=NBYTES, help="Of each: 80GB.  [default: as the network's GPUs]")
@click.option("--network", default="h100-ib", show_default=True, metavar="NAME",
              help="A cluster: a name, or a file; `bench --fit` measures this host's.")  # fmt: skip
@click.option("--flops", type=COUNT, help="Of one GPU at its peak; the network's file has them.")
@click.option("--mfu", type=FiniteRange(0, 1, min_open=True), default=0.4, show_default=True,
              help="The share of the peak that matrix products reach.")  # fmt: skip
@click.option("--strategy", "strategies", multiple=True, help="Only this one; may be repeated.")
@click.option("--precision", "precisions", multiple=True, help="Only this one; may be repeated.")
@click.option("--mesh", metavar="AXES", help="Fix axes: tp=4,pp=2.")
@click.option("--micro-batch", type=click.IntRange(1), multiple=True, help="Rows at a time.")
@click.option("--recompute", type=click.Choice(["none", "selective", "full"]),
              help="What backward computes again.  [default: whichever is quicker]")  # fmt: skip
@click.option("--optimizer", type=click.Choice(sorted(OPTIMIZERS)), default="adam",
              show_default=True)  # fmt: skip
@click.option("--bucket", type=NBYTES, default="32MiB", show_default=True,
              help="Bytes of gradients that are sent together.")  # fmt: skip
@click.option("--rows", "most", type=click.IntRange(0), default=8, show_default=True,
              help="How many rows with other axes than dp.")  # fmt: skip
@click.option("--why", "asked_why", is_flag=True, help="Each formula of the best, with numbers.")
@click.option("--plot", "drawing", is_flag=False, flag_value=IN_TERMINAL, metavar="[FILE.svg]",
              help="How it scales: here, or as a drawing in a file.")  # fmt: skip
@glyphs_option
@json_option
def command(
    *,
    drawing: str | None,
    asked_why: bool,
    most: int,
    as_json: bool,
    glyphs: Glyphs,
    **given: Any,  # the options above, by name
) -> None:
    """Say which strategy, mesh and micro-batch train a model quickest on so many GPUs.

    For each it computes what a rank holds (parameters, gradients, optimizer state, activations,
    buffers), whether that fits, and the seconds of a step: what is computed, and what is waited
    for. Rows with a * compute layers again in backward. `waits` is the share of the step in which
    ranks wait for communication.
    """
    file = _file(drawing)
    task, wanted = _task(given)
    found = plan(task, wanted)
    shown = [list(section) for section in found.shown(most) if section]
    if as_json:
        rows = [one for section in shown for one in section]
        click.echo(json.dumps(as_document(found, rows, reasons=asked_why), indent=1))
    else:
        print_plan(found, shown, glyphs)
        if asked_why:
            print_why(found, glyphs)
    if drawing is not None:
        _draw(task, wanted, file, glyphs, as_json=as_json)
    if found.best is None:
        raise DoesNotFitError(advice(found, wanted))


def _file(drawing: str | None) -> Path | None:
    if drawing is None or drawing == IN_TERMINAL:
        return None
    if not drawing.endswith(".svg"):
        raise InvalidArgumentError(
            f"--plot {drawing}: name a file that ends in .svg; without a name it is drawn here."
        )
    check_place(Path(drawing), example="plan.svg", option="--plot")
    return Path(drawing)


def _task(given: dict[str, Any]) -> tuple[Task, PlanChoices]:  # Any: as click read them
    axes = {}
    if given["mesh"]:
        axes = choose.options_from(re.split(r"[,\s]+", given["mesh"].strip()), where="--mesh")
    cluster = choose.cluster_from(given["network"])
    wanted = asked_choices(
        cluster,
        strategies=given["strategies"],
        precisions=given["precisions"],
        micro_batches=given["micro_batch"],
        recompute=given["recompute"],
        axes=axes,
    )
    same = ("gpus", "memory", "batch", "sequence", "mfu", "flops", "optimizer", "bucket")
    task = asked_task(_model(given), cluster, **{name: given[name] for name in same})
    return task, wanted


def _model(given: dict[str, Any]) -> ModelShape:  # Any: likewise
    words = {name: given[name] for name in ("layers", "hidden", "heads")}
    if given["script"] is None:
        params = None if given["params"] is None else round(given["params"])
        return transformer(params=params, vocabulary=given["vocab"], **words)
    if given["params"] is not None:
        raise InvalidArgumentError("--model counts the parameters itself: leave out --params.")
    try:
        from roundelay.training.count_model import count_model  # noqa: PLC0415 - needs torch

        counted = count_model(function_at(given["script"], "--model", "make_model"))
    except RoundelayError:
        raise
    except SystemExit as end:
        raise InvalidArgumentError(
            f"--model {given['script']} ended by exit({end.code!r}), without a model. It must "
            f"return a torch.nn.Module; what a script does by itself belongs under "
            f'if __name__ == "__main__":.'
        ) from end
    except Exception as error:  # whatever a stranger's script raises
        raise InvalidArgumentError(
            f"--model {given['script']} raised {type(error).__name__}: {error}. It must return a "
            f"torch.nn.Module and take no arguments; it is made on the meta device, where tensors "
            f"have no values."
        ) from error
    if given["vocab"] is not None:
        words["vocabulary"] = given["vocab"]
    said = {name: value for name, value in words.items() if value is not None}
    model = replace(counted, **said)
    if "heads" in said or "hidden" in said:
        check_heads(model.hidden, model.heads)
    return model


def _draw(
    task: Task, wanted: PlanChoices, file: Path | None, glyphs: Glyphs, *, as_json: bool
) -> None:
    curves = scaling(task, wanted)
    title, across, up = scaling_words(task)
    if file is not None:
        picture = chart(curves, title=title, across=across, up=up)
        opening = "open it in a browser, or put it in a document"
        write_text(file, picture, opening, option="--plot")
    elif not as_json:
        console = console_for()
        drawn = terminal_chart(
            curves, title=title, across=across, up=up, columns=min(console.width, WIDEST),
            ascii_only=glyphs is ASCII,
        )  # fmt: skip
        click.echo("\n".join(safe(line, glyphs) for line in ["", *drawn]))
