"""Layer 2: a collective algorithm as data, and what can be done with it before it runs."""

from roundelay.schedule.compose import (
    nest,
    parallel,
    pipeline,
    refine,
    relabel,
    sequence,
    shift,
)
from roundelay.schedule.expression import Algebra, Expression, Order
from roundelay.schedule.layout import Layout, split
from roundelay.schedule.price import Link, Network, Price, StepPrice, price
from roundelay.schedule.prove import Proof, find_failures, prove
from roundelay.schedule.replay import Failure, Step, Write, held_at_start, replay
from roundelay.schedule.schedule import Cell, Schedule, Transfer

__all__ = [
    "Algebra",
    "Cell",
    "Expression",
    "Failure",
    "Layout",
    "Link",
    "Network",
    "Order",
    "Price",
    "Proof",
    "Schedule",
    "Step",
    "StepPrice",
    "Transfer",
    "Write",
    "find_failures",
    "held_at_start",
    "nest",
    "parallel",
    "pipeline",
    "price",
    "prove",
    "refine",
    "relabel",
    "replay",
    "sequence",
    "shift",
    "split",
]
