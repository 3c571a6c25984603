"""Tables of what was measured: every number is read from benchmarks/results, none is typed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from roundelay.view.terminal_text import nbytes_text

__all__ = [
    "OURS",
    "RESULTS",
    "Measured",
    "Row",
    "all_reduce",
    "call_cost",
    "horovod",
    "many_ranks",
    "missing",
    "read",
    "start_up",
    "two_hosts",
    "two_ranks",
    "ways",
]

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
OURS = ("roundelay", "arena", "registered")  # ordinary arrays first


class Row(msgspec.Struct, frozen=True):
    """One collective on so many bytes: microseconds of every contender."""

    bytes: int
    microseconds: dict[str, float]
    collective: str = "all_reduce"
    floor_percent_roundelay: float | None = None
    floor_percent_arena: float | None = None

    def ratio(self, ours: str) -> str:
        """Say the speed-up of one of ours over the best peer; a dash without peers."""
        peers = [took for name, took in self.microseconds.items() if name not in OURS]
        own = self.microseconds.get(ours)
        return "-" if own is None or not peers else f"{min(peers) / own:.1f}x"


class Measured(msgspec.Struct, frozen=True):
    """A file of results."""

    command: str
    python: str
    cores: int
    instruction_set: str
    versions: dict[str, str] = {}
    float32_sum: dict[str, list[Row]] = {}  # the rows by number of ranks

    def where(self) -> str:
        """Say on what, beside what and by what it was measured."""
        beside = "".join(f", {name}: {version}" for name, version in self.versions.items())
        return (
            f"Measured on {self.cores} cores ({self.instruction_set}), Python {self.python}"
            f"{beside}, with `{self.command}`.\n"
        )


def two_ranks(results: Path = RESULTS) -> str:
    """Return the table of all-reduces on two ranks."""
    measured = read(results / "all_reduce_sizes.json")
    if measured is None:
        return missing("all_reduce_sizes")
    return f"{_table(measured.float32_sum['2 ranks'])}\n{measured.where()}"


def all_reduce(results: Path = RESULTS) -> str:
    """Return the tables of all-reduces for every number of ranks, of every machine."""
    made = []
    for path in sorted(results.glob("all_reduce_sizes*.json")):
        measured = read(path)
        if measured is not None:
            made += [f"{ranks}:\n\n{_table(rows)}" for ranks, rows in measured.float32_sum.items()]
            made.append(measured.where())
    return "\n".join(made) or missing("all_reduce_sizes")


def many_ranks(results: Path = RESULTS) -> str:
    """Return what algorithms for many ranks took, one table for each machine."""
    found = map(read, sorted(results.glob("many_ranks*.json")))
    tables = [_two_ways(measured) for measured in found if measured is not None]
    return "\n".join(tables) or missing("many_ranks")


def _two_ways(measured: Measured) -> str:
    lines = ["| | buffer | direct (µs) | the other (µs) | mpi (µs) | direct takes | mpi takes |"]
    lines.append(f"|---|{'---:|' * 6}")
    for title, rows in measured.float32_sum.items():
        for row in rows:
            direct, other = (took for name, took in row.microseconds.items() if name != "mpi")
            mpi = row.microseconds.get("mpi")
            cells = [title, nbytes_text(row.bytes), *map(_three, (direct, other, mpi))]
            cells += [_times(took, other) for took in (direct, mpi)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", measured.where()])


def _times(took: float | None, ours: float) -> str:
    return "-" if took is None else f"{took / ours:.1f}x"


class Seconds(msgspec.Struct, frozen=True):
    """What a run took, by the clock and of all cores together."""

    wall_seconds: float
    cpu_seconds: float


class Started(msgspec.Struct, frozen=True):
    """What it cost to start so many ranks."""

    ranks: int
    engine: str
    nothing: Seconds
    all_reduce: Seconds
    mebibytes: float
    own_kibibytes: float


class Starts(msgspec.Struct, frozen=True):
    """A file of such."""

    command: str
    python: str
    cores: int
    rows: list[Started]


def start_up(results: Path = RESULTS) -> str:
    """Return what it costs to start many ranks."""
    path = results / "start_up.json"
    if not path.exists():
        return missing("start_up")
    measured = msgspec.json.decode(path.read_bytes(), type=Starts)
    lines = [
        "| ranks | as | starting (s) | CPU (s) | an all-reduce (s) | CPU (s) | MiB | KiB each |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in measured.rows:
        kind = "threads" if row.engine == "threads" else "processes"
        took = [
            f"{number:.2f}"
            for each in (row.nothing, row.all_reduce)
            for number in (each.wall_seconds, each.cpu_seconds)
        ]
        memory = f"{row.mebibytes:.0f} | {row.own_kibibytes:.0f}"
        lines.append(f"| {row.ranks} | {kind} | {' | '.join(took)} | {memory} |")
    told = (
        f"Measured on {measured.cores} cores, Python {measured.python}, with `{measured.command}`."
    )
    return "\n".join([*lines, "", told, ""])


#: Ours over two hosts, as the table names them.
HOST_WAYS = {"hierarchical": "hierarchical", "wire_bf16": 'hierarchical, `wire="bf16"`'}


class Hosts(msgspec.Struct, frozen=True):
    """What all-reduces over two hosts took."""

    command: str
    python: str
    torch: str
    cores: int
    ranks_per_host: list[int]
    all_reduce_float32_sum: list[Row]
    gbit: int | None = None


def two_hosts(results: Path = RESULTS) -> str:
    """Return the tables of all-reduces over two hosts, with every cable that was measured."""
    found = sorted(results.glob("two_hosts*.json"))
    return "\n".join(map(_two_hosts, found)) if found else missing("two_hosts")


def _two_hosts(path: Path) -> str:
    measured = msgspec.json.decode(path.read_bytes(), type=Hosts)
    rows = measured.all_reduce_float32_sum
    ours = [name for name in HOST_WAYS if name in rows[0].microseconds]
    head = ["buffer", *(f"{HOST_WAYS[name]} (µs)" for name in ours), "gloo (µs)"]
    head += ["gloo takes", "with `wire`: gloo takes"][: len(ours)]
    lines = [f"| {' | '.join(head)} |", f"|{'---:|' * len(head)}"]
    for row in rows:
        took = [row.microseconds[name] for name in (*ours, "gloo")]
        cells = [nbytes_text(row.bytes), *map(_three, took)]
        cells += [f"{took[-1] / each:.2f}x" for each in took[:-1]]
        lines.append(f"| {' | '.join(cells)} |")
    where = " and ".join(map(str, measured.ranks_per_host))
    cable = f"a cable of {measured.gbit} Gbit/s" if measured.gbit else "no limit to the cable"
    told = (
        f"Measured on {measured.cores} cores for hosts of {where} ranks, {cable}, Python "
        f"{measured.python}, torch {measured.torch}, with `{measured.command}`."
    )
    lines += ["", told, ""]
    return "\n".join(lines)


class CallsOf(msgspec.Struct, frozen=True):
    """What calls cost on so many ranks: by call, and by the kind of array."""

    ranks: int
    engine: str
    microseconds: dict[str, dict[str, float]]


class CallCosts(msgspec.Struct, frozen=True):
    """A file of such."""

    command: str
    python: str
    numpy: str
    torch: str
    cores: int
    worlds: list[CallsOf]


def call_cost(results: Path = RESULTS) -> str:
    """Return what a small call costs on a tensor, beside one on an array."""
    path = results / "call_cost.json"
    if not path.exists():
        return missing("call_cost")
    measured = msgspec.json.decode(path.read_bytes(), type=CallCosts)
    kinds = list(next(iter(measured.worlds[0].microseconds.values())))
    lines = [f"| ranks | as | call | {' | '.join(f'{kind} (µs)' for kind in kinds)} |"]
    lines.append(f"|---:|---|---|{'---:|' * len(kinds)}")
    for world in measured.worlds:
        where = f"{world.ranks} | {'threads' if world.engine == 'threads' else 'processes'}"
        for call, took in world.microseconds.items():
            cells = " | ".join(f"{took[kind]:.2f}" for kind in kinds)
            lines.append(f"| {where} | `{call}` | {cells} |")
    told = (
        f"Measured on {measured.cores} cores, Python {measured.python}, numpy {measured.numpy}, "
        f"torch {measured.torch}, with `{measured.command}`."
    )
    return "\n".join([*lines, "", told, ""])


class WaysOf(msgspec.Struct, frozen=True):
    """How long each way to run a call takes."""

    ranks: int
    collective: str
    bytes: int
    microseconds: dict[str, float]


class WaysFile(msgspec.Struct, frozen=True):
    """A file of such."""

    command: str
    python: str
    cores: int
    instruction_set: str
    rows: list[WaysOf]


RACED = "as raced"


def ways(results: Path = RESULTS) -> str:
    """Return what the usual way takes, what the quickest does, and what a job gets."""
    path = results / "ways.json"
    if not path.exists():
        return missing("ways")
    measured = msgspec.json.decode(path.read_bytes(), type=WaysFile)
    lines = [
        "| ranks | call | bytes | the usual way (µs) | the quickest (µs) | which | as raced (µs) |"
    ]
    lines.append("|---:|---|---:|---:|---:|---|---:|")
    for row in measured.rows:
        ways = {way: took for way, took in row.microseconds.items() if way != RACED}
        best = min(ways, key=lambda way: ways[way])
        usual = next(iter(ways.values()))
        cells = [row.ranks, f"`{row.collective}`", nbytes_text(row.bytes), usual, ways[best]]
        cells += [best, row.microseconds[RACED]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    told = (
        f"Measured on {measured.cores} cores ({measured.instruction_set}), "
        f"Python {measured.python}, with `{measured.command}`."
    )
    return "\n".join([*lines, "", told, ""])


class HorovodCosts(msgspec.Struct, frozen=True):
    """What named operations cost, by number of ranks."""

    command: str
    python: str
    torch: str
    cores: int
    microseconds: dict[str, dict[str, float]]


def horovod(results: Path = RESULTS) -> str:
    """Return what small calls cost with a negotiation, beside plain ones."""
    path = results / "horovod.json"
    if not path.exists():
        return missing("horovod")
    measured = msgspec.json.decode(path.read_bytes(), type=HorovodCosts)
    ranks = list(measured.microseconds)
    lines = [f"| 16 bytes | {' | '.join(f'{n} ranks (µs)' for n in ranks)} |"]
    lines.append(f"|---|{'---:|' * len(ranks)}")
    for call in measured.microseconds[ranks[0]]:
        cells = " | ".join(f"{measured.microseconds[n][call]:.1f}" for n in ranks)
        lines.append(f"| {call} | {cells} |")
    told = (
        f"Measured on {measured.cores} cores, Python {measured.python}, torch {measured.torch}, "
        f"with `{measured.command}`."
    )
    return "\n".join([*lines, "", told, ""])


def read(path: Path) -> Measured | None:
    """Return what a file of results has, if it is there."""
    return msgspec.json.decode(path.read_bytes(), type=Measured) if path.exists() else None


def missing(name: str) -> str:
    """Say how to get results that are not there."""
    return (
        f"Not measured yet: `make bench` writes `benchmarks/results/{name}.json`, and `make docs`\n"
        f"makes a table of it.\n"
    )


def _table(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.microseconds))
    floors = any(row.floor_percent_roundelay is not None for row in rows)
    head = ["buffer", *(f"{name} (µs)" for name in names)]
    ours = [name for name in OURS if name in names]
    head += ["speed-up over the best peer", *(f"{name}: speed-up" for name in ours[1:])][
        : len(ours)
    ]
    head += ["of the memory-bandwidth limit", "arena: of the limit"] if floors else []
    lines = [f"| {' | '.join(head)} |", f"|{'---:|' * len(head)}"]
    for row in rows:
        cells = [nbytes_text(row.bytes)]
        cells += [_three(row.microseconds.get(name)) for name in names]
        cells += [row.ratio(name) for name in ours]
        if floors:
            cells += [_percent(row.floor_percent_roundelay), _percent(row.floor_percent_arena)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _three(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"  # noqa: PLR2004 - no 1e+03


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"
