"""What pictures say, in every language: phrases with gaps, which the tellers of stories fill.

The logic of a sentence (who sends what, whether that is one or many) is said once, in `story.py`,
`phases.py` and `_rank_names.py`; only its words are here. A gap that only English needs, such as
the s of a plural, is left out elsewhere.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from roundelay.view.languages import Language

__all__ = ["GRAMMAR", "PHRASES", "PROMISES", "Phrases", "spaced", "wrapped"]

#: Gaps of English alone: endings, pronouns and articles.
GRAMMAR = frozenset({"s", "es", "adds", "its", "it_has", "pronoun"})

#: By key: English, then Chinese.
_BOTH: Mapping[str, tuple[str, str]] = {
    # ranks, and the ways between them
    "every rank": ("every rank", "每个 rank"),
    "every rank but": ("every rank but {rank}", "除 {rank} 外的每个 rank"),
    "some ranks": ("{n} ranks", "{n} 个 rank"),
    "and": ("{most} and {last}", "{most} 和 {last}"),
    "comma": (", ", "、"),
    "each of": ("each of {ranks}", "{ranks}都"),
    "every other": ("every other rank", "其他每个 rank"),
    "every other of host": ("every other rank of its {host}", "同一{host}的其他每个 rank"),
    "every above": ("every rank above", "编号更大的每个 rank"),
    "in pairs": ("in pairs, {ranks}", "{ranks}两两"),
    "the two": ("the two ranks", "两个 rank"),
    "apart": ("pairs of ranks {n} apart", "相距 {n} 的 rank 两两"),
    "neighbours": ("pairs of neighbours", "相邻的 rank 两两"),
    "next": ("the next rank", "下一个 rank"),
    "before": ("the rank before it", "前一个 rank"),
    "above": ("the rank {n} above", "编号大 {n} 的 rank"),
    "below": ("the rank {n} below", "编号小 {n} 的 rank"),
    # amounts
    "to": ("{low} to {high}", "{low} 到 {high}"),
    "one of": ("one {what}", "一个{what}"),
    "several of": ("{n} {what}s", "{n} 个{what}"),
    "some of": ("{what}s", "若干{what}"),
    "number": ("{n} ", "{n} 个"),
    "chunk": ("chunk", "块"),
    "block": ("block", "数据块"),
    "finished chunk": ("finished chunk", "已完成的块"),
    "finished block": ("finished block", "已完成的数据块"),
    "steps": ("{n} step{s}", "{n} 步"),
    "messages": ("{n} message{s}", "{n} 条消息"),
    "chunks": ("{n} chunk{s}", "{n} 个块"),
    "blocks": ("{n} block{s}", "{n} 个数据块"),
    "ranks": ("{n} rank{s}", "{n} 个 rank"),
    # what is sent
    "not got": ("what {it_has} not got", "它还没有的数据"),
    "whole sum": ("the whole sum", "完整的和"),
    "the data": ("the data", "数据"),
    "just finished": ("the {number}{part}{s} {it_has} just finished", "刚完成的{number}{part}"),
    "just received": ("the {number}{part}{s} {it_has} just received", "刚收到的{number}{part}"),
    "own part": ("{its} own {part}{s}", "自己的{part}"),
    "all so far": ("all {it_has} so far", "目前持有的全部数据"),
    "own data": ("{its} data", "自己的数据"),
    "one own": ("one of {its} own chunks", "自己的一个块"),
    "several own": ("{n} of {its} own chunks", "自己的 {n} 个块"),
    "some own": ("some of {its} own chunks", "自己的一部分块"),
    "sum just made": ("the {number}sum{s} {it_has} just made", "刚算出的{number}和"),
    "partial sum": ("{its} {number}partial sum{s}", "自己的{number}部分和"),
    # who sends it
    "each other": ("each other", "彼此"),
    "who has come": ("who has come so far", "目前有谁到了"),
    "all have come": ("that all have come", "全部到齐"),
    "tells": ("{src} tell{s} {dst} {news}", "{src}告诉{dst}{news}"),
    "exchanges": ("{src} exchange {what}", "{src}互换{what}"),
    "exchanges and adds": ("{src} exchange {what} and add what they get", "{src}互换{what}，并加上收到的数据"),
    "sends": ("{src} send{s} {what} to {dst}", "{src}把{what}发给{dst}"),
    "passes on": ("{src} pass{es} {what} on to {dst}", "{src}把{what}传给{dst}"),
    "which adds": ("{sent}, which add{adds} {pronoun}", "{sent}，由后者累加"),
    "clauses": ("; ", "；"),
    "sentence": ("{clauses}.", "{clauses}。"),
    "sentence with outcome": ("{clauses}: {outcome}.", "{clauses}：{outcome}。"),
    # what comes of it
    "knows of": ("{who} now knows of {n} of {size}", "现在{who}知道 {size} 个中的 {n} 个已到"),
    "holds": ("{who} now holds {what}", "现在{who}持有{what}"),
    "terms": ("{who} now holds {terms} of {due} terms of {of}", "现在{who}有{of}已含 {due} 项中的 {terms} 项"),
    "terms of the sum": ("{who} now holds {terms} of {due} terms of the sum", "现在{who}有了 {due} 项之和中的 {terms} 项"),
    "holds some": ("{who} now holds {n} of {most} {parts}s", "现在{who}持有 {most} 个{parts}中的 {n} 个"),
    "knows all": ("{who} now knows that all have come", "现在{who}知道全部到齐"),
    "so many know all": ("{n} ranks now know that all have come", "现在 {n} 个 rank 知道全部到齐"),
    "so many hold": ("{n} of {size} ranks now hold {what}", "现在 {size} 个 rank 中有 {n} 个持有{what}"),
    "its result": ("its result", "自己的结果"),
    "their results": ("their results", "各自的结果"),
    "its part": ("its {part}", "自己的{part}"),
    "their parts": ("their {part}s", "各自的{part}"),
    "both parts": ("both {part}s", "全部两个{part}"),
    "all parts": ("all {n} {part}s", "全部 {n} 个{part}"),
    "both parts for it": ("both {part}s meant for it", "发给自己的全部两个{part}"),
    "all parts for it": ("all {n} {part}s meant for it", "发给自己的全部 {n} 个{part}"),
    "both parts for them": ("both {part}s meant for them", "发给各自的全部两个{part}"),
    "all parts for them": ("all {n} {part}s meant for them", "发给各自的全部 {n} 个{part}"),
    # phases: names, and what they are for
    "host": ("host", "主机"),
    "inside": ("{name} inside each {host}", "每个{host}内 {name}"),
    "between": ("{name} between {host}s", "各{host}之间 {name}"),
    "report": ("report", "报到"),
    "report aim": ("the news of who has come is collected", "汇总有谁到了"),
    "release": ("release", "放行"),
    "release aim": ("everyone learns that all have come", "让所有 rank 得知全部到齐"),
    "scan": ("scan", "scan（前缀和）"),
    "scan aim": ("every rank adds up what lies below it", "每个 rank 加上编号更小的 rank 的数据"),
    "shift": ("shift", "移位"),
    "shift aim": ("every rank has what the rank below it brought", "每个 rank 得到前一个 rank 的数据"),
    "overlap": ("overlap", "重叠"),
    "overlap aim": ("some is still added up while other data is already passed on", "一部分仍在求和，另一部分已开始传递"),
    "both trees up": ("reduce up both trees", "沿两棵树向上 reduce（规约）"),
    "both trees up aim": ("each root gets the whole sum of its part", "每个根得到自己那部分的完整的和"),
    "reduce": ("reduce", "reduce（规约）"),
    "reduce aim": ("contributions are added up", "把各 rank 的贡献相加"),
    "all-reduce": ("all-reduce", "all-reduce（全规约）"),
    "reduce-scatter": ("reduce-scatter", "reduce-scatter（规约散发）"),
    "broadcast": ("broadcast", "broadcast（广播）"),
    "all-gather": ("all-gather", "all-gather（全收集）"),
    "both trees down": ("{name} down both trees", "沿两棵树向下 {name}"),
    "scatter": ("scatter", "scatter（散发）"),
    "scatter aim": ("every rank gets a different part", "每个 rank 得到不同的一部分"),
    "gather": ("gather", "gather（收集）"),
    "copy": ("copy", "拷贝"),
    "host's sum": ("its {host}'s sum", "所在{host}的和"),
    "gets": ("{who} gets {what}", "{who}得到{what}"),
    "gets one part": ("{who} gets one part of {what}", "{who}得到{what}的一部分"),
    "host holds": ("every {host} holds the whole {data}, in parts", "每个{host}持有完整的{data}，分成若干部分"),
    "everyone gets": ("every rank gets the {data}", "每个 rank 得到完整的{data}"),
    "sum": ("sum", "和"),
    "data": ("data", "数据"),
    "collects": ("{who} collects the parts", "{who}收集各部分"),
    "gets others'": ("{who} gets what others hold", "{who}得到其他 rank 持有的数据"),
    "place": ("{name}, {n} of {steps}", "{name}，第 {n}/{steps} 步"),
    "aim": ("Aim of this phase: {aim}. ", "本阶段的目标：{aim}。"),
    "phase": ("{name} ({steps})", "{name}：{steps}"),
    "then": (", then ", "，然后"),
    # what it costs
    "Steps": ("Steps", "步数"),
    "Messages": ("Messages", "消息数"),
    "Buffer": ("Buffer", "缓冲区"),
    "Sent": ("Sent per rank, at most", "每个 rank 最多发送"),
    "Busiest": ("Busiest link", "最忙的链路"),
    "Time": ("Estimated time", "估计时间"),
    "on network": ("{time} on {network}", "{time}，网络 {network}"),
    "link load": ("{link}, {load}", "{link}，{load}"),
    "title": ("{name} on {ranks}", "{name} · {ranks}"),
    "of hosts": ("{ranks} of {n} host{s}", "{ranks}，{n} 台主机"),
    "titles": ("{one} and {other}", "{one} 与 {other}"),
    "title root": (", root {root}", "，根 rank {root}"),
    "title op": (", {op}", "，{op}"),
    # around a drawing
    "start": ("Start", "开始"),
    "step": ("Step {n}", "第 {n} 步"),
    "failure at": ("Step {n}: {words}", "第 {n} 步：{words}"),
    "more failures": ("… and {n} more failures", "… 另有 {n} 处错误"),
    "only written": ("After the start, only the cells that a step writes are drawn.", "开始之后，只画出每一步写入的格子。"),
    "reduce: added": ("reduce: added", "规约：相加"),
    "copy: replaces": ("copy: replaces", "拷贝：替换"),
    "finished": ("finished", "已完成"),
    "one bar": ("one bar per rank whose data is in", "每条竖线：一个 rank 的数据已加入"),
    # what is wrong
    "failure": ("{rank}, chunk {chunk}: {kind}: {detail}", "{rank}，块 {chunk}：{kind}：{detail}"),
}  # fmt: skip

PHRASES: Mapping[Language, Mapping[str, str]] = {
    "en": {key: words[0] for key, words in _BOTH.items()},
    "zh": {key: words[1] for key, words in _BOTH.items()},
}

#: What each collective promises; in English its own file says it.
PROMISES: Mapping[str, str] = {
    "all_gather": "All-gather（全收集）：每个 rank 从所有 rank 各收集一个数据块，按 rank 顺序排列。",
    "all_reduce": "All-reduce（全规约）：每个 rank 最终都得到所有 rank 数据的规约结果。",
    "all_to_all": "All-to-all（全交换）：rank s 把自己的第 d 块发给 rank d，相当于一次转置。",
    "barrier": "Barrier（栅栏）：所有 rank 到齐之前谁也不能离开；不传数据，只传谁到了的消息。",
    "broadcast": "Broadcast（广播）：每个 rank 最终都得到根 rank 的数据。",
    "exscan": "Exclusive scan（不含自身的前缀规约）：rank r 得到 rank 0 到 r-1 的规约结果；rank 0 什么也得不到。",
    "gather": "Gather（收集）：根 rank 从每个 rank 收集一个数据块，按 rank 顺序排列；与 scatter 相反。",
    "reduce": "Reduce（规约）：根 rank 得到所有 rank 数据的规约结果；其他 rank 的数据不变。",
    "reduce_scatter": "Reduce-scatter（规约散发）：所有 rank 的数据被规约，rank r 得到结果的第 r 块。",
    "scan": "Scan（前缀规约）：rank r 得到 rank 0 到 r 的规约结果，即沿 rank 的累加和。",
    "scatter": "Scatter（散发）：根 rank 给每个 rank 一个不同的数据块。",
}

CJK = "\u4e00-\u9fff"
TIGHT = re.compile(rf"(?<=[{CJK}])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])(?=[{CJK}])")


def spaced(text: str) -> str:
    """Put a space between Chinese and other letters or digits, where there is none.

    >>> spaced("把3个块传给GPU1")
    '把 3 个块传给 GPU1'
    """
    return TIGHT.sub(" ", text)


#: Signs of Chinese: of a width of their own, and with a break after each, but not before these.
WIDE = "\u3000-\u303f\uff00-\uffef" + CJK
NEVER_FIRST = "，。：；）、？！”"
PIECES = re.compile(rf"（?[{WIDE}][{NEVER_FIRST}]*|\s+|（?[^\s{WIDE}]+[{NEVER_FIRST}]*")
FIRST_WIDE = "\u3000"
WIDTH_OF_SIGN = 1.9  # of a Latin letter


def wrapped(text: str, width: int) -> list[str]:
    """Break a text into lines of about so many Latin letters; Chinese breaks between signs.

    >>> wrapped("every rank passes it on", 12)
    ['every rank', 'passes it on']
    >>> wrapped("每个 rank 把刚算出的和传给下一个 rank。", 20)
    ['每个 rank 把刚算出的', '和传给下一个 rank。']
    """
    if not re.search(f"[{WIDE}]", text):
        return textwrap.wrap(text, width)
    lines, room = [""], float(width)
    for piece in PIECES.findall(text):
        wide = sum(WIDTH_OF_SIGN if sign >= FIRST_WIDE else 1 for sign in piece)
        if wide > room and lines[-1]:
            lines.append("")
            room = float(width)
        if lines[-1] or not piece.isspace():
            lines[-1] += piece
            room -= wide
    return [line.strip() for line in lines]


class Phrases:
    """The phrases of one language.

    >>> Phrases("en")("above", n=2), Phrases("zh")("above", n=2)
    ('the rank 2 above', '编号大 2 的 rank')
    """

    def __init__(self, language: Language = "en") -> None:
        self.language = language
        self._phrases = PHRASES[language]

    def __call__(self, key: str, **values: object) -> str:
        """Fill the gaps of a phrase; `n` also makes the `s` of a plural."""
        if "n" in values:
            values.setdefault("s", "" if values["n"] == 1 else "s")
        text = self._phrases[key].format(**values)
        return text if self.language == "en" else spaced(text)

    def joined(self, names: list[str]) -> str:
        """Join names: a, b and c."""
        if len(names) <= 1:
            return "".join(names)
        return self("and", most=self("comma").join(names[:-1]), last=names[-1])
