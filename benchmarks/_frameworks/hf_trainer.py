"""Hugging Face's Trainer: the group is made first, as for Accelerate."""

import sys
import tempfile

import torch
import torch.distributed as dist
from shared import STEPS, tell
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
torch.manual_seed(7)
net = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0)
)
tokens = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(
    net,
    TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=rows,
)
trainer.train()
if dist.get_rank() == 0:
    tell([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
dist.destroy_process_group()
