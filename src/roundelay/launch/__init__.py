"""Layer 9: starts ranks, from inside a program, by a launcher, or as one."""

from roundelay.launch.local import run
from roundelay.launch.script import init

__all__ = ["init", "run"]
