"""`rd.jax`: the collectives inside programs that JAX compiles; see `roundelay.fronts.jax`."""

from roundelay.fronts.jax import *  # noqa: F403 - all of it, by this shorter name
from roundelay.fronts.jax import __all__ as __all__
