"""What was measured as numbers that people compare: bandwidths, ratios, shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roundelay.bench.messages import ARENA, OURS, CaseResult, PeerVersions, Spec, Timing
from roundelay.bench.session import measure
from roundelay.bench.workload import bus_factor
from roundelay.collectives import collectives
from roundelay.errors import rank_count
from roundelay.html_table import html_table

__all__ = ["BenchReport", "Comparison", "document", "lines"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case of one contender of ours, with the peers beside it."""

    row: CaseResult
    timing: Timing
    alg_bw: float  # GB/s
    bus_bw: float
    floor_percent: float | None  # 100: as fast as memory allows
    peers: dict[str, Timing]

    def ratio(self, peer: str) -> float:
        """Return how many times longer the peer takes."""
        return self.peers[peer].seconds / self.timing.seconds


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A whole run: what `BenchReport.of` measures; a table in a terminal and in a notebook."""

    spec: Spec
    rows: Sequence[CaseResult]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, spec: Spec) -> BenchReport:
        """Measure all cases of a spec; peers take turns with us."""
        rows: list[CaseResult] = []
        versions: dict[str, str] = {}
        for message in measure(spec):
            if isinstance(message, PeerVersions):
                versions.update(message.versions)
            else:
                rows.append(message)
        return cls(spec, rows, versions)

    def document(self) -> dict[str, object]:
        """Return all of it as JSON of nccl-tests' shape."""
        return document(self.spec, list(self.rows), dict(self.versions))

    def __str__(self) -> str:
        head, *rows = self._table()
        table = [head, *rows]
        widths = [max(len(row[at]) for row in table) for at in range(len(head))]
        return "\n".join([self._title(), *("  ".join(
            word.rjust(width) for word, width in zip(row, widths, strict=True))
            for row in table)])  # fmt: skip

    def _repr_html_(self) -> str:
        """Show the same table in a notebook."""
        head, *rows = self._table()
        return html_table(head, rows, title=self._title())

    def _title(self) -> str:
        beside = "".join(f", {name}: {version}" for name, version in self.versions.items())
        return (f"{self.spec.cases[0].collective} on {rank_count(self.spec.size)}, "
                f"{self.spec.engine}, {self.spec.dtype}{beside}")  # fmt: skip

    def _table(self) -> list[list[str]]:
        peers = self.spec.contenders[1:]
        found = [["bytes", "time (µs)", "busbw (GB/s)", "wrong", "floor",
                  *(word for peer in peers for word in (f"{peer} (µs)", "ratio"))]]  # fmt: skip
        for line in lines(self.spec, list(self.rows)):
            share = "-" if line.floor_percent is None else f"{line.floor_percent:.0f} %"
            beside = [word for peer in peers for word in (
                (f"{line.peers[peer].seconds * 1e6:.4g}", f"{line.ratio(peer):.2f}x")
                if peer in line.peers else ("-", "-"))]  # fmt: skip
            found.append([str(line.row.nbytes), f"{line.timing.seconds * 1e6:.4g}",
                          f"{line.bus_bw:.2f}", str(line.timing.wrong), share,
                          *beside])  # fmt: skip
        return found


def lines(spec: Spec, rows: list[CaseResult]) -> list[Comparison]:
    """Put the first contender, which is ours, beside the others."""
    ours, comparisons = spec.contenders[0], []
    for row in rows:
        timing = row.timings[ours]
        speed = row.nbytes / timing.seconds / 1e9
        factor = bus_factor(row.collective, spec.size)
        share = None if row.floor is None else 100 * row.floor / timing.seconds
        peers = {name: each for name, each in row.timings.items() if name != ours}
        comparisons.append(Comparison(row, timing, speed, speed * factor, share, peers))
    return comparisons


def document(spec: Spec, rows: list[CaseResult], versions: dict[str, str]) -> dict[str, object]:
    """Return the run in the shape of nccl-tests' JSON: times in µs, bandwidths in GB/s.

    `results[].peers` and `results[].floor_percent` are ours; what could not be measured is null or
    left out.
    """
    comparisons = lines(spec, rows)
    average = sum(line.bus_bw for line in comparisons) / len(comparisons) if comparisons else 0.0
    return {
        "version": 1,
        "config": {
            "ranks": spec.size,
            "engine": spec.engine,
            "arena": spec.contenders[0] == ARENA,
            "algorithm": None if spec.contenders[0] in (OURS, ARENA) else spec.contenders[0],
            "versions": versions,
        },
        "results": [_result(spec, line) for line in comparisons],
        "average_bus_bandwidth": _short(average),
    }


def _result(spec: Spec, line: Comparison) -> dict[str, object]:
    contract = collectives.load(line.row.collective)
    return {
        "collective": contract.name,
        "size": line.row.nbytes,
        "count": line.row.count,
        "type": spec.dtype,
        "redop": spec.op if contract.reduces and not contract.idempotent else None,
        "root": spec.root if contract.rooted else -1,
        "time": _short(line.timing.seconds * 1e6),
        "best_time": _short(line.timing.best * 1e6),
        "calls": line.timing.calls,
        "alg_bw": _short(line.alg_bw),
        "bus_bw": _short(line.bus_bw),
        "nwrong": line.timing.wrong,
        "floor_percent": None if line.floor_percent is None else _short(line.floor_percent),
        "peers": {
            name: {
                "time": _short(timing.seconds * 1e6),
                "best_time": _short(timing.best * 1e6),
                "calls": timing.calls,
                "nwrong": timing.wrong,
                "ratio": _short(line.ratio(name)),
            }
            for name, timing in line.peers.items()
        },
    }


def _short(number: float) -> float:
    return float(f"{number:.4g}")
