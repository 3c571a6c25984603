"""LLaMA of Hugging Face's transformers, `LlamaForCausalLM`, and models of the same names."""

__all__ = ["llama"]

llama = {
    "model.embed_tokens": "embedding whole",  # its shape tells how many places there are
    "model.layers.0": "split",
    "model.layers.*layernorm": "norm",
    "*.self_attn": "region:num_key_value_heads?,num_heads? shared",  # which older versions count
    "*.self_attn.q_proj": "column:head_dim*num_key_value_groups shared",
    "*.self_attn.k_proj": "column:head_dim shared",
    "*.self_attn.v_proj": "column:head_dim shared",
    "*.self_attn.o_proj": "row:head_dim*num_key_value_groups shared",
    "*.mlp": "region",
    "*.mlp.gate_proj": "column",
    "*.mlp.up_proj": "column",
    "*.mlp.down_proj": "row",
    "model.norm": "norm gather",
    "lm_head": "column gather whole",
}
