"""The picture of expert parallel: which token went to which expert, in a mixture that ran."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

import roundelay as rd
from roundelay.parallel.expert.router import Queues, Routing, capacity_of
from roundelay.view.chart import COLOURS, framed

__all__ = ["expert_parallel", "speed_table"]

RANKS, TOKENS, EXPERTS, WIDTH, TOP_K, FACTOR = 3, 4, 6, 8, 2, 1.0
WIDE, LEFT, RIGHT, TOP, ROW = 760, 190, 500, 92, 27
PITCH = TOKENS * ROW + 26  # from rank to rank


RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "expert_parallel.json"


def speed_table() -> str:
    """Return what dispatch and combine took beside gloo, as it was measured."""
    if not RESULTS.exists():
        return "Not measured yet: `python benchmarks/expert_parallel.py` does.\n"
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    heads = ["ranks", "tokens of each", "width", "dispatch and combine (µs)", "gloo (µs)",
             "gloo / ours", "torch alone / ours", "the all-to-alls alone (µs)", "gloo (µs)",
             "gloo / ours"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|{'---:|' * len(heads)}"]
    for row in found["rows"]:
        both = [row["dispatch and combine"], row["exchange"]]
        cells = [
            f"{each['microseconds']:.0f} | {each['gloo_microseconds']:.0f} | "
            f"{each['gloo_over_ours']:.2f}"
            for each in both
        ]
        cells.insert(1, f"{both[0].get('torch_over_ours', '')}")
        lines.append(f"| {row['ranks']} | {row['tokens']} | {row['width']} | {' | '.join(cells)} |")
    told = (
        f"{found['experts']} experts, top {found['top_k']}, float32, forward only. Measured on "
        f"{found['cores']} cores, Python {found['python']}, torch {found['torch']}, with "
        f"`{found['command']}`."
    )
    return "\n".join([*lines, "", told, ""])


def ran(comm: rd.Communicator) -> tuple[list[list[int]], list[list[bool]], list[int]]:
    """Return where the tokens of one rank went, what was kept, and what each expert took."""
    router = rd.Router(WIDTH, EXPERTS, top_k=TOP_K, capacity_factor=FACTOR)
    with torch.no_grad():
        router.score.weight.copy_(drawn(3, EXPERTS, WIDTH))
    layer = rd.MoE(lambda: torch.nn.Linear(WIDTH, WIDTH), router, comm)
    tokens = drawn(comm.rank, TOKENS, WIDTH)
    layer(tokens)
    routing: Routing = router(tokens)
    queues = Queues(comm.all_gather(routing.counts()), FACTOR)
    taken: list[int] = queues.taken().sum(0).tolist()
    if sum(taken) != int(layer.load.sum()) - layer.dropped:
        raise ValueError("The picture and the layer do not agree.")
    kept = queues.kept(routing, comm.rank)
    if kept is None:
        raise ValueError("Nothing can be dropped.")
    return routing.experts.tolist(), kept.tolist(), taken


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Return random numbers that do not depend on those of other ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expert_parallel() -> str:
    """Return the SVG: tokens on the left, experts on the right, in the colours of their ranks."""
    results = rd.run(ran, RANKS, "threads")
    limit = capacity_of(RANKS * TOKENS * TOP_K, EXPERTS, FACTOR)
    height = TOP + RANKS * PITCH + 20
    title = f"{EXPERTS} experts on {RANKS} ranks: a token goes to {TOP_K}, an expert takes {limit}"
    key = "thick: first choice · thin: second · dashed: the expert was full, the choice is dropped"
    parts = [
        f'<text x="16" y="52" fill="#5f6b7a">{key}</text>',
        *(line for rank in range(RANKS) for line in _lines(rank, *results[rank][:2])),
        *(box for rank in range(RANKS) for box in _boxes(rank, results[0][2], limit)),
    ]
    return framed(parts, title=title, left=16, size=(WIDE, height))


def _lines(rank: int, experts: list[list[int]], kept: list[list[bool]]) -> Iterator[str]:
    for token, (picked, stays) in enumerate(zip(experts, kept, strict=True)):
        for choice, (expert, taken) in enumerate(zip(picked, stays, strict=True)):
            y, z = _token(rank, token), _expert(expert)
            colour = COLOURS[rank] if taken else "#b0b6bd"
            dash = "" if taken else ' stroke-dasharray="4 4"'
            yield (
                f'<path d="M{LEFT} {y:.1f}C{LEFT + 130} {y:.1f} {RIGHT - 130} {z:.1f} {RIGHT} '
                f'{z:.1f}" fill="none" stroke="{colour}" stroke-width="{2.4 - choice}"{dash}/>'
            )


def _boxes(rank: int, taken: list[int], limit: int) -> Iterator[str]:
    top = TOP + rank * PITCH
    for x, wide in ((16, 12), (732, 12)):
        yield (
            f'<rect x="{x}" y="{top}" width="{wide}" height="{TOKENS * ROW}" rx="4" '
            f'fill="{COLOURS[rank]}"/>'
        )
    yield f'<text x="36" y="{top - 6}" font-weight="600">rank {rank}</text>'
    for token in range(TOKENS):
        y = _token(rank, token)
        yield (
            f'<rect x="36" y="{y - 10:.1f}" width="{LEFT - 36}" height="20" rx="4" '
            f'fill="{COLOURS[rank]}22" stroke="{COLOURS[rank]}"/>'
            f'<text x="46" y="{y + 4:.1f}">token {token}</text>'
        )
    each = EXPERTS // RANKS
    for expert in range(rank * each, (rank + 1) * each):
        y = _expert(expert)
        yield (
            f'<rect x="{RIGHT}" y="{y - 16:.1f}" width="222" height="32" rx="5" '
            f'fill="{COLOURS[rank]}22" stroke="{COLOURS[rank]}"/>'
            f'<text x="{RIGHT + 12}" y="{y + 4:.1f}">'
            f"expert {expert}: {taken[expert]} of {limit}</text>"
        )


def _token(rank: int, token: int) -> float:
    return TOP + rank * PITCH + (token + 0.5) * ROW


def _expert(expert: int) -> float:
    rank, place = divmod(expert, EXPERTS // RANKS)
    return TOP + rank * PITCH + (place + 0.5) * TOKENS * ROW / (EXPERTS // RANKS)
