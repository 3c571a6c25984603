"""Ray's TorchTrainer, which makes the group before the user's code runs."""

import json
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


def train(config: dict[str, str]) -> None:
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
    if dist.get_rank() == 0:
        told = {"losses": losses, "backend": dist.get_backend()}
        (Path(config["folder"]) / "told.json").write_text(json.dumps(told), encoding="utf-8")


ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
TorchTrainer(
    train,
    train_loop_config={"folder": sys.argv[2]},
    torch_config=TorchConfig(backend=sys.argv[1]),
    scaling_config=ScalingConfig(num_workers=2),
).fit()
ray.shutdown()
told = json.loads((Path(sys.argv[2]) / "told.json").read_text(encoding="utf-8"))
if told["backend"] != sys.argv[1]:
    raise SystemExit(f"the group is {told['backend']}")
tell(told["losses"])
