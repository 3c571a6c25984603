"""Layer 6: joins collective, algorithm and engine into one object per rank."""

from roundelay.communicator._communicator import Communicator, Traffic
from roundelay.communicator.point_to_point import ANY

__all__ = ["ANY", "Communicator", "Traffic"]
