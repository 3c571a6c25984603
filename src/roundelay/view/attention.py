"""Attention over ranks, step by step: who computes which part of the square, as data and as text.

Terminal, drawing and page show the same frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from roundelay.language import Language, say
from roundelay.parallel.context.plan import RingPlan, spans_of

__all__ = ["AttentionFrame", "AttentionPicture", "lines", "ring_picture", "ulysses_picture"]

Place = tuple[int, int]  # row and column
LAYOUT_NAMES = {"contiguous": "连续", "zigzag": "之字形"}


@dataclass(frozen=True)
class AttentionFrame:
    """One moment: the cells that ranks work on, and in words what they do."""

    head: str
    told: tuple[str, ...]
    now: dict[Place, int]  # the rank that has the cell
    past: dict[Place, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionPicture:
    """Some frames over one grid: queries by keys, or heads by tokens."""

    title: str
    size: int
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    owners: tuple[int | None, ...]  # the rank that has a row
    about: str
    frames: tuple[AttentionFrame, ...]
    halves: frozenset[Place] = frozenset()  # cells of which half is seen
    hidden: frozenset[Place] = frozenset()  # cells of which nothing is
    ending: str = ""
    language: Language = "en"


def ring_picture(
    size: int, layout: str, *, causal: bool, language: Language = "en"
) -> AttentionPicture:
    """Return ring attention of a sequence with one token for each piece that ranks have."""
    pieces = size * (2 if layout == "zigzag" else 1)
    plan = RingPlan.even(pieces, size, layout, causal=causal)
    owners = {start: rank for rank, spans in enumerate(plan.spans) for start, _ in spans}
    frames, past = [], dict[Place, int]()
    for step in range(size):
        now = {place: rank for rank in range(size) for place in _cells(plan, rank, step)}
        head = say(language, f"Step {step}", f"第 {step} 步")
        frames.append(AttentionFrame(head, _told(plan, step, language), now, dict(past)))
        past |= now
    square = [(row, column) for row in range(pieces) for column in range(pieces)]
    return AttentionPicture(
        title=_title(
            "Ring attention", "环形注意力", size, layout, causal=causal, language=language
        ),
        size=size,
        rows=tuple(f"q{piece}" for piece in range(pieces)),
        columns=tuple(f"k{piece}" for piece in range(pieces)),
        owners=tuple(owners[piece] for piece in range(pieces)),
        about=say(
            language,
            "Rows are queries, which stay; columns are keys, which travel. A cell has the number "
            "and colour of the rank that computes it.",
            "行是 query，留在原地；列是 key，沿环传递。格子的编号和颜色表示由哪个 rank 计算。",
        ),
        frames=tuple(frames),
        halves=frozenset(place for place in square if causal and place[0] == place[1]),
        hidden=frozenset(place for place in square if causal and place[0] < place[1]),
        ending=_ending(size, layout, causal=causal, language=language),
        language=language,
    )


def _cells(plan: RingPlan, rank: int, step: int) -> list[Place]:
    block = plan.block(rank, step)
    if block is None:
        return []
    pieces = [[start for start, _ in spans] for spans in plan.spans]
    queries = pieces[rank][slice(*block.queries)]
    keys = pieces[plan.source(rank, step)][slice(*block.keys)]
    return [(q, k) for q in queries for k in keys if not block.causal or k <= q]


def _told(plan: RingPlan, step: int, language: Language) -> tuple[str, ...]:
    """Say whose keys are where, and how much the busiest and the idlest do."""
    whose = "its own keys" if step == 0 else f"the keys of rank r - {step}"
    chinese = "自己的 key" if step == 0 else f" rank r - {step} 的 key"
    counts = [_amount(plan, rank, step) for rank in range(plan.size)]
    most, least = _shown(max(counts)), _shown(min(counts))
    work = say(language, f"{most} on every rank", f"每个 rank {most}")
    if most != least:
        work = say(language, f"{most} on the busiest, {least} on the idlest",
                   f"最忙的 {most}，最闲的 {least}")  # fmt: skip
    return (say(language, f"rank r has {whose};", f"rank r 手里是{chinese}；"),
            say(language, f"cells: {work}", f"格数：{work}"))  # fmt: skip


def _title(
    english: str, chinese: str, size: int, layout: str, *, causal: bool, language: Language
) -> str:
    return say(
        language,
        f"{english} on {size} ranks, {layout}, {'causal' if causal else 'full'}",
        f"{chinese}：{size} 个 rank，{LAYOUT_NAMES[layout]}切分，"
        f"{'因果掩码' if causal else '无掩码'}",
    )


def _amount(plan: RingPlan, rank: int, step: int) -> float:
    """Return how many cells of the square a rank computes; those on its diagonal are halves."""
    cells = _cells(plan, rank, step)
    return sum(0.5 if plan.causal and row == column else 1.0 for row, column in cells)


def _shown(amount: float) -> str:
    return f"{amount:g}"


def _ending(size: int, layout: str, *, causal: bool, language: Language) -> str:
    """Say how long ranks wait for the busiest, beside the other layout; in cells of N by N."""

    def waits(which: str) -> float:
        pieces = size * (2 if which == "zigzag" else 1)
        plan = RingPlan.even(pieces, size, which, causal=causal)
        per_step = [max(_amount(plan, rank, step) for rank in range(size)) for step in range(size)]
        return sum(per_step) * (0.25 if which == "zigzag" else 1.0)

    other = "zigzag" if layout == "contiguous" else "contiguous"
    mine, others = _shown(waits(layout)), _shown(waits(other))
    return say(
        language,
        f"The busiest rank of every step, added up: {mine} of {size * size} "
        f"squares of a rank's queries by a rank's keys; {others} in layout {other}.",
        f"每步最忙的 rank 加起来：共 {size * size} 块（一个 rank 的 query 乘一个 rank 的 key）中的 "
        f"{mine} 块；{LAYOUT_NAMES[other]}切分则是 {others} 块。",
    )


def ulysses_picture(
    size: int, layout: str, *, causal: bool, language: Language = "en"
) -> AttentionPicture:
    """Return Ulysses: a grid of heads by tokens, of which ranks have columns, rows, columns."""
    pieces = size * (2 if layout == "zigzag" else 1)
    owner = {
        start: rank
        for rank, spans in enumerate(spans_of(pieces, size, layout))
        for start, _ in spans
    }
    tokens = {(row, column): owner[column] for row in range(size) for column in range(pieces)}
    heads = {(row, column): row for row in range(size) for column in range(pieces)}
    seen = "up to its own" if causal else "of all tokens"
    sight = "只看自己及之前的 key" if causal else "看所有 token 的 key"
    told = (
        say(language, "Before|each rank has some tokens,|with all heads",
            "开始|每个 rank 有一部分 token，|含全部注意力头"),
        say(language, f"After all-to-all|all tokens, of some heads;|a query sees keys {seen}",
            f"all-to-all 之后|全部 token，一部分头；|query {sight}"),
        say(language, "After another|the output is where|its queries came from",
            "再一次 all-to-all 之后|输出回到 query|原来所在的 rank"),
    )  # fmt: skip
    frames = []
    for words, cells in zip(told, (tokens, heads, tokens), strict=True):
        head, *rest = words.split("|")
        frames.append(AttentionFrame(head, tuple(rest), cells))
    return AttentionPicture(
        title=_title(
            "Ulysses attention", "Ulysses 注意力", size, layout, causal=causal, language=language
        ),
        size=size,
        rows=tuple(f"h{row}" for row in range(size)),
        columns=tuple(f"t{piece}" for piece in range(pieces)),
        owners=(None,) * size,
        about=say(
            language,
            "Rows are heads, or groups of them; columns are pieces of the sequence. A cell shows "
            "the rank that has it.",
            "行是注意力头（或一组头），列是序列的片段。格子表示它在哪个 rank 上。",
        ),
        frames=tuple(frames),
        language=language,
        ending=say(
            language,
            "All ranks compute as much: each has whole squares, of its heads.",
            "各 rank 的计算量相同：每个 rank 算自己那些头的整个方阵。",
        ),
    )


def lines(picture: AttentionPicture, *, ascii_only: bool = False) -> list[str]:
    r"""Return a picture as text: cells that are computed have a rank's number, others a sign.

    >>> print("\n".join(lines(ring_picture(2, "contiguous", causal=True))[8:13]))
    Step 1: rank r has the keys of rank r - 1; cells: 1 on the busiest, 0 on the idlest
             k0  k1
    0  q0     ·   -
    1  q1     1   ·
    <BLANKLINE>
    """
    done, never = ("." if ascii_only else "·"), "-"
    wide = max(map(len, (*picture.columns, *picture.rows))) + 2
    language = picture.language
    parts = [picture.title, picture.about, ""]
    for frame in picture.frames:
        told = say(language, " ", "").join(frame.told)
        parts.append(f"{frame.head}{say(language, ': ', '：')}{told}")
        parts.append(" " * (wide + 3) + "".join(name.rjust(wide) for name in picture.columns))
        for row, name in enumerate(picture.rows):
            owner = picture.owners[row]
            cells = []
            for column in range(len(picture.columns)):
                place = row, column
                sign = never if place in picture.hidden else done if place in frame.past else " "
                cells.append(str(frame.now.get(place, sign)).rjust(wide))
            head = f"{'' if owner is None else owner!s:2} {name.ljust(wide)}"
            parts.append((head + "".join(cells)).rstrip())
        parts.append("")
    signs = say(language, f"{done} computed before   {never} never: masked",
                f"{done} 之前算过   {never} 被掩蔽，从不计算")  # fmt: skip
    return [*parts, *filter(None, [signs if picture.hidden else "", picture.ending])]
