"""Train on Ray: its workers are ranks, and a killed one is replaced from a checkpoint.

    python 17_ray.py

It needs `pip install 'roundelay[ray,torch]'`. One worker kills itself.

Prints, beside what Ray tells:

    2 ranks, 1 restart: loss 1.34 -> 0.09 in 30 steps
"""

import os
import signal
import tempfile

import ray
import torch
from ray import train
from torch import nn

import roundelay as rd


def train_loop(config):  # noqa: ANN001, ANN201, D103 - as Ray's users write it
    comm = rd.init()  # the communicator of all workers
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = rd.prepare(model, optimizer, strategy="zero1", comm=comm)
    told = {"ranks": comm.size, "restarts": 0, "step": 0}
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            told = rd.load(folder, model, optimizer).extra
            told["restarts"] += 1

    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(comm.rank))
    targets = inputs[:, :1] - inputs[:, 1:2].sin()
    for step in range(told["step"] + 1, 31):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told |= {"step": step, "last": comm.all_reduce(loss.detach(), "avg").item()}
        told.setdefault("first", told["last"])
        if (step, comm.rank, told["restarts"]) == (27, 1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 10 == 0:
            path = f"{config['folder']}/step-{step}"
            rd.save(path, model, optimizer, extra=told)
            train.report(told, train.Checkpoint(path) if comm.rank == 0 else None)


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
with tempfile.TemporaryDirectory() as folder:
    may_fail = train.FailureConfig(max_failures=1)
    trainer = rd.ray.RoundelayTrainer(
        train_loop,
        train_loop_config={"folder": folder},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=folder, failure_config=may_fail),
    )
    told = trainer.fit().metrics
losses = f"loss {told['first']:.2f} -> {told['last']:.2f} in {told['step']} steps"
print(f"{told['ranks']} ranks, {told['restarts']} restart: {losses}")
