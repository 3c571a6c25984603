"""Layer 2: a collective algorithm as data, and what can be done with it before it runs."""

from roundelay.schedule.compile import compile_schedule
from roundelay.schedule.compose import nest, parallel, pipeline, refine, relabel, sequence, shift
from roundelay.schedule.expression import Algebra, Expression, Order
from roundelay.schedule.layout import Layout, split
from roundelay.schedule.nested import Axis, NestedCall, NestedPhase, NestedSchedule, RankPhase
from roundelay.schedule.over_hosts import lanes_for, over_hosts
from roundelay.schedule.price import Link, Network, Price, StepPrice, price
from roundelay.schedule.program import (
    WINDOW,
    Apply,
    Operand,
    Post,
    Program,
    Programs,
    Reach,
    Wait,
    format_program,
)
from roundelay.schedule.prove import Proof, find_failures, prove
from roundelay.schedule.prove_program import prove_program
from roundelay.schedule.replay import Failure, Step, Write, held_at_start, replay
from roundelay.schedule.schedule import Cell, Schedule, Transfer
from roundelay.schedule.serialize import from_json, load, save, to_json

__all__ = [
    "WINDOW",
    "Algebra",
    "Apply",
    "Axis",
    "Cell",
    "Expression",
    "Failure",
    "Layout",
    "Link",
    "NestedCall",
    "NestedPhase",
    "NestedSchedule",
    "Network",
    "Operand",
    "Order",
    "Post",
    "Price",
    "Program",
    "Programs",
    "Proof",
    "RankPhase",
    "Reach",
    "Schedule",
    "Step",
    "StepPrice",
    "Transfer",
    "Wait",
    "Write",
    "compile_schedule",
    "find_failures",
    "format_program",
    "from_json",
    "held_at_start",
    "lanes_for",
    "load",
    "nest",
    "over_hosts",
    "parallel",
    "pipeline",
    "price",
    "prove",
    "prove_program",
    "refine",
    "relabel",
    "replay",
    "save",
    "sequence",
    "shift",
    "split",
    "to_json",
]
