"""Plans that ship fit the classes of transformers, where it is installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from roundelay.parallel.sharding import sharding_of  # noqa: E402 - only with torch
from roundelay.parallel.tensor.plan import apply_plan  # noqa: E402

VOCABULARY, LENGTH = 29, 24


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=24, n_layer=2, n_head=8, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(key_heads: int = 8) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=27, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=key_heads, head_dim=4,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [gpt2, llama], ids=lambda make: make.__name__)
def test_as_one_device(make: Any, size: int, *, sequence: bool) -> None:
    torch.manual_seed(3)
    start = make().double().train()
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    device = copy.deepcopy(start)
    wanted = device(tokens, labels=tokens)
    wanted.loss.backward()
    grads = {name: parameter.grad for name, parameter in device.named_parameters()}

    def body(comm: rd.Communicator) -> None:
        model = copy.deepcopy(start)
        apply_plan(model, make.__name__, rd.Mesh(tp=size, comm=comm), sequence_parallel=sequence)
        found = model(tokens, labels=tokens)
        found.loss.backward()
        close(found.logits, wanted.logits)
        for name, parameter in model.named_parameters():
            sharding = sharding_of(parameter)
            close(sharding.whole(parameter.grad) if sharding else parameter.grad, grads[name])

    rd.run(body, size, "threads")


def close(found: Any, wanted: Any) -> None:
    assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()
