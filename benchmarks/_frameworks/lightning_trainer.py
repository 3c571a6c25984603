"""Lightning's Trainer, which averages integers at the end of an epoch."""

import logging
import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from shared import STEPS, batch, leave, model, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning").setLevel(logging.ERROR)
torch.set_num_threads(1)


class Module(lightning.LightningModule):
    """The model, with a loss and an integer that are logged over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.losses: list[float] = []

    def training_step(self, given: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.mse_loss(self.net(given[0]), given[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        self.log("rows", torch.tensor(len(given[0])), on_epoch=True, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, given: list[torch.Tensor]) -> None:
        """Log a loss over all ranks."""
        loss = nn.functional.mse_loss(self.net(given[0]), given[1])
        self.log("validated", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


parts = [batch(step, 0) for step in range(2 * STEPS)]
data = TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=sys.argv[1]),
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
if trainer.global_rank == 0:
    tell([*module.losses, float(trainer.callback_metrics["validated"])])
leave(sys.argv[1])
