"""Hugging Face's models as they are, over ranks that share a sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch, InvalidArgumentError

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

TOKENS, WORDS = 13, 40


def model_called(name: str) -> Any:
    torch.manual_seed(0)
    common = {
        "vocab_size": WORDS,
        "attn_implementation": "sdpa",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if name == "gpt2":
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}
        dropped = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0)
        config = transformers.GPT2Config(**sizes, **dropped, **common)
        return transformers.GPT2LMHeadModel(config).double()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common)).double()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_is_the_one_of_one_device(name: str) -> None:
    """With the places of this rank's tokens; with its own it would be wrong, and is refused."""
    model = model_called(name)
    x = torch.randint(0, WORDS, (2, TOKENS))
    whole = model(x, use_cache=False).logits

    def body(comm: rd.Communicator) -> None:
        mine, shard = copy.deepcopy(model), rd.shard_sequence(x, comm)
        places = rd.sequence_positions(TOKENS, comm)[None]
        with rd.context_parallel(comm):
            part = mine(shard, position_ids=places, use_cache=False).logits
        torch.testing.assert_close(rd.unshard_sequence(part, comm), whole, rtol=1e-12, atol=1e-12)
        with (
            pytest.raises((InvalidArgumentError, CollectiveMismatch), match="sequence_positions"),
            rd.context_parallel(comm),
        ):
            mine(shard, use_cache=False)

    rd.run(body, 2, "threads")
