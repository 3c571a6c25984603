"""GPT-2 of Hugging Face's transformers: `GPT2LMHeadModel`."""

__all__ = ["gpt2"]

gpt2 = {
    "transformer.wte": "embedding whole",  # its shape tells how many places there are
    "transformer.wpe": "replicate",
    "transformer.drop": "dropout whole",
    "transformer.h.0": "split",
    "transformer.h.*.ln_*": "norm",
    "transformer.h.*.attn": "region:num_heads,split_size",
    "transformer.h.*.attn.c_attn": "qkv:head_dim",
    "transformer.h.*.attn.c_proj": "row:head_dim",
    "transformer.h.*.attn.attn_dropout": "dropout sharded",
    "transformer.h.*.attn.resid_dropout": "dropout",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
    "transformer.h.*.mlp.dropout": "dropout",
    "transformer.ln_f": "norm gather",  # what follows takes the shape of the tokens
    "lm_head": "column gather whole",
}
