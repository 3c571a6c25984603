"""The zoo's programs under torch's own data parallelism, beside ours: a table of docs/training.md.

Both were measured by benchmarks/peers.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["OUTCOMES", "STRATEGIES", "peers", "rows"]

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "benchmarks" / "results" / "peers.json"
OUTCOMES = ("right", "refused", "wrong", "raw error", "hang")
NOT_COMMON = "not common"
#: Each peer, and the strategy that stands beside it.
STRATEGIES = {
    "DDP": "ddp",
    "ZeroRedundancyOptimizer": "zero1",
    "FSDP2": "zero3",
    "FSDP2, reshard_after_forward=False": "zero2",
}

#: Of each peer, by program, what it came to there and here.
Rows = dict[str, dict[str, tuple[str, str]]]


def rows() -> Rows:
    """Return what common programs come to on several ranks: with a peer, and with ours."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["programs"]
    return {
        peer: {
            name: (found[peer]["verdict"], found[way]["verdict"])
            for name, found in measured.items()
            if found[peer]["verdict"] != NOT_COMMON
        }
        for peer, way in STRATEGIES.items()
    }


def peers() -> str:
    """Return the table, and where a peer is right and ours refuses."""
    measured: Mapping[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    found = rows()
    lines = ["| common programs | the peer | ours |", "|---|---|---|"]
    for peer, programs in found.items():
        theirs, ours = (_counts([pair[at] for pair in programs.values()]) for at in range(2))
        lines.append(f"| {len(programs)}: {peer} beside `{STRATEGIES[peer]}` | {theirs} | {ours} |")
    how = f"`{measured['command']}`, torch {measured['torch']}, `benchmarks/results/peers.json`"
    lines += ["", f"({' / '.join(OUTCOMES)}; {how})", ""]
    for title, there, here in (
        ("Right there, refused here", "right", "refused"),
        ("Silently wrong there", "wrong", ""),
    ):
        lines += [f"**{title}.** {_listed(found, there, here)}", ""]
    return "".join(f"{line}\n" for line in lines[:-1])


def _counts(words: Sequence[str]) -> str:
    return " / ".join(str(words.count(one)) for one in OUTCOMES)


def _listed(found: Rows, there: str, here: str) -> str:
    """List the programs with these outcomes, each with the peers that it holds for."""
    which: dict[str, list[str]] = {}
    for peer, programs in found.items():
        for name, pair in programs.items():
            if pair[0] == there and (not here or pair[1] == here):
                which.setdefault(name, []).append(peer)
    told = [f"{name} ({'; '.join(each)})" for name, each in which.items()]
    return "; ".join(told) + "." if told else "None."
