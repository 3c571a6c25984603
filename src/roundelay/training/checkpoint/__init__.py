"""Checkpoints: each rank writes its share, and any number of ranks, or none, reads them back."""
