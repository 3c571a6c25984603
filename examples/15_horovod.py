"""A Horovod script, with one line changed: the import.

    roundelay run -n 2 15_horovod.py

Every rank has its own rows; the weights are those of all rows. Prints:

    [0] 2 ranks, loss 1.3757 -> 0.0162
    [0] weight 1.81 and bias -1.00 on every rank
"""

import torch

import roundelay.horovod.torch as hvd  # was: import horovod.torch as hvd


def main() -> None:
    """Fit a line as Horovod's own examples train: nothing else is Roundelay's."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # ranks begin apart, and are brought together below
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.0)
        model.bias.fill_(-1.0 + hvd.rank())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    x = torch.linspace(-1, 1, 64).reshape(-1, 1)[hvd.rank() :: hvd.size()]
    y = 2 * x - 1
    losses = []
    for _ in range(16):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())

    weights = hvd.allgather(torch.stack([model.weight.data.flatten(), model.bias.data]).T)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        if not torch.equal(weights[0], weights[-1]):
            raise SystemExit("the ranks have drifted apart")
        weight, bias = weights[0].tolist()
        print(f"weight {weight:.2f} and bias {bias:.2f} on every rank")


if __name__ == "__main__":
    main()
