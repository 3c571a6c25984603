"""The GPT of `examples/gpt.py`."""

__all__ = ["gpt"]

gpt = {
    "tokens": "embedding whole",  # places are added before the sequence is divided
    "places": "replicate",
    "blocks.0": "split",
    "blocks.*.before_*": "norm",
    "blocks.*.queries_keys_values": "qkv:head_width",
    "blocks.*.attended": "row:head_width",
    "blocks.*.perceptron.0": "column",
    "blocks.*.perceptron.2": "row",
    "last": "norm",
    "head": "column gather",
}
