"""What breaks a schedule, in every language: a proof's own sentences, taken apart and said anew."""

from __future__ import annotations

import re

from roundelay.schedule import Failure
from roundelay.view.languages import Language

__all__ = ["failure_words"]

KINDS = {
    "missing": "缺失",
    "doubled": "重复计入",
    "stale": "过期",
    "overwritten": "被覆盖",
    "unexpected contribution": "多余的贡献",
    "race": "竞争",
    "deadlock": "死锁",
    "malformed": "格式错误",
}

#: How the proof says it, and how that is said in Chinese.
HOLDS = r"(?:ranks? )?(?P<has>[0-9+…]+), needs (?:ranks? )?(?P<due>[0-9+…]+)"
LATER = r"ranks? (?P<later>[0-9+…]+)"
DETAILS = [
    (r"holds nothing, needs ranks? (?P<due>[0-9+…]+)", "什么也没有，应含 rank {due}"),
    (rf"holds {HOLDS}", "只含 rank {has}，应含 rank {due}"),
    (
        rf"holds {HOLDS}: ranks? (?P<extra>[0-9+…]+) does not belong",
        "含 rank {has}，应含 rank {due}：rank {extra} 不该在此",
    ),
    (
        rf"holds {HOLDS}; this step overwrote the rest",
        "只含 rank {has}，应含 rank {due}；其余的被这一步覆盖",
    ),
    (
        rf"holds {HOLDS}; rank (?P<src>\d+) sent it too early, before it had {LATER}",
        "只含 rank {has}，应含 rank {due}；rank {src} 发送过早，当时还没有 rank {later} 的贡献",
    ),
    (
        r"takes one copy or any number of reduces, but got (?P<others>.+)",
        "一步中只能接收一次拷贝或若干次规约，却收到：{others}",
    ),
    (r"sends to rank (?P<dst>\d+) what it does not hold", "发给 rank {dst} 的数据自己并不持有"),
    (
        r"the contribution of ranks? (?P<whose>[0-9, ]+) comes again from rank (?P<src>\d+)",
        "rank {whose} 的贡献又从 rank {src} 到来",
    ),
]
PATTERNS = [(re.compile(english), chinese) for english, chinese in DETAILS]
OTHERS = re.compile(r"(copy|reduce) from (\d+)")
OPS = {"copy": "拷贝", "reduce": "规约"}


def failure_words(failure: Failure, language: Language = "en") -> tuple[str, str]:
    """Return what kind of failure it is, and the detail.

    >>> hole = Failure("missing", rank=2, chunk=0, step=None, detail="holds nothing, needs rank 1")
    >>> failure_words(hole), failure_words(hole, "zh")
    (('missing', 'holds nothing, needs rank 1'), ('缺失', '什么也没有，应含 rank 1'))
    """
    if language == "en":
        return failure.kind, failure.detail
    for pattern, chinese in PATTERNS:
        found = pattern.fullmatch(failure.detail)
        if found:
            told = chinese.format(**found.groupdict())
            return KINDS[failure.kind], OTHERS.sub(_other, told).replace(", ", "、")
    return KINDS[failure.kind], failure.detail


def _other(found: re.Match[str]) -> str:
    return f"来自 rank {found[2]} 的{OPS[found[1]]}"
