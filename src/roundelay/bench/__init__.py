"""Layer 9: measuring collectives on real ranks, beside the machine's memory and other libraries."""

from roundelay.bench.messages import Case, CaseResult, PeerVersions, Spec, Timing
from roundelay.bench.report import BenchReport
from roundelay.bench.session import installed_peers, measure

__all__ = [
    "BenchReport",
    "Case",
    "CaseResult",
    "PeerVersions",
    "Spec",
    "Timing",
    "installed_peers",
    "measure",
]
