"""The formulas of `why` in Chinese: their words, phrase by phrase; numbers and signs stay."""

from __future__ import annotations

import re
from dataclasses import replace

from roundelay.planning.why import Term

__all__ = ["in_chinese"]

#: What a term is called.
NAMES = {
    "parameters": "参数",
    "gradients": "梯度",
    "optimizer": "优化器状态",
    "a layer keeps": "每层保留",
    "around layers": "各层之外",
    "activations": "激活",
    "buffers": "缓冲区",
    "gathered": "聚齐的单元",
    "total": "合计",
    "forward": "前向",
    "backward": "反向",
    "recompute": "重算",
    "update": "更新",
    "tp waits": "等待 tp",
    "cp waits": "等待 cp",
    "pp waits": "等待 pp",
    "dp waits": "等待 dp",
    "bubble": "气泡",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "step": "一步",
}

#: Phrases of formulas; longer ones stand first, since they hold shorter ones.
PHRASES = {
    "bytes of a message·(messages out and in, and a server's inboxes)": (
        "一条消息的字节·(收发的消息，以及服务器的收件箱)"
    ),
    "bytes that the optimizer reads and writes / memory's bandwidth": (
        "优化器读写的字节 / 显存带宽"
    ),
    "gathers beyond forward + gathers and scatters beyond backward": (
        "前向盖不住的聚集 + 反向盖不住的聚集与散发"
    ),
    "hops beyond attention, forward and backward": "注意力盖不住的跳数，前向和反向",
    "passes·scatters beyond backward + buckets·gather after the step": (
        "遍数·反向盖不住的散发 + 桶数·更新后的聚集"
    ),
    "what lies around the layers + two layers": "各层之外的部分 + 两层",
    "inside of attention and perceptron": "注意力与感知机内部",
    "8 B for a token and for its target + the last norm + 4 B for each logit": (
        "token 及其目标各 8 B + 末层归一化 + 每个 logit 4 B"
    ),
    "rows filled by turns": "轮流填充的行",
    "results on their way": "途中的结果",
    "parts after the step": "份更新后的分片",
    "micro-batches in flight·(layers·a layer + around)": "在途微批·(层数·每层 + 各层之外)",
    "one layer computed again": "重算的一层",
    "and what the server updates": "加上服务器更新的部分",
    "the input of the layer": "该层的输入",
    "sums of activations": "激活求和次数",
    "messages in a row·one message": "接连的消息数·一条消息",
    "max(both, buckets·both - backward)": "max(两者, 桶数·两者 - 反向)",
    "computed + bubble + waited for": "计算 + 气泡 + 等待",
    "forward once more": "再做一次前向",
    "a micro-batch": "一个微批",
    "micro-batches": "微批数",
    "all of it": "全部相加",
    "padding": "填充",
    "norms": "归一化",
    "inputs": "输入",
    "layers": "层数",
    "latencies": "各次延迟",
    "bytes/fold": "字节/归约速度",
    "bytes/B": "字节/带宽",
    "peak": "峰值",
    "parts": "份数",
    "forward": "前向",
    "none": "无",
    " ranks: ": " 个 rank：",
}
ONE_OF = re.compile(r"one of (\d+)")


def in_chinese(term: Term) -> Term:
    """Return a term with its words in Chinese; numbers and signs stay.

    >>> in_chinese(Term("backward", "2·forward", "2·1.5", 3.0, "seconds")).formula
    '2·前向'
    """
    formula = ONE_OF.sub(r"\1 份之一", term.formula)
    for phrase, chinese in PHRASES.items():
        formula = formula.replace(phrase, chinese)
    return replace(term, what=NAMES[term.what], formula=formula)
