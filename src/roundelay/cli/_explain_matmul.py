"""`roundelay explain matmul`: a matrix product as a cube that is cut between ranks."""

from __future__ import annotations

from pathlib import Path

import click

from roundelay.cli._types import console_for, language_option, wants_ascii
from roundelay.cli._write import check_drawing, write_text
from roundelay.contraction import DIMS, Cube, cut_along, shortest_lengths
from roundelay.errors import InvalidArgumentError, RoundelayError, rank_count
from roundelay.view.cube import CubePicture, cube_picture
from roundelay.view.languages import Language

DEFAULT_RANKS = 2
MOST_RANKS, LONGEST = 16, 64
INDICES = 4  # b, s, h and o

EXAMPLES = """\b
Examples:
  roundelay explain matmul                                 batch cut in 2
  roundelay explain matmul --split rows -n 4
  roundelay explain matmul --split batch,columns -n 2,3    a grid of 2 by 3 ranks
  roundelay explain matmul --split sequence --shape 1,5,4,4 -n 3
  roundelay explain matmul --split columns --out cube.html --out cube.svg
"""


@click.command("explain matmul", epilog=EXAMPLES)
@click.option(
    "--split",
    default="batch",
    show_default=True,
    metavar="DIM[,DIM…]",
    help=f"What is cut: {', '.join(DIMS)}. Several make a grid of ranks.",
)
@click.option("-n", "--size", "ranks", metavar="N[,N…]", help="Ranks of each cut.  [default: 2]")
@click.option("--shape", metavar="B,S,H,O", help="Lengths of b, s, h and o.")
@language_option
@click.option("--ascii", "ascii_only", is_flag=True, help="Plain ASCII only.")
@click.option(
    "-o",
    "--out",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Write FILE.html or .svg instead; may be given several times.",
)
def command(
    *,
    split: str,
    ranks: str | None,
    shape: str | None,
    language: Language,
    ascii_only: bool,
    out: tuple[Path, ...],
) -> None:
    """Draw Y[b,s,o] = Σ X[b,s,h]·W[h,o] as a cube that is cut between ranks.

    Shows what each rank holds of X, W and Y, and which collective the cut forces, forward and
    backward. Ranks that are threads run it, and the result is compared with one device.
    """
    for path in out:
        check_drawing(path)
    cube = _cube(split, ranks, shape)
    from roundelay.launch.cut_matmul import run_cube  # noqa: PLC0415 - numpy, and ranks

    picture = cube_picture(cube, run_cube(cube), language)
    for path in out:
        write_text(path, _drawn(path.suffix.lower(), picture))
    if not out:
        from roundelay.view.cube_terminal import cube_text  # noqa: PLC0415 - only here

        console_for().print(cube_text(picture, ascii_only=wants_ascii(asked=ascii_only)))
    if not picture.agrees:
        raise RoundelayError(picture.verdict)


def _cube(split: str, ranks: str | None, shape: str | None) -> Cube:
    dims = [dim.strip().lower() for dim in split.split(",")]
    sizes = [DEFAULT_RANKS] * len(dims) if ranks is None else _numbers("-n", ranks, MOST_RANKS)
    given = [] if shape is None else _numbers("--shape", shape, LONGEST)
    if shape is not None and len(given) != INDICES:
        raise InvalidArgumentError(
            f"--shape takes the lengths of b, s, h and o, as in 2,3,4,5, not '{shape}'."
        )
    lengths = shortest_lengths(dims, sizes)
    cube = cut_along(dims, sizes, dict(zip(lengths, given, strict=True)) if given else lengths)
    if cube.size > MOST_RANKS:
        raise InvalidArgumentError(
            f"{split} on {rank_count(cube.size)} is too much to draw. "
            f"Use {MOST_RANKS} ranks or fewer: the rules are the same."
        )
    return cube


def _numbers(option: str, text: str, most: int) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word[:9]) <= most for word in words):
        raise InvalidArgumentError(
            f"{option} takes whole numbers from 1 to {most}, with commas between, not '{text}'."
        )
    return [int(word) for word in words]


def _drawn(kind: str, picture: CubePicture) -> str:
    if kind == ".html":
        from roundelay.view.cube_page import cube_page  # noqa: PLC0415 - only here

        return cube_page(picture)
    from roundelay.view.cube_svg import cube_svg  # noqa: PLC0415 - likewise

    return cube_svg(picture)
