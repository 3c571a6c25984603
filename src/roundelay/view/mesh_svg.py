"""A mesh as a drawing: a box for every rank, and one colour for ranks that talk along an axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from math import prod
from xml.sax.saxutils import escape

from roundelay.language import Language, say
from roundelay.view._shape import colour, hues

__all__ = ["AXIS_ORDER", "axis_words", "mesh_groups", "mesh_svg"]

#: From the outermost to the innermost: neighbours along the last have neighbouring ranks.
AXIS_ORDER = ("pp", "dp", "cp", "tp")
BOX, HIGH, GAP, MARGIN = 62.0, 44.0, 8.0, 28.0
BLOCK = 30.0  # between blocks
TOP, LABEL = 30.0, 62.0
PLACES = {
    "tp": ("tensor parallel", "张量并行"),
    "cp": ("context parallel", "上下文并行"),
    "dp": ("data parallel", "数据并行"),
    "pp": ("pipeline parallel", "流水线并行"),
}
SENT = {
    "tp": ("a part of every layer, the same rows: activations are summed in every layer",
           "每层的一部分，相同的样本：每层都要对激活求和（all-reduce）"),
    "cp": ("the whole model, a part of every sequence: keys and values go around in attention",
           "完整的模型，每条序列的一部分：每次注意力都要沿环传递 key 和 value"),
    "dp": ("the whole model, other rows: gradients are summed once a step",
           "完整的模型，不同的样本：每步对梯度求和一次"),
    "pp": ("some of the layers: activations go on to the next stage, gradients come back",
           "一部分层：激活传给下一阶段，梯度传回来"),
}  # fmt: skip
STYLE = """
.page{fill:#fff}.ink{fill:#1f2328}.soft{fill:#5b6168}.block{fill:#f6f5f1;stroke:#dcd9d2}
.rank{stroke-width:1.5}.link{fill:none;stroke-width:2.6}
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
.number{font-size:15px;font-weight:650;text-anchor:middle}.place{font-size:10.5px;text-anchor:middle}
.mid{text-anchor:middle}.name{font-weight:600}
"""
DARK = """
.page{fill:#16181b}.ink{fill:#eceae6}.soft{fill:#a3a8ae}.block{fill:#1d2024;stroke:#34383d}
"""


def mesh_groups(axes: Mapping[str, int], along: str) -> list[list[int]]:
    """Return the ranks that differ along one axis alone, group by group.

    >>> mesh_groups({"dp": 2, "tp": 2}, "dp")
    [[0, 2], [1, 3]]
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*map(range, axes.values()))):
        rest = tuple(at for name, at in zip(axes, place, strict=True) if name != along)
        groups.setdefault(rest, []).append(rank)
    return list(groups.values())


def axis_words(axes: Mapping[str, int], along: str, language: Language = "en") -> str:
    """Say what the ranks of a group have, and what they send each other."""
    groups = mesh_groups(axes, along)
    shown = " | ".join(" ".join(map(str, group)) for group in groups[:4])
    more = " | …" if len(groups) > 4 else say(language, ".", "。")  # noqa: PLR2004 - as many fit
    name, sent = say(language, *PLACES[along]), say(language, *SENT[along])
    return say(
        language,
        f"Along {along}, {name}: {len(groups)} groups of {len(groups[0])} ranks, {shown}{more} "
        f"Each rank has {sent}.",
        f"沿 {along}（{name}）：{len(groups)} 组，每组 {len(groups[0])} 个 rank：{shown}{more}"
        f"每个 rank 有{sent}。",
    )


def mesh_svg(axes: Mapping[str, int], along: str, language: Language = "en") -> str:
    """Return the mesh: tp across and cp down in a block, dp across and pp down between blocks."""
    full = {name: axes.get(name, 1) for name in AXIS_ORDER}
    wide = full["tp"] * (BOX + GAP) + GAP
    high = full["cp"] * (HIGH + GAP) + GAP
    width = 2 * MARGIN + LABEL + full["dp"] * (wide + BLOCK) - BLOCK
    height = 2 * MARGIN + TOP + full["pp"] * (high + BLOCK) - BLOCK
    size = prod(full.values())
    title = say(language, f"A mesh of {size} ranks: {_named(axes)}",
                f"{size} 个 rank 的网格：{_named(axes)}")  # fmt: skip
    groups = mesh_groups(full, along)
    box = f'width="{_n(width)}" height="{_n(height)}"'
    view = f'viewBox="0 0 {_n(width)} {_n(height)}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box} {view}>',
        f"<title>{escape(title)}</title><style>{_rules(len(groups))}</style>",
        f'<rect class="page" {box} rx="14"/>',
        *_blocks(full, wide, high), *_links(full, groups, wide, high),
        *_ranks(full, groups, wide, high), "</svg>", "",
    ])  # fmt: skip


def _named(axes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={count}" for name, count in axes.items() if count > 1) or "dp=1"


def _corner(place: tuple[int, ...], wide: float, high: float) -> tuple[float, float]:
    """Return where the box of a rank begins."""
    pp, dp, cp, tp = place
    x = MARGIN + LABEL + dp * (wide + BLOCK) + GAP + tp * (BOX + GAP)
    return x, MARGIN + TOP + pp * (high + BLOCK) + GAP + cp * (HIGH + GAP)


def _blocks(full: Mapping[str, int], wide: float, high: float) -> Iterator[str]:
    for dp in range(full["dp"]):
        x, _ = _corner((0, dp, 0, 0), wide, high)
        yield _text("name soft mid", x - GAP + wide / 2, MARGIN + TOP - 12, f"dp {dp}")
    for pp, dp in product(range(full["pp"]), range(full["dp"])):
        x, y = _corner((pp, dp, 0, 0), wide, high)
        if dp == 0:
            yield _text("name soft", MARGIN, y - GAP + high / 2 + 4, f"pp {pp}")
        yield (f'<rect class="block" x="{_n(x - GAP)}" y="{_n(y - GAP)}" width="{_n(wide)}" '
               f'height="{_n(high)}" rx="10"/>')  # fmt: skip


def _links(
    full: Mapping[str, int], groups: list[list[int]], wide: float, high: float
) -> Iterator[str]:
    """Yield a line through the ranks of every group, where no others lie between them."""
    places = list(product(*map(range, full.values())))
    for number, group in enumerate(groups):
        corners = [_corner(places[rank], wide, high) for rank in group]
        for (x, y), (x2, y2) in pairwise(corners):
            if x2 - x > BOX + BLOCK + 2 * GAP or y2 - y > HIGH + BLOCK + 2 * GAP:
                continue
            start, end = (x + BOX / 2, y + HIGH / 2), (x2 + BOX / 2, y2 + HIGH / 2)
            line = f"M{_n(start[0])} {_n(start[1])}L{_n(end[0])} {_n(end[1])}"
            yield f'<path class="link g{number}" d="{line}"/>'


def _ranks(
    full: Mapping[str, int], groups: list[list[int]], wide: float, high: float
) -> Iterator[str]:
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    for rank, place in enumerate(product(*map(range, full.values()))):
        x, y = _corner(place, wide, high)
        yield (f'<rect class="rank g{group_of[rank]}" x="{_n(x)}" y="{_n(y)}" width="{_n(BOX)}" '
               f'height="{_n(HIGH)}" rx="7"/>')  # fmt: skip
        yield _text("number ink", x + BOX / 2, y + 21, str(rank))
        inner = [f"{name}{at}" for name, at in zip(full, place, strict=True)
                 if name in ("cp", "tp") and full[name] > 1]  # fmt: skip
        yield _text("place soft", x + BOX / 2, y + 36, " ".join(inner))


def _rules(groups: int) -> str:
    def coloured(fill: float, chroma: float, line: float) -> str:
        return "".join(
            f".rank.g{number}{{fill:{colour(fill, chroma, hue)};stroke:{colour(line, 0.13, hue)}}}"
            f".link.g{number}{{stroke:{colour(line, 0.13, hue)}}}"
            for number, hue in enumerate(hues(groups))
        )

    dark = f"@media (prefers-color-scheme:dark){{{coloured(0.36, 0.09, 0.72)}{DARK}}}"
    return f"{coloured(0.88, 0.07, 0.58)}{STYLE}{dark}"


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}">{escape(words)}</text>'


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
