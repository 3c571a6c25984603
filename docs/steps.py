"""Tables of what training steps took: every number is read from benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["ddp", "gpu", "tensor_parallel", "zero"]

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
WORDS = {
    "alone": "no exchange", "ours": "ours",
    "torch_roundelay": "torch DDP, our backend", "torch_gloo": "torch DDP, gloo",
    "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
    "fsdp2_roundelay": "FSDP2, our backend", "fsdp2_gloo": "FSDP2, gloo",
}  # fmt: skip


def ddp(results: Path = RESULTS) -> str:
    """Return what steps under DDP took, beside torch's own."""
    found = _read(results / "ddp.json")
    steps = {name: one["milliseconds"] for name, one in found.items() if isinstance(one, dict)}
    return _milliseconds(steps, found)


def zero(results: Path = RESULTS) -> str:
    """Return what steps under ZeRO took, beside DDP and FSDP2."""
    found = _read(results / "zero.json")
    steps = {
        f"{found['ranks']} ranks, {one['tokens']} tokens": one["milliseconds"]
        for one in found.values()
        if isinstance(one, dict)
    }
    return _milliseconds(steps, found)


def tensor_parallel(results: Path = RESULTS) -> str:
    """Return what passes through cut layers took, beside torch's DTensor, and the ratios."""
    found = _read(results / "tensor_parallel.json")
    rows = [each for each in found.values() if isinstance(each, dict)]
    columns = {
        "one_rank": "not cut", "ours": "ours", "ours_sequence": "ours, sequence parallel",
        "dtensor_roundelay": "DTensor, our backend", "dtensor_gloo": "DTensor, gloo",
    }  # fmt: skip
    if all("compute_alone" in each["milliseconds"] for each in rows):
        columns["compute_alone"] = "ours, sums left out"
    lines = [
        f"| ms per pass | {' | '.join(columns.values())} | DTensor to ours: our backend, gloo |",
        f"|---|{'---:|' * (len(columns) + 1)}",
    ]
    for each in rows:
        times = " | ".join(f"{each['milliseconds'][name]:,.0f}" for name in columns)
        ratios = ", ".join(f"{ratio:.2f}" for ratio in each["dtensor_to_ours"].values())
        tokens = each["rows"] * each["tokens"]
        lines.append(f"| {found['ranks']} ranks, {tokens} tokens | {times} | {ratios} |")
    told = (
        f"Medians of {found['rounds']} rounds; {found['parameters'] / 1e6:.1f} M parameters on "
        f"{found['cores']} cores, torch {found['torch']}, with `{found['command']}`."
    )
    return "\n".join([*lines, "", told, ""])


def gpu(results: Path = RESULTS) -> str:
    """Return how many tokens a GPU trained on in a second, under every strategy."""
    found = _read(results / "gpu.json")
    rows = {name: one for name, one in found.items() if isinstance(one, dict)}
    lines = ["| one rank | tokens/s | of the plain loop | peak |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {one['tokens_per_second']:,.0f} | {one['of_plain']:.3f} "
        f"| {one['peak_bytes'] / 2**20:,.0f} MiB |"
        for name, one in rows.items()
    ]
    told = (
        f"{found['parameters'] / 1e6:.0f} M parameters on an {found['device']}, torch "
        f"{found['torch']}, with `python benchmarks/gpu.py`."
    )
    return "\n".join([*lines, "", told, ""])


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _milliseconds(steps: dict[str, dict[str, float]], found: dict[str, Any]) -> str:
    names = [name for name in WORDS if any(name in took for took in steps.values())]
    lines = [
        f"| ms per step | {' | '.join(WORDS[name] for name in names)} |",
        f"|---|{'---:|' * len(names)}",
    ]
    for title, took in steps.items():
        cells = [f"{took[name]:.0f}" if name in took else "-" for name in names]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    told = (
        f"{found['parameters'] / 1e6:.1f} M parameters on {found['cores']} cores, Python "
        f"{found['python']}, torch {found['torch']}, with `{found['command']}`."
    )
    return "\n".join([*lines, "", told, ""])
