"""Random models in random training loops: every strategy does what one device does, or refuses.

    python tests/training/fuzz.py --seed 7            one program, told in full
    python tests/training/fuzz.py --seed 0 --minutes 60 --json results.json
    python tests/training/fuzz.py --seed 0 --minutes 5 --jobs 12 --json results.json

A program is drawn from its seed: branches, shared weights, hooks, auxiliary losses, checkpointing,
frozen and unused parts; several optimizers, accumulation, loaders, clipping, evaluation in between,
edits and checkpoints between steps, ways of zero_grad. ddp, zero1, zero2 and zero3 must agree bit
for bit where they add up the same. A program that fails is shrunk: what it draws becomes plain,
one after the other, while it fails.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import roundelay as rd
from zoo.place import WAYS, Place, State, judge
from zoo.random_loops import Loop
from zoo.random_models import Model

__all__ = ["ALIKE", "Draw", "fuzz"]

#: What is compared with one device; by the number of ranks, what it takes.
STRATEGIES: dict[str, Any] = {
    **{way: one for way, one in WAYS.items() if way not in ("ps-async", "ps-ssp")},
    "zero3 kept": rd.Zero(3, reshard_after_forward=False),
    "zero3 hybrid": rd.Zero(3, shard_over=2),
}
SIZES = {"ps servers": (2, 3, 4), "zero3 hybrid": (2, 4)}
ALIKE = ("ddp", "zero1", "zero2", "zero3", "zero3 kept")  # add up in the same order
#: Norms, and passes that are summed up apart, are added in another order.
OTHERWISE = {"clip=norm", "passes=2", "passes=3", "look=torch's clip", "look=norms"}
OFFSETS = range(1, 9)  # in elements: every place in a cache line
ROOT = Path(__file__).parent.parent.parent


@dataclass
class Draw:
    """Choices from a seed, with their names; where it is to be plain, the first option."""

    seed: int
    plain: frozenset[str] = frozenset()
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def __call__(self, name: str, options: Sequence[Any]) -> Any:
        drawn = self.random.choice(options)
        chosen = options[0] if name in self.plain else drawn
        if chosen != options[0]:
            self.told.append(f"{name}={chosen}")
        return chosen


@dataclass
class Outcome:
    """What came of one program under every strategy."""

    seed: int
    size: int
    told: list[str]
    alike: bool = False  # whether the same bits are asked for
    verdicts: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    def forgive_bits(self) -> None:
        """Ask for no more than numbers that are right: the bits of one device differ, too."""
        self.alike = False
        for way, word in self.verdicts.items():
            self.verdicts[way] = "right" if word == "OTHER BITS" else word

    @property
    def bad(self) -> dict[str, str]:
        return {way: word for way, word in self.verdicts.items()
                if word != "right" and not word.startswith("refused")}  # fmt: skip


def fuzz(
    seed: int, ways: Sequence[str] = tuple(STRATEGIES), plain: frozenset[str] = frozenset()
) -> Outcome | None:
    """Run the program of a seed under strategies; None where one device can't run it."""
    with tempfile.TemporaryDirectory() as folder:
        return _fuzz(seed, ways, Draw(seed, plain), Path(folder))


def _fuzz(seed: int, ways: Sequence[str], draw: Draw, folder: Path) -> Outcome | None:
    size = random.Random(seed).choice([2, 3, 1, 4])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = Model(draw).double()

    def program(at: Place, offset: int = 0) -> State:
        model = copy.deepcopy(start)
        if offset:
            _move(model, offset)
        return Loop(copy.deepcopy(draw), at, model, folder / "saved").run()

    own = copy.deepcopy(draw)
    try:
        expected = Loop(own, Place(size), copy.deepcopy(start), folder).run()
    except RuntimeError:  # torch itself can't, say a gradient of a gradient through checkpointing
        return None
    if not all(bool(one.isfinite().all()) for one in expected.values()):
        return None
    first: State | None = None
    outcome = Outcome(seed, size, own.told, alike=not OTHERWISE.intersection(own.told))
    for way in ways:
        if size not in SIZES.get(way, (size,)):
            continue
        verdict, states = judge(program, STRATEGIES[way], size, expected)
        word = verdict.word
        if word == "right" and way in ALIKE and outcome.alike:
            first = first or states[0]
            if not all(_same(one, first) for one in states):
                word = "OTHER BITS"
        outcome.verdicts[way], outcome.words[way] = word, verdict.told
    if "OTHER BITS" in outcome.verdicts.values() and not all(
        _same(program(Place(size), offset), expected) for offset in OFFSETS
    ):
        outcome.forgive_bits()
    return outcome


def _move(model: Any, offset: int) -> None:
    """Put parameters one after the other into a row, as ZeRO does, and not at its beginning.

    Some of torch's kernels, those of attention for example, have other bits for other addresses;
    then no two strategies have the same.
    """
    parameters = list(model.parameters())
    row = torch.empty(sum(one.numel() for one in parameters) + offset, dtype=torch.float64)
    for one in parameters:
        place = row[offset : offset + one.numel()].view(one.shape)
        one.data = place.copy_(one.data)
        offset += one.numel()


def _same(found: State, expected: State) -> bool:
    return all(torch.equal(one, found[name]) for name, one in expected.items())


def shrink(seed: int, way: str, word: str) -> frozenset[str]:
    """Which choices may be plain so that a strategy still fails in the same way."""
    plain: frozenset[str] = frozenset()
    names = {one.partition("=")[0] for one in (fuzz(seed, []) or Outcome(0, 0, [])).told}
    ways = ["ddp", way] if word == "OTHER BITS" else [way]
    for name in sorted(names):
        found = fuzz(seed, ways, plain | {name})
        if found is not None and found.verdicts[way] == word:
            plain |= {name}
    return plain


class Report:
    """Counts what came of programs."""

    def __init__(self, command: str, jobs: int = 1) -> None:
        self.begun, self.command, self.jobs = time.monotonic(), command, jobs
        self.counts: collections.Counter[str] = collections.Counter()
        self.refusals: dict[str, list[int]] = {}  # how many, and the first seed
        self.defects: list[dict[str, Any]] = []
        asked = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
        self.commit = done.stdout.strip()

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.begun) / 60

    def take(self, found: dict[str, Any]) -> None:
        """Add what another process has written."""
        self.counts.update(found["counts"])
        for told, (count, seed) in found["refusals"].items():
            mine = self.refusals.setdefault(told, [0, seed])
            mine[0] += count
        self.defects += found["defects"]

    def add(self, outcome: Outcome | None) -> None:
        if outcome is None:
            self.counts["not for one device"] += 1
            return
        self.counts["programs"] += 1
        self.counts["programs compared bit for bit"] += outcome.alike
        for way, word in outcome.verdicts.items():
            self.counts[f"{way}: {word}"] += 1
            if word.startswith("refused"):
                told = self.refusals.setdefault(f"{way}: {outcome.words[way][:90]}", [0, 0])
                told[:] = told[0] + 1, told[1] or outcome.seed
        for way, word in outcome.bad.items():
            small = fuzz(outcome.seed, [], shrink(outcome.seed, way, word)) or outcome
            defect = {"seed": outcome.seed, "size": outcome.size, "way": way, "word": word,
                      "told": outcome.words[way][:400], "program": small.told}  # fmt: skip
            self.defects.append(defect)
            say(str(defect))

    def write(self, file: Path, seeds: tuple[int, int]) -> None:
        found = {
            "command": self.command, "commit": self.commit, "torch": torch.__version__,
            "minutes": round(self.minutes, 1), "jobs": self.jobs, "seeds": seeds,
            "counts": dict(sorted(self.counts.items())),
            "refusals": dict(sorted(self.refusals.items())), "defects": self.defects,
        }  # fmt: skip
        text = json.dumps(found, indent=1, ensure_ascii=False)
        file.write_text(f"{text}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with the next seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with seeds of its own")
    parser.add_argument("--json", type=Path, help="write what was found into this file")
    given = parser.parse_args()
    if given.jobs > 1:
        sys.exit(side_by_side(given))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    command = f"python tests/training/fuzz.py --seed {given.seed} --minutes {given.minutes:g}"
    report, seed = Report(command), given.seed
    while True:
        outcome = fuzz(seed)
        report.add(outcome)
        over = report.minutes >= given.minutes
        if given.json and (over or seed % 50 == 0):
            report.write(given.json, (given.seed, seed))
        if over:
            break
        seed += 1
    if outcome and not given.minutes:
        say(", ".join(outcome.told))
        for way, word in outcome.verdicts.items():
            say(f"{way:10} {word} {outcome.words[way][:200]}")
    say(f"seeds {given.seed} to {seed}: {json.dumps(report.counts, indent=1)}")
    sys.exit(bool(report.defects))


APART = 1000  # seeds between those of one process and of the next


def side_by_side(given: argparse.Namespace) -> bool:
    """Run so many processes for the same time, and put together what they found."""
    command = (
        f"python tests/training/fuzz.py --seed {given.seed} --minutes {given.minutes:g} "
        f"--jobs {given.jobs}"
    )
    report = Report(command, given.jobs)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{job}.json" for job in range(given.jobs)]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--seed", str(given.seed + APART * job),
                 "--minutes", str(given.minutes), "--json", str(file)]
            )
            for job, file in enumerate(files)
        ]  # fmt: skip
        codes = [process.wait() for process in running]
        for file in files:
            report.take(json.loads(file.read_text(encoding="utf-8")))
    report.write(given.json, (given.seed, given.seed + APART * given.jobs - 1))
    return any(codes)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
