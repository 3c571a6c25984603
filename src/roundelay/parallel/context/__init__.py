"""Context parallel: the sequence is divided between ranks, and attention goes over all of it."""
