"""What pictures and tables of recorded runs say, in English and in Chinese."""

from __future__ import annotations

from roundelay.view.languages import LANGUAGES, Language

__all__ = ["COLUMNS", "RUN_WORDS", "run_say"]

COLUMNS = ("rank", "forward", "backward", "exchange", "step", "in calls", "waited", "most for",
           "in the background", "of that hidden", "calls", "buffers")  # fmt: skip

#: By key: English, Chinese; `.one` is for one of them.
RUN_WORDS = {
    # ---- the drawing
    "title": ("{program}, {window}: {length} on {ranks} ranks",
              "{program}，{window}：{length}，{ranks} 个 rank"),
    "last": ("Rank {rank} came last: the others waited {total} for it.",
             "rank {rank} 最晚到达：其他 rank 共等了它 {total}。"),
    "hid": ("Computing hid {share} % of the calls in the background.",
            "后台通信有 {share} % 被计算掩盖。"),
    "rank": ("rank {rank}", "rank {rank}"),
    "row computes": ("computes", "计算"),
    "row buckets": ("buckets", "梯度桶"),
    "row gathers": ("gathers", "收集参数"),
    "row messages": ("messages", "点对点消息"),
    "row background": ("background", "后台"),
    "kind forward": ("forward", "前向"),
    "kind backward": ("backward", "反向"),
    "kind exchange": ("brings gradients together", "汇总梯度"),
    "kind step": ("optimizer step", "优化器更新"),
    "kind checkpoint": ("checkpoint", "检查点"),
    "kind call": ("call", "通信"),
    "kind message": ("message", "点对点消息"),
    "kind wait": ("waits for another rank", "等待其他 rank"),
    "kind arrow": ("for this one", "等的是它"),
    "waited": ("waited {time}, most for rank {rank}", "等待 {time}，主要等 rank {rank}"),
    "way slots": ("by slots", "经共享槽"),
    "way slots past caches": ("by slots, past the caches", "经共享槽，绕过缓存"),
    "way reading": ("by reading others' memory", "直接读取其他 rank 的内存"),
    "way reading past caches": ("by reading others' memory, past the caches",
                                "直接读取其他 rank 的内存，绕过缓存"),
    "way arena": ("in the arena", "在 arena 内"),
    "asked": ("asked for {time} before", "{time} 之前已发起"),
    "not ended": ("not ended when the record did", "记录结束时尚未完成"),
    "failed": ("failed", "失败"),
    # ---- windows
    "step": ("step {number}", "第 {number} 步"),
    "all": ("the whole record", "整个记录"),
    "last events": ("the last {count} events", "最后 {count} 个事件"),
    # ---- about
    "ranks": ("{count} ranks", "{count} 个 rank"),
    "ranks.one": ("{count} rank", "{count} 个 rank"),
    "recorded": ("{time} recorded on {count} hosts", "在 {count} 台主机上记录了 {time}"),
    "recorded.one": ("{time} recorded on {count} host", "在 {count} 台主机上记录了 {time}"),
    "missing": ("{count} ranks left no record here", "{count} 个 rank 没有留下记录"),
    "missing.one": ("{count} rank left no record here", "{count} 个 rank 没有留下记录"),
    "dropped": ("up to {count} earlier events of a rank were overwritten",
                "每个 rank 最多有 {count} 个较早的事件被覆盖"),
    "clocks": ("clocks of hosts are put side by side at their first barrier",
               "各主机的时钟在第一个 barrier 处对齐"),
    "unfinished": ("rank {rank} was in {what} when its record ended",
                   "记录结束时 rank {rank} 正在 {what}"),
    # ---- the table
    **{f"column {name}": (name, chinese) for name, chinese in zip(COLUMNS, (
        "rank", "前向", "反向", "汇总", "更新", "通信中", "等待", "主要等谁", "后台通信",
        "其中被掩盖", "调用数", "缓冲区"), strict=True)},
}  # fmt: skip


def run_say(key: str, language: Language = "en", **fill: object) -> str:
    """Return a phrase in a language; the one for a single thing, where `count` is 1.

    >>> run_say("missing", count=1), run_say("missing", "zh", count=2)
    ('1 rank left no record here', '2 个 rank 没有留下记录')
    """
    one = f"{key}.one"
    found = RUN_WORDS[one if fill.get("count") == 1 and one in RUN_WORDS else key]
    return found[LANGUAGES.index(language)].format(**fill)
