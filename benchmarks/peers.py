"""Who is right? The zoo's programs under torch's own data parallelism, beside ours.

Every program runs on gloo ranks in float64 and is compared with one device, as ours are by the
tests. A peer is right if one of its settings is. Writes results/peers.json, from which
docs/training.md has a table.

    python benchmarks/peers.py                    all of them; --jobs N so many at a time
    python benchmarks/peers.py LSTM --peer FSDP2  what has this in its name; others stay
"""

from __future__ import annotations

import argparse
import json
import linecache
import multiprocessing
import os
import pickle
import re
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch._dynamo  # which every rank would import for itself
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "tests" / "training"))
from _peer_places import PEERS, PeerPlace, whole

from roundelay.errors import RoundelayError
from verdicts import HABITS, verdicts
from zoo.habits import Habit
from zoo.place import TOLERANCE, State, Verdict, alone, largest

FILE = Path(__file__).parent / "results" / "peers.json"
SIZES = (2, 3)
HANG_S = 20.0  # in one call; without a word from any rank ten times as long
GRACE_S = 1.0  # for other ranks to say what they have seen of an error
LOUDEST = ("right", "wrong", "hang", "refused", "raw error", "not common")  # what a job ends with
#: Where checks of torch's own are; some are in C++, and known by what they say.
CHECKS = (f"torch{os.sep}distributed{os.sep}", f"torch{os.sep}nn{os.sep}parallel{os.sep}")
SAID = (
    "Expected to have finished reduction",
    "Expected to mark a variable ready only once",
    "Your training graph has changed",
    "got mixed torch.Tensor and DTensor",
)


def be_rank(place: type[PeerPlace], habit: Habit, rank: int, size: int, folder: Path) -> None:
    """Run a program as one rank, leave behind what came of it, and stay: others may wait."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        expected = alone(habit.program, size)
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank,
            world_size=size, timeout=timedelta(seconds=HANG_S),
        )  # fmt: skip
        at = place(rank, size)
        found = whole(habit.program(at))
        said = compared(found, whole(expected), at.local)
    except Exception as error:  # noqa: BLE001 - judged
        said = of_error(error)
    part = folder / f"{rank}.part"
    part.write_bytes(pickle.dumps(said))
    part.rename(folder / f"{rank}.said")
    time.sleep(20 * HANG_S)


def compared(found: State, expected: State, local: set[str]) -> Verdict:
    """Compare with one device what should be the same on every rank."""
    off, name = largest(*({name: one for name, one in state.items() if name not in local}
                          for state in (found, expected)))  # fmt: skip
    return Verdict("right") if off <= TOLERANCE else Verdict("wrong", f"{name} by {off:.3g}")


def of_error(error: Exception) -> Verdict:
    """Judge an error: one that a check of the peer's own raises is a refusal."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, RoundelayError):
        return Verdict("not common", told)
    if "Timed out" in told:
        return Verdict("hang", told)
    if any(each in told for each in SAID) or raised_by_check(error.__traceback__):
        return Verdict("refused", told)
    return Verdict("raw error", told)


def raised_by_check(trace: TracebackType | None) -> bool:
    """Whether the innermost line is a `raise` of torch's data parallelism."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file = trace.tb_frame.f_code.co_filename
    line = linecache.getline(file, trace.tb_lineno).strip()
    return any(each in file for each in CHECKS) and line.startswith("raise ")


def judge(place: type[PeerPlace], habit: Habit, size: int) -> Verdict:
    """Start ranks for one program, and say what came of it."""
    fork: Any = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [fork.Process(target=be_rank, args=(place, habit, rank, size, folder), daemon=True)
                 for rank in range(size)]  # fmt: skip
        for one in ranks:
            one.start()
        said = listen(folder, size, ranks)
        for one in ranks:
            one.kill()
            one.join()
    if len(said) < size and all(one.word == "right" for one in said):
        return Verdict("hang", f"{len(said)} of {size} ranks came through")
    return max(said, key=lambda one: LOUDEST.index(one.word))


def listen(folder: Path, size: int, ranks: list[Any]) -> list[Verdict]:
    """Wait for what ranks say; once one has failed, not much longer."""
    until = time.monotonic() + 10 * HANG_S
    while True:
        files = list(folder.glob("*.said"))
        said = [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - our own ranks'
        gone = [one for one in ranks if not one.is_alive()]
        if gone:
            return [*said, Verdict("raw error", f"a process ended with {gone[0].exitcode}")]
        if len(said) == size or time.monotonic() > until:
            return said
        if any(one.word not in ("right", "wrong") for one in said):
            until = min(until, time.monotonic() + GRACE_S)
        time.sleep(0.01)


def best(settings: list[type[PeerPlace]], habit: Habit) -> Verdict:
    """Right, if one of a peer's settings is; else what the first of them comes to."""
    found: list[Verdict] = []
    for place in settings:
        if habit.name in place.lacks:
            return Verdict("not common", place.lacks[habit.name])
        one = Verdict("right")
        for size in SIZES:
            if one.word == "right":
                one = judge(place, habit, size)
        if one.word in ("right", "not common"):
            return one
        found.append(one)
    return found[0]


def ours(name: str) -> dict[str, dict[str, str]]:
    """Judge a program under our strategies, as the tests do."""
    warnings.simplefilter("ignore")
    ways = [way for _, way in PEERS.values()]
    found = verdicts(HABITS[name], [(way, size) for size in SIZES for way in ways])
    worst = {way: next((found[way, size] for size in SIZES if found[way, size].word != "right"),
                       Verdict("right")) for way in ways}  # fmt: skip
    return {
        way: {
            "verdict": re.sub("^raw .*", "raw error", one.word.partition(": ")[0].lower()),
            "told": spoken(one.told),
        }
        for way, one in worst.items()
    }


def spoken(told: str) -> str:
    """Return what was said, without what is of one machine or one run."""
    first = told.strip().split("\n")[0]
    return re.sub(r"(/[\w.+-]+){2,}|0x[0-9a-f]+", "…", first)[:160]


def main() -> None:
    """Judge what is asked for, and write it down; other rows stay as they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", default="", help="judge what has this in its name")
    parser.add_argument("--peer", default="", help="one of the peers")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    options = parser.parse_args()
    before = json.loads(FILE.read_text(encoding="utf-8"))["programs"] if FILE.exists() else {}
    rows = {name: before.get(name, {}) for name in HABITS}
    asked = [name for name in HABITS if options.name in name]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        jobs = {pool.submit(judged, name, options.peer): name for name in asked}
        for job in as_completed(jobs):
            name = jobs[job]
            rows[name] |= job.result()
            print(name, {peer: row["verdict"] for peer, row in rows[name].items()}, flush=True)
            if options.name:
                print(*(f"    {peer}: {row['told']}" for peer, row in rows[name].items()), sep="\n")
            write({habit: row for habit, row in rows.items() if row})


def judged(name: str, only: str) -> dict[str, dict[str, str]]:
    """Judge a program under every peer and ourselves, or under one peer only."""
    row = {}
    for peer, (settings, _) in PEERS.items():
        if only in ("", peer):
            verdict = best(settings, HABITS[name])
            row[peer] = {"verdict": verdict.word, "told": spoken(verdict.told)}
    if not only:
        with multiprocessing.get_context("fork").Pool(1) as apart:
            row |= apart.apply(ours, (name,))
    return row


def write(rows: dict[str, Any]) -> None:
    """Write the file, a line for each program, so that a change is one line."""
    head = {"command": "python benchmarks/peers.py", "torch": torch.__version__, "ranks": SIZES}
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in rows.items()]
    text = json.dumps(head)[:-1] + ', "programs": {\n' + ",\n".join(lines) + "\n}}\n"
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
