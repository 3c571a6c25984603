"""`roundelay export`: a checkpoint as one safetensors file, or in torch's own form."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["command"]

EXAMPLE = """\b
Examples:
  roundelay export runs/step-3000 model.safetensors --dtype bf16
  roundelay export runs/step-3000 for-torch --form dcp
"""


@click.command("export", epilog=EXAMPLE)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--form",
    type=click.Choice(["safetensors", "dcp"]),
    default="safetensors",
    show_default=True,
    help="One file with the weights, or a folder for torch.distributed.checkpoint.",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp64", "fp32", "bf16", "fp16"]),
    help="Of floating-point weights.",
)
def command(checkpoint: Path, out: Path, *, form: str, dtype: str | None) -> None:
    """Write a CHECKPOINT of rd.save once more, for others to read.

    OUT is a file whose name ends in .safetensors, or with --form dcp a new folder.
    """
    from roundelay.training.checkpoint.export import export  # noqa: PLC0415 - torch, only for this command

    click.echo(str(export(checkpoint, out, form=form, dtype=dtype)))
