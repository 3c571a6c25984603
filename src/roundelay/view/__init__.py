"""Layer 8: pictures. Reads schedules and records of runs; never runs anything itself."""

from roundelay.view.picture import CellView, Frame, Picture, picture

__all__ = ["CellView", "Frame", "Picture", "picture"]
