"""Ray's TorchTrainer, which makes the group before the user's code runs."""

import os
import sys
from pathlib import Path

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # for `shared`, in Ray's workers

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from shared import STEPS, batch, model, tell
from torch import nn


def train(_: dict[str, object]) -> None:
    """Train on one rank."""
    torch.set_num_threads(1)
    net = ray.train.torch.prepare_model(model())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step, dist.get_rank())
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ray.train.report({"losses": losses, "backend": dist.get_backend()})


ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
result = TorchTrainer(
    train,
    train_loop_config={},
    torch_config=TorchConfig(backend=sys.argv[1]),
    scaling_config=ScalingConfig(num_workers=2),
).fit()
if result.metrics["backend"] != sys.argv[1]:
    raise SystemExit(f"the group is {result.metrics['backend']}")
tell(result.metrics["losses"])
ray.shutdown()
