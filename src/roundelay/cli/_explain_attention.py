"""`roundelay explain attention`: who computes which part of attention, step by step."""

from __future__ import annotations

from pathlib import Path

import click

from roundelay.cli._types import language_option, wants_ascii
from roundelay.cli._write import write_text
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.context.plan import LAYOUTS, METHODS
from roundelay.view.attention import AttentionPicture, lines, ring_picture, ulysses_picture
from roundelay.view.attention_svg import attention_html, attention_svg
from roundelay.view.languages import Language

MOST_RANKS = 32  # whose squares can be told apart

EXAMPLES = """\b
Examples:
  roundelay explain attention                         ring, 4 ranks, causal
  roundelay explain attention --layout zigzag -n 8
  roundelay explain attention --method ulysses
  roundelay explain attention --layout both --out attention.svg
"""


@click.command("attention", epilog=EXAMPLES)
@click.option("--method", type=click.Choice(METHODS), default="ring", show_default=True,
              help="How queries meet the keys of other ranks.")  # fmt: skip
@click.option("--layout", type=click.Choice([*LAYOUTS, "both"]), default="contiguous",
              show_default=True, help="How the sequence is divided.")  # fmt: skip
@click.option("--causal/--full", default=True, show_default=True, help="Which keys a query sees.")
@click.option("-n", "--size", type=int, default=4, show_default=True, help="How many ranks.")
@language_option
@click.option("--ascii", "ascii_only", is_flag=True, help="Plain ASCII only.")
@click.option("-o", "--out", multiple=True, type=click.Path(path_type=Path),
              help="Write FILE.html or .svg instead; may be given several times.")  # fmt: skip
def command(
    *,
    method: str,
    layout: str,
    causal: bool,
    size: int,
    language: Language,
    ascii_only: bool,
    out: tuple[Path, ...],
) -> None:
    """Show who computes which part of attention in every step, and whose keys it has."""
    if not 1 <= size <= MOST_RANKS:
        raise InvalidArgumentError(f"explain attention draws 1 to {MOST_RANKS} ranks, not {size}.")
    picture = ring_picture if method == "ring" else ulysses_picture
    names = LAYOUTS if layout == "both" else (layout,)
    pictures = [picture(size, name, causal=causal, language=language) for name in names]
    for path in out:
        _write(path, pictures)
    if not out:
        plain = wants_ascii(asked=ascii_only)
        click.echo("\n\n".join("\n".join(lines(each, ascii_only=plain)) for each in pictures))


def _write(path: Path, pictures: list[AttentionPicture]) -> None:
    kind = path.suffix.lower()
    if kind not in (".svg", ".html") or (kind == ".html" and len(pictures) > 1):
        raise InvalidArgumentError(
            f"--out {path}: the name must end in .svg (a drawing), or in .html (a page to step "
            f"through one layout)."
        )
    write_text(path, attention_svg(pictures) if kind == ".svg" else attention_html(pictures[0]))
