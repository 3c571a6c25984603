"""Which algorithm for which collective, number of ranks and number of bytes.

The defaults were measured on shared memory; `roundelay bench --tune` writes a table for this host.
Every algorithm of a table that adds up is proved `rank_order`, so that a choice never changes a bit
of a result. Where it takes several folds, halves would be rounded several times: for those it is
passed over.
"""

from __future__ import annotations

import math
import os
import stat
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import msgspec

from roundelay.algorithms import Algorithm, algorithms
from roundelay.arguments import config_folder
from roundelay.collectives import collectives
from roundelay.errors import FormatError, InvalidArgumentError, ProofError, UnsupportedSizeError
from roundelay.schedule import prove

__all__ = [
    "DEFAULT",
    "Choice",
    "Tuning",
    "default_for",
    "host_tuning",
    "keeps_every_bit",
    "rounds_once",
    "tuning_path",
]

FORMAT = "roundelay-tuning"
VERSION = 1
MOST_BYTES = 1 << 20  # of a file: a real one has a few kilobytes
FEW = 2  # ranks: nobody's memory is read by two
RIVALS_FROM, READING_FROM = 8 * 1024, 64 * 1024  # bytes
SOME, MANY = 4, 6  # ranks from which on work is better divided
ONE_MEETING = 1 << 20  # bytes up to which two ranks that are far apart meet once, and both add up
CHAIN = 8  # ranks up to which a chain reduces in less time than two shots
CROWD = 16  # ranks up to which a barrier has each look at all others, where they share cores
#: Proved in the tests, for every size.
ONE_FOLD = {"reduce_two_shot"}


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm, for messages of up to so many bytes."""

    up_to: float
    algorithm: str


Table = Mapping[str, tuple[Choice, ...]]


def _always(algorithm: str) -> tuple[Choice, ...]:
    return (Choice(math.inf, algorithm),)


@dataclass(frozen=True, slots=True)
class Tuning:
    """A table of choices by collective, in rising order of bytes."""

    table: Table = field(
        default_factory=lambda: {
            "all_gather": _always("all_gather_direct"),
            "all_reduce": (
                Choice(32 * 1024, "all_reduce_one_shot"),
                Choice(math.inf, "all_reduce_two_shot"),
            ),
            "all_to_all": _always("all_to_all_direct"),
            "barrier": _always("barrier_dissemination"),
            "broadcast": _always("broadcast_direct"),
            "exscan": _always("exscan_direct"),
            "gather": _always("gather_direct"),
            "reduce": _always("reduce_direct"),
            "reduce_scatter": _always("reduce_scatter_direct"),
            "scan": _always("scan_direct"),
            "scatter": _always("scatter_direct"),
        }
    )
    #: What gives the same bits and may be quicker here; the native core tries it, and measures.
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    #: The same where ranks can read one another's private memory.
    reading: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    def rivals_of(self, collective: str, nbytes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the algorithms that may be quicker: by slots, and by reading others' memory.

        >>> default_for(4).rivals_of("scatter", 8 << 20), default_for(4).rivals_of("scan", 8)
        (((), ('scatter_direct',)), ((), ()))
        """
        rivals = self.rivals.get(collective, ()) if nbytes >= RIVALS_FROM else ()
        reading = self.reading.get(collective, ()) if nbytes >= READING_FROM else ()
        return rivals, reading

    def limits(self, collective: str) -> list[float]:
        """Return up to how many bytes the same candidates are there, in rising order."""
        limits = {choice.up_to for choice in self.table[collective]}
        limits |= {RIVALS_FROM - 1} if self.rivals.get(collective) else set()
        limits |= {READING_FROM - 1} if self.reading.get(collective) else set()
        return sorted(limits)

    def choose(self, collective: str, nbytes: int) -> str:
        """Return the algorithm for a message of `nbytes`.

        >>> DEFAULT.choose("all_reduce", 8), DEFAULT.choose("all_reduce", 1 << 20)
        ('all_reduce_one_shot', 'all_reduce_two_shot')
        """
        for choice in self.table.get(collective, ()):
            if nbytes <= choice.up_to:
                return choice.algorithm
        raise InvalidArgumentError(f"The tuning table has no algorithm for {collective}.")

    @classmethod
    def load(cls, path: Path, *, size: int, cores: int | None = None) -> Tuning:
        """Read what was measured for `size` ranks, or for the nearest number of ranks below.

        Collectives that the file leaves out, and sizes below all measured ones, keep the defaults.
        """
        tables = _read(path).ranks
        measured = max((ranks for ranks in tables if ranks <= size), default=None)
        usual = default_for(size, cores=cores)
        if measured is None:
            return usual
        place = f"{path}: ranks.{measured}"
        own = {
            name: _checked(f"{place}.{name}", name, lines, size)
            for name, lines in tables[measured].items()
        }
        rivals = {name: found for name, found in usual.rivals.items() if name not in own}
        return cls({**usual.table, **own}, rivals, usual.reading)

    def save(self, path: Path, *, size: int) -> None:
        """Write this table for `size` ranks; what the file says of other sizes stays."""
        try:
            tables = _read(path).ranks
        except FileNotFoundError:
            tables = {}
        tables[size] = _lines(self.table)
        data = msgspec.json.encode(_File(FORMAT, VERSION, dict(sorted(tables.items()))))
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks may be reading it this moment: they find the old file or the new one, never half.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(data, indent=1) + b"\n")
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


DEFAULT = Tuning()


def default_for(size: int, *, cores: int | None = None) -> Tuning:
    """Return the defaults for so many ranks on one host, as measured on 16 cores.

    In one shot every rank reads everything of everybody, so it pays for less the more there are;
    and so does a root that folds everything alone. A pipeline pays where every rank has a core.
    `cores` are this host's, unless told otherwise; 0 is for ranks that may be anywhere.

    >>> [default_for(size).choose("all_reduce", 4096) for size in (2, 16)]
    ['all_reduce_one_shot', 'all_reduce_two_shot']
    """
    limit = max(256, 128 * 1024 // size**2)
    if size == FEW and cores == 0:
        limit = ONE_MEETING
    table = {
        **DEFAULT.table,
        "all_reduce": _up_to(limit, "all_reduce_one_shot", "all_reduce_two_shot"),
    }
    if size >= SOME:
        alone = 192 * 1024 // size if size >= MANY else 192 * 1024
        table["reduce"] = _up_to(alone, "reduce_direct", "reduce_two_shot")
    # All ranks of a host must choose alike, so not the cores that this one may use.
    cores = os.sysconf("SC_NPROCESSORS_ONLN") if cores is None else cores
    if cores < size <= CROWD and cores:
        table["barrier"] = _always("barrier_direct")
    if size <= cores:
        if SOME <= size <= CHAIN:
            few, (_, rest) = 2 * 1024 * 1024 - 1, table["reduce"]
            small = table["reduce"][0], Choice(few, rest.algorithm)
            table["reduce"] = (*small, *_always("reduce_pipeline"))
        for name, least in (("scan", SOME), ("exscan", MANY)):
            if size >= least:
                table[name] = _up_to(16 * 1024, f"{name}_direct", f"{name}_pipeline")
    return Tuning(table, _rivals(size), _reading(size))


def _rivals(size: int) -> dict[str, tuple[str, ...]]:
    """Return what may be quicker than the usual: that differs by ranks, cores and machine."""
    if size == 1:
        return {}
    # Two ranks send as many bytes in one shot as in two, so predictions still hold.
    both = {"all_reduce": ("all_reduce_one_shot", "all_reduce_two_shot")} if size == FEW else {}
    return {
        **both,
        "reduce": ("reduce_direct", "reduce_two_shot", "reduce_pipeline"),
        "scan": ("scan_direct", "scan_pipeline"),
        "exscan": ("exscan_direct", "exscan_pipeline"),
    }


def _reading(size: int) -> dict[str, tuple[str, ...]]:
    """Return the algorithms by which ranks read others' private memory: one copy in place of two.

    Each read is a call of the kernel, which locks and looks up every page. So it pays for large
    data, and where few ranks read the same: many readers of one root's pages wait for one another.
    """
    if size == 1:
        return {}
    direct = ("all_gather", "gather", "scatter", "all_to_all", "reduce_scatter", "broadcast")
    return {
        **{name: (f"{name}_direct",) for name in direct},
        **({"broadcast": ("broadcast_direct", "broadcast_two_shot")} if size >= MANY else {}),
        "all_reduce": ("all_reduce_two_shot",),
        "reduce": ("reduce_two_shot" if size > FEW else "reduce_direct",),
    }


def _up_to(limit: int, small: str, large: str) -> tuple[Choice, ...]:
    return (Choice(limit, small), Choice(math.inf, large))


class _ChoiceRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    algorithm: str
    up_to: int | None = None  # the last line of a collective has none


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    ranks: dict[int, dict[str, list[_ChoiceRecord]]]


_parse = msgspec.json.Decoder(_File, strict=False).decode


def tuning_path(environment: Mapping[str, str]) -> Path:
    """Return where this user's table lies.

    >>> tuning_path({"XDG_CONFIG_HOME": "/etc/own"}).as_posix()
    '/etc/own/roundelay/tuning.json'
    """
    return config_folder(environment) / "tuning.json"


def host_tuning(
    size: int, environment: Mapping[str, str] | None = None, *, cores: int | None = None
) -> Tuning:
    """Return this host's table where there is one; a bad file is a warning, and the defaults.

    What a table leaves out is as in `default_for`, which also says what `cores` are.
    """
    path = tuning_path(os.environ if environment is None else environment)
    try:
        return Tuning.load(path, size=size, cores=cores)
    except (FileNotFoundError, NotADirectoryError):
        return default_for(size, cores=cores)
    except (FormatError, OSError, RuntimeError) as error:  # RuntimeError: nobody's home is known
        warnings.warn(
            f"roundelay uses its default algorithms, because the tuning table of this host can't "
            f"be used: {error}. Remove the file, or write it again with: roundelay bench --tune",
            stacklevel=2,
        )
        return default_for(size, cores=cores)


def keeps_every_bit(algorithm: str, size: int) -> bool:
    """Tell whether a choice of this algorithm can't change a result on `size` ranks.

    That is so if it adds in rank order; halves also want to be rounded once, see `rounds_once`.

    >>> keeps_every_bit("all_reduce_two_shot", 4), keeps_every_bit("all_reduce_ring", 4)
    (True, False)
    """
    found = algorithms.load(algorithm)
    return not _adds(found) or prove(found.schedule(size)).order == "rank_order"


@lru_cache(maxsize=1024)
def rounds_once(algorithm: str, size: int) -> bool:
    """Tell whether an algorithm rounds a half-precision result once: it adds up in one fold.

    >>> rounds_once("scan_direct", 4), rounds_once("scan_pipeline", 4)
    (True, False)
    """
    usual = (choice.algorithm for choices in DEFAULT.table.values() for choice in choices)
    if algorithm in ONE_FOLD or algorithm in usual:
        return True
    found = algorithms.load(algorithm)
    return not _adds(found) or prove(found.schedule(size)).folds <= 1


def _adds(algorithm: Algorithm) -> bool:
    return algorithm.collective.reduces and not algorithm.collective.idempotent


def _read(path: Path) -> _File:
    if not stat.S_ISREG(path.stat().st_mode):
        raise FormatError(str(path), "is not an ordinary file")  # a FIFO has no end to wait for
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise FormatError(str(path), f"more than {MOST_BYTES} bytes")
    try:
        found = _parse(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(str(path), str(error)) from None
    if (found.format, found.version) != (FORMAT, VERSION):
        raise FormatError(
            str(path), f"format {found.format!r} version {found.version}, not {FORMAT!r} {VERSION}"
        )
    return found


def _checked(
    place: str, collective: str, lines: list[_ChoiceRecord], size: int
) -> tuple[Choice, ...]:
    if collective not in collectives.names():
        raise FormatError(place, f"there is no collective {collective[:60]!r}")
    limits = [math.inf if line.up_to is None else line.up_to for line in lines]
    if not limits or limits[-1] != math.inf or sorted(set(limits)) != limits or limits[0] < 0:
        raise FormatError(place, "up_to must rise from line to line, and the last line has none")
    for line in lines:
        _check_algorithm(place, collective, line.algorithm, size)
    return tuple(Choice(limit, line.algorithm) for limit, line in zip(limits, lines, strict=True))


def _check_algorithm(place: str, collective: str, name: str, size: int) -> None:
    if any(choice.algorithm == name for choice in DEFAULT.table[collective]):
        return  # proved in the tests, for every size
    if name not in algorithms.names() or algorithms.load(name).collective.name != collective:
        raise FormatError(place, f"{name[:60]!r} is no algorithm of {collective}")
    try:
        fit = keeps_every_bit(name, size)
        algorithms.load(name).schedule(size)
    except (ProofError, UnsupportedSizeError) as error:
        raise FormatError(place, str(error)) from None
    if not fit:
        raise FormatError(
            place, f"{name} does not add in rank order on {size} ranks; it is to be asked for by "
            f"algorithm="
        )  # fmt: skip


def _lines(table: Table) -> dict[str, list[_ChoiceRecord]]:
    return {
        name: [
            _ChoiceRecord(choice.algorithm, None if math.isinf(choice.up_to) else int(choice.up_to))
            for choice in choices
        ]
        for name, choices in table.items()
    }
