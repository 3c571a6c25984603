"""Tensor and sequence parallel: weights cut between ranks, by a plan that says which and how."""
