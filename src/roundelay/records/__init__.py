"""Layer 5: what a run leaves of itself when it is traced: who did what, and when."""

from roundelay.records.events import Event, RankRecord, RunRecord
from roundelay.records.phases import Trace, named, phase
from roundelay.records.read import read_rank, read_run

__all__ = ["Event", "RankRecord", "RunRecord", "Trace", "named", "phase", "read_rank", "read_run"]
