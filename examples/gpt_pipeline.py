"""The GPT of `train_gpt.py` in stages over ranks: `--mesh pp=4 --pipeline 1f1b`, or tp=2,pp=2."""

from __future__ import annotations

import argparse
import sys

import torch
from gpt import GPT, SIZES, Text, mesh_of, read_text
from torch import Tensor, nn

import roundelay as rd


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all bytes of a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_pipeline(options: argparse.Namespace) -> None:
    """Train in stages; what the mesh leaves out of the ranks is data parallel."""
    comm = rd.init()
    mesh = mesh_of(options.mesh or f"pp={comm.size}", comm, ("dp", "tp", "pp"))
    if "pp" not in mesh:
        sys.exit("--pipeline has its stages along pp: --mesh pp=2, say.")
    torch.manual_seed(0)
    size = SIZES[options.size]
    pipe = rd.Pipeline(
        GPT(size), comm=mesh["pp"], schedule=options.pipeline,
        micro_batches=options.micro_batches, loss=loss_of,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.rate)
    pipe, optimizer = rd.prepare(
        pipe, optimizer, strategy=options.strategy, precision=options.precision, mesh=mesh,
        plan="gpt" if "tp" in mesh else None,
    )  # fmt: skip
    batches = rd.loader(
        Text(read_text(options.text), size.context), options.batch, mesh=mesh, drop_last=True
    )
    losses: list[float] = []
    while len(losses) < options.steps:
        for tokens, targets in batches:
            optimizer.zero_grad()
            losses.append(pipe.step(tokens, targets).item())
            optimizer.step()
            if comm.rank == 0 and len(losses) % 10 == 0:
                print(f"step {len(losses):4} of {options.steps}  loss {losses[-1]:.3f}", flush=True)
            if len(losses) == options.steps:
                break
    finish(mesh, pipe, size, losses)


def finish(mesh: rd.Mesh, pipe: rd.Pipeline, size: object, losses: list[float]) -> None:
    """Put the stages together, and show what the model has learnt."""
    state = rd.full_state_dict(pipe)
    if mesh.comm.rank != 0:
        return
    alone = GPT(size)  # type: ignore[arg-type]
    alone.load_state_dict(state)
    few = max(1, len(losses) // 10)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    print(f"loss {first:.3f} → {last:.3f} in {len(losses)} steps, {pipe.schedule}")
    print(f"\nIt writes:\n{alone.write(b'def ', 160).decode('utf-8', 'replace')}")
