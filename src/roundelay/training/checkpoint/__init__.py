"""Checkpoints: saved by some ranks, loaded by others, read by none."""
