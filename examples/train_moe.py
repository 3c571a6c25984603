"""Train a small GPT whose perceptrons are mixtures of experts, which the ranks have between them.

    python examples/train_moe.py --steps 100
    roundelay run -n 4 examples/train_moe.py --experts 8 --capacity 1.25

Every rank has its own rows and its own experts; tokens travel to the experts that they are for, and
back. Prints the loss, how evenly experts are used (1 is even), and how many choices were dropped.
"""

from __future__ import annotations

import argparse

import torch
from gpt import GPT, SIZES, Size, Text, count, loss_of, read_text
from torch import nn

import roundelay as rd
from roundelay.parallel.expert import average_gradients, balance_loss


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="nano", choices=SIZES)
    parser.add_argument("--experts", type=count, default=8, help="of each layer, of all ranks")
    parser.add_argument("--top-k", type=count, default=2, help="experts that a token goes to")
    parser.add_argument("--capacity", type=float, default=None, help="a limit; without, none drops")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss")
    parser.add_argument("--steps", type=count, default=100)
    parser.add_argument("--batch", type=count, default=24, help="rows of all ranks together")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--text", default=None, help="a file to learn from")
    return parser.parse_args()


def moe_gpt(size: Size, options: argparse.Namespace, comm: rd.Communicator) -> GPT:
    """Return a GPT with a mixture in the place of every perceptron."""

    def expert() -> nn.Module:
        width = size.width
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    model = GPT(size)
    for block in model.blocks:
        router = rd.Router(
            size.width, options.experts, top_k=options.top_k, capacity_factor=options.capacity
        )
        block.perceptron = rd.MoE(expert, router, comm)
    return model


def main() -> None:
    """Train, and say how it goes."""
    options = arguments()
    comm = rd.init()
    mesh = rd.Mesh(ep=comm.size, comm=comm)
    torch.manual_seed(0)
    size = SIZES[options.size]
    model = moe_gpt(size, options, mesh["ep"])
    mixtures = [module for module in model.modules() if isinstance(module, rd.MoE)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    data = Text(read_text(options.text), size.context)
    own = options.batch // comm.size
    if own * comm.size != options.batch:
        raise SystemExit(f"--batch {options.batch} does not divide by {comm.size} ranks.")
    for step in range(1, options.steps + 1):
        first = (step - 1) * options.batch + comm.rank * own
        rows = [data[row % len(data)] for row in range(first, first + own)]
        tokens, targets = (torch.stack(column) for column in zip(*rows, strict=True))
        optimizer.zero_grad()
        loss = loss_of(model, tokens, targets)
        balance = balance_loss(model) / len(mixtures)
        (loss + options.balance * balance).backward()
        average_gradients(model, mesh["ep"])
        optimizer.step()
        told = torch.stack([loss.detach(), balance.detach()])
        if step % max(1, options.steps // 10) == 0 or step == 1:
            mean = comm.all_reduce(told, "avg")
            dropped = sum(mixture.dropped for mixture in mixtures)
            if comm.rank == 0:
                print(
                    f"step {step:4} of {options.steps}  loss {mean[0]:.4f}  "
                    f"balance {mean[1]:.3f}  dropped {dropped}",
                    flush=True,
                )
    if comm.rank == 0:
        print(f"choices of each expert in the last layer: {mixtures[-1].load.tolist()}")


if __name__ == "__main__":
    main()
