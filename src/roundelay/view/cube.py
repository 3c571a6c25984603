"""A matrix product that is cut, as frames: terminal, SVG and page draw the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from roundelay.contraction import PRODUCTS, TENSORS, Contraction, Cube, DimCut
from roundelay.errors import rank_count
from roundelay.language import Language, say
from roundelay.view.terminal_text import nbytes_text

__all__ = [
    "CubeFrame",
    "CubePicture",
    "CubeRun",
    "ProductRun",
    "TensorSheet",
    "cube_picture",
    "cube_words",
    "listed",
    "shape_text",
]

MOST_LISTED = 4  # ranks by number on a piece
FORMULA = "Y[b,s,o] = Σₕ X[b,s,h]·W[h,o]"
WHEN = {"Y": ("Forward", "前向"), "dX": ("Backward", "反向"), "dW": ("Backward", "反向")}
DIM_NAMES = {"batch": "批", "sequence": "序列", "rows": "W 的行", "columns": "W 的列"}


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
    head: str  # what moves, in a word or two


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
    language: Language = "en"


def cube_picture(cube: Cube, run: CubeRun, language: Language = "en") -> CubePicture:
    """Return the frames of a cube that was run."""
    agrees = not any(each.difference for each in run.products.values())
    names = f"Y, dX and dW of {'all' if cube.size > 1 else 'the'} {rank_count(cube.size)}"
    worst = max(each.difference for each in run.products.values())
    cuts = [_cut_words(cut, language) for cut in cube.cuts]
    title = say(
        language,
        f"matmul, {' and '.join(cuts)}: {rank_count(cube.size)}",
        f"矩阵乘：{'，'.join(cuts)}，共 {cube.size} 个 rank",
    )
    verdict = say(
        language,
        f"Run on the engine threads: {names} "
        + ("equal those of one device, bit for bit." if agrees
           else f"differ from those of one device by {worst:g}."),
        f"用 threads 引擎运行：{cube.size} 个 rank 的 Y、dX 和 dW "
        + ("与单设备逐位相同。" if agrees else f"与单设备相差 {worst:g}。"),
    )  # fmt: skip
    return CubePicture(
        cube,
        run,
        [_frame(cube, run, each, language) for each in PRODUCTS],
        title=title,
        about=f"{FORMULA}   {'  '.join(f'{i}={n}' for i, n in cube.lengths.items())}",
        verdict=verdict,
        agrees=agrees,
        language=language,
    )


def cube_words(picture: CubePicture) -> list[list[str]]:
    """Return a title and some sentences for the cut, and for each product."""
    language = picture.language
    cut = say(
        language,
        "X, W and Y are three faces of the cube. A face that a cut goes through is in pieces; one "
        "that it leaves whole is on every rank, and if it is computed, it is a sum of all of them.",
        "X、W、Y 是立方体的三个面。被切到的面分成几片；没被切到的面在每个 rank 上都是完整的，"
        "如果它是算出来的，那么各 rank 手里只是部分和，要加起来。",
    )
    stop = say(language, ". ", "。")
    frames = [
        [frame.title, stop.join([frame.moves[0].upper() + frame.moves[1:], frame.why, frame.result])
         + stop.strip()]
        for frame in picture.frames
    ]  # fmt: skip
    return [[say(language, "The cut", "怎么切"), cut], *frames]


def _cut_words(cut: DimCut, language: Language) -> str:
    if not cut.index:
        return say(language, f"{cut.ranks} alike", f"{cut.ranks} 份相同")
    return say(language, f"{cut.dim} ({cut.index}) cut in {cut.ranks}",
               f"{DIM_NAMES[cut.dim]}（{cut.index}）切成 {cut.ranks} 份")  # fmt: skip


def _frame(cube: Cube, run: CubeRun, contraction: Contraction, language: Language) -> CubeFrame:
    groups = cube.groups(contraction)
    cuts = cube.summed(contraction)
    result, ran = contraction.result, run.products[contraction.result]
    head = say(language, "nothing moves", "无需通信")
    if groups:
        together = " | ".join(listed(group) for group in groups)
        moves = say(language, f"all-reduce of {result} over ranks {together}",
                    f"对 {result} 做 all-reduce，rank {together}")  # fmt: skip
        letters, nbytes = [cut.index for cut in cuts], nbytes_text(run.nbytes[0][result])
        why = say(
            language,
            f"{result} sums over {_are(letters)} cut: partial sums of {nbytes}, {_sends(ran.sent)}",
            f"{result} 要对 {'、'.join(letters)} 求和，而它被切开了：部分和 {nbytes}，"
            f"{_sends(ran.sent, language)}",
        )
        head = f"all-reduce {result}"
    else:
        moves = head
        why = say(
            language,
            f"{result} sums over {_are(contraction.summed)} not cut",
            f"{result} 对 {'、'.join(contraction.summed)} 求和，没有被切开",
        )
    shown = " ".join(ran.first[:8]) + (" …" if len(ran.first) > 8 else "")  # noqa: PLR2004
    row = "0," * (len(TENSORS[result]) - 1) + ":"
    where = say(language, f"{result}[{row}] on rank 0", f"rank 0 上的 {result}[{row}]")
    colon = say(language, ": ", "：")
    return CubeFrame(
        contraction,
        (
            _sheet(cube, contraction.left),
            _sheet(cube, contraction.right),
            _sheet(cube, result, summed=bool(groups)),
        ),
        groups,
        title=f"{say(language, *WHEN[result])}{colon}{contraction.text}",
        moves=moves,
        why=why,
        result=f"{where}{colon}{shown}",
        head=head,
    )


def _sends(sent: Sequence[int], language: Language = "en") -> str:
    same, most = len(set(sent)) == 1, nbytes_text(max(sent))
    who = "each rank sends" if same else "a rank sends at most"
    return say(language, f"{who} {most}", f"每个 rank {'' if same else '最多'}发送 {most}")


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
