"""Layer 6: real numbers for a picture: read from a text, and run on the reference engine."""

from roundelay.values.read import Numbers, Values, counts_from, size_for, values_from

__all__ = ["Numbers", "Values", "counts_from", "size_for", "values_from"]
