"""What a hanging job is told with, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.errors import RANKS_SHOWN, ranks_text

__all__ = ["LIVE_WORDS", "live_ranks", "live_say"]

#: By key: English, Chinese.
LIVE_WORDS = {
    "waits": ("{Who} waits for rank {rank}{calls}, for {time} s.",
              "{who} 在等 rank {rank}{calls}，已等 {time} s。"),
    "wait": ("{Who} wait for rank {rank}{calls}, for {time} s.",
             "{who} 在等 rank {rank}{calls}，已等 {time} s。"),
    "calls": (" in {calls}", "（{calls}）"),
    "who": ("Rank {rank} (process {pid})", "rank {rank}（进程 {pid}）"),
    "where": (" at {site}", "，位于 {site}"),
    "none": ("none", "无"),
    "stopped": ("{who} is stopped; its last call is {last}{where}.",
                "{who} 已被暂停；最后一次调用是 {last}{where}。"),
    "calls now": ("{who} is at work in {last}{where}.", "{who} 正在执行 {last}{where}。"),
    "dead": ("{who} has died; its last call was {last}{where}.",
             "{who} 已死亡；最后一次调用是 {last}{where}。"),
    "left": ("{who} has left; its last call was {last}{where}.",
             "{who} 已离开；最后一次调用是 {last}{where}。"),
    "ended": ("{who} has ended; its last call was {last}{where}.",
              "{who} 已结束；最后一次调用是 {last}{where}。"),
    "computes": ("{who} runs its own code; its last call was {last}{where}.",
                 "{who} 在执行自己的代码；最后一次调用是 {last}{where}。"),
    "circle": ("They wait in a circle: {steps}.", "它们循环等待：{steps}。"),
    "circle step": ("rank {rank} waits for rank {other}", "rank {rank} 等 rank {other}"),
    "last seen": (", last seen at {site}", "，最后位于 {site}"),
    "mismatch": ("ranks {finder} and {rank} made different calls",
                 "rank {finder} 和 rank {rank} 的调用不一致"),
    "lost": ("rank {rank} is lost{where}", "rank {rank} 丢失{where}"),
    "timeout": ("rank {finder} gave up on rank {rank}{where}",
                "rank {finder} 等 rank {rank} 超时{where}"),
    "failed": ("rank {rank} failed: {text}", "rank {rank} 失败：{text}"),
    "closed": ("closed the communicator", "已关闭通信器"),
    "raised": ("closed the communicator, as it failed", "因失败而关闭了通信器"),
    "cancelled": ("closed the communicator, as it was interrupted", "因中断而关闭了通信器"),
    "returned": ("returned from its function", "已从函数返回"),
    "script": ("came to the end of its script", "已到脚本末尾"),
    "dropped": ("let go of the group", "已释放该组"),
    "by": (", by {name}", " （经由 {name}）"),
    "recv": ("recv from {who}, {tag}", "recv，来自 {who}，{tag}"),
    "send": ("send to {who}, {tag}", "send，发给 {who}，{tag}"),
    "any rank": ("any rank", "任意 rank"),
    "itself": ("itself", "自己"),
    "rank": ("rank {rank}", "rank {rank}"),
    "any tag": ("any tag", "任意标签"),
    "object": ("part of an object", "对象的一部分"),
    "tag": ("tag {tag}", "标签 {tag}"),
    "group": (" in group {group} ({ranks}{made})", "（组 {group}：{ranks}{made}）"),
    "made": ("; made at {site}", "；创建于 {site}"),
    "interrupted": ("rank {rank} was interrupted", "rank {rank} 被中断"),
}  # fmt: skip


def live_ranks(ranks: Sequence[int], language: str = "en") -> str:
    """Name ranks in a sentence.

    >>> live_ranks([1, 3]), live_ranks([1, 3], "zh")
    ('ranks 1, 3', 'rank 1、3')
    """
    if language != "zh":
        return ranks_text(list(ranks))
    more = f" 等 {len(ranks)} 个" if len(ranks) > RANKS_SHOWN else ""
    return f"rank {'、'.join(map(str, ranks[:RANKS_SHOWN]))}{more}"


def live_say(key: str, language: str = "en", **fill: object) -> str:
    """Return a phrase; in Chinese where `language` is zh."""
    large = {name.capitalize(): str(value)[:1].upper() + str(value)[1:]
             for name, value in fill.items()}  # fmt: skip
    return LIVE_WORDS[key][language == "zh"].format(**fill, **large)
