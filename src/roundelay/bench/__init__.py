"""Layer 9: measuring collectives on real ranks, beside the machine's memory and other libraries."""

from roundelay.bench.messages import Case, Head, Row, Spec, Timing
from roundelay.bench.session import installed_peers, measure

__all__ = ["Case", "Head", "Row", "Spec", "Timing", "installed_peers", "measure"]
