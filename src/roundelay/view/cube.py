"""A matrix product that is cut, as frames: terminal, SVG and page draw the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from roundelay.contraction import PRODUCTS, TENSORS, Contraction, Cube, DimCut
from roundelay.errors import rank_count
from roundelay.view.terminal_text import nbytes_text

__all__ = [
    "CubeFrame",
    "CubePicture",
    "CubeRun",
    "ProductRun",
    "TensorSheet",
    "cube_picture",
    "listed",
    "shape_text",
]

MOST_LISTED = 4  # ranks by number on a piece
FORMULA = "Y[b,s,o] = Σₕ X[b,s,h]·W[h,o]"
WHEN = {"Y": "Forward", "dX": "Backward", "dW": "Backward"}


@dataclass(frozen=True, slots=True)
class ProductRun:
    """What running one product gave: the bytes each rank sent, how far it is from the whole."""

    sent: Sequence[int]
    difference: float
    first: Sequence[str]  # numbers of the result, on rank 0


@dataclass(frozen=True, slots=True)
class CubeRun:
    """What every rank held, and what each product gave."""

    shapes: Sequence[Mapping[str, tuple[int, ...]]]
    nbytes: Sequence[Mapping[str, int]]
    products: Mapping[str, ProductRun]


@dataclass(frozen=True, slots=True)
class TensorSheet:
    """A tensor spread out flat: its pieces in rows and columns, and the ranks that have each."""

    tensor: str
    rows: Sequence[str]
    columns: Sequence[str]
    tiles: Sequence[Sequence[Sequence[int]]]
    shape: tuple[int, ...]  # of the first piece
    summed: bool  # the ranks of a piece have parts of a sum

    @property
    def name(self) -> str:
        """The tensor with its indices: X[b,s,h]."""
        return f"{self.tensor}[{','.join(TENSORS[self.tensor])}]"

    @property
    def sign(self) -> str:
        """What stands between the ranks of a piece."""
        return "+" if self.summed else " "


@dataclass(frozen=True, slots=True)
class CubeFrame:
    """One product: its factors, its result, and what must move for it."""

    contraction: Contraction
    sheets: tuple[TensorSheet, TensorSheet, TensorSheet]
    groups: Sequence[Sequence[int]]
    title: str
    moves: str
    why: str
    result: str


@dataclass(frozen=True, slots=True)
class CubePicture:
    """The cube, its cuts, a frame for each product, and what running it showed."""

    cube: Cube
    run: CubeRun
    frames: Sequence[CubeFrame]
    title: str
    about: str
    verdict: str
    agrees: bool


def cube_picture(cube: Cube, run: CubeRun) -> CubePicture:
    """Return the frames of a cube that was run."""
    agrees = not any(each.difference for each in run.products.values())
    names = f"Y, dX and dW of {'all' if cube.size > 1 else 'the'} {rank_count(cube.size)}"
    equal = "equal those of one device, bit for bit"
    worst = max(each.difference for each in run.products.values())
    return CubePicture(
        cube,
        run,
        [_frame(cube, run, each) for each in PRODUCTS],
        title=f"matmul, {' and '.join(map(_cut_words, cube.cuts))}: {rank_count(cube.size)}",
        about=f"{FORMULA}   {'  '.join(f'{i}={n}' for i, n in cube.lengths.items())}",
        verdict=f"Run on the engine threads: {names} "
        + (f"{equal}." if agrees else f"differ from those of one device by {worst:g}."),
        agrees=agrees,
    )


def _cut_words(cut: DimCut) -> str:
    if not cut.index:
        return f"{cut.ranks} alike"
    return f"{cut.dim} ({cut.index}) cut in {cut.ranks}"


def _frame(cube: Cube, run: CubeRun, contraction: Contraction) -> CubeFrame:
    groups = cube.groups(contraction)
    cuts = cube.summed(contraction)
    result, ran = contraction.result, run.products[contraction.result]
    if groups:
        together = " | ".join(listed(group) for group in groups)
        moves = f"all-reduce of {result} over ranks {together}"
        letters = [cut.index for cut in cuts]
        why = (
            f"{result} sums over {_are(letters)} cut: partial sums of "
            f"{nbytes_text(run.nbytes[0][result])}, {_sends(ran.sent)}"
        )
    else:
        moves = "nothing moves"
        why = f"{result} sums over {_are(contraction.summed)} not cut"
    shown = " ".join(ran.first[:8]) + (" …" if len(ran.first) > 8 else "")  # noqa: PLR2004
    row = "0," * (len(TENSORS[result]) - 1) + ":"
    return CubeFrame(
        contraction,
        (
            _sheet(cube, contraction.left),
            _sheet(cube, contraction.right),
            _sheet(cube, result, summed=bool(groups)),
        ),
        groups,
        title=f"{WHEN[result]}: {contraction.text}",
        moves=moves,
        why=why,
        result=f"{result}[{row}] on rank 0: {shown}",
    )


def _sends(sent: Sequence[int]) -> str:
    who = "each rank sends" if len(set(sent)) == 1 else "a rank sends at most"
    return f"{who} {nbytes_text(max(sent))}"


def _are(letters: Sequence[str]) -> str:
    return f"{' and '.join(letters)}, which {'are' if len(letters) > 1 else 'is'}"


def _sheet(cube: Cube, tensor: str, *, summed: bool = False) -> TensorSheet:
    """Lay the pieces of a tensor out flat; its last index goes across, the others down."""
    *down, across = list(TENSORS[tensor])
    owners = {str(piece): ranks for piece, ranks in cube.owners(tensor)}
    rows = list(product(*(cube.pieces(index) for index in down)))
    columns = cube.pieces(across)
    return TensorSheet(
        tensor,
        rows=[
            " ".join(
                _label(cube, index, piece) for index, piece in zip(down, row, strict=True)
            ).strip()
            for row in rows
        ],
        columns=[_label(cube, across, piece) for piece in columns],
        tiles=[[owners[str((*row, column))] for column in columns] for row in rows],
        shape=cube.shape(0, tensor),
        summed=summed,
    )


def _label(cube: Cube, index: str, piece: slice) -> str:
    """Return where a piece lies, b0:2; nothing where the index is whole."""
    return "" if len(cube.pieces(index)) == 1 else f"{index}{piece.start}:{piece.stop}"


def listed(ranks: Sequence[int], sign: str = " ") -> str:
    """Write the ranks that have a piece, or whose sums make it.

    >>> listed([0, 1, 2], "+"), listed(range(8)), listed([0, 3, 6, 9, 12], "+")
    ('0+1+2', '0 1 … 7', '0+3+…+12')
    """
    numbers = [str(rank) for rank in ranks]
    if len(numbers) > MOST_LISTED:
        numbers = [*numbers[:2], "…", numbers[-1]]
    return sign.join(numbers)


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape as 2\u00d73\u00d74."""
    return "\u00d7".join(map(str, shape))
