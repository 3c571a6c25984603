"""Layer 9: `roundelay.horovod`, where Horovod's users look; the code lies in `fronts/horovod/`."""

from roundelay.fronts.horovod.run import run

__all__ = ["run"]
