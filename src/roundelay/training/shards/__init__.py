"""Tensors that are divided between the ranks and compute as the whole."""
