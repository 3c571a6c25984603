"""PyTorch's own tests of a backend, which are in its wheel, on ours and on gloo beside it.

    python tests/torch_backend/pytorch_suite.py            all, and the table in docs/torch.md
    python tests/torch_backend/pytorch_suite.py -k gather  some, printed only

Ranks are forked from one process that has imported torch, so that a test takes a second or two.
The suite names the backends that each test is for. To reach those for gloo and for MPI, it is
imported as theirs and then told to use ours. Tests that want many ranks get eight.
"""
# ruff: noqa: T201, PLC0415 - a program; what it imports depends on the environment it makes

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent.parent / "docs" / "torch.md"
TABLE = re.compile(r"(<!-- table: suite -->\n).*?(<!-- /table -->\n)", re.DOTALL)
LIMIT_S = 60  # for one test
#: As whose the suite is imported, and on how many ranks; the later ones run what was skipped.
PASSES = (("gloo", 4), ("gloo", 8), ("mpi", 4))
#: Their bodies do nothing unless the backend is called gloo, whatever it is.
NAMES_GLOO = "test_accumulate_gradients_no_sync"


def suite_as(gate: str, backend: str, ranks: int) -> type[unittest.TestCase]:
    """Import the suite as if for `gate`, and return its tests, to be run on `backend`."""
    folder = tempfile.mkdtemp(prefix="pytorch-suite-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (Path(folder) / "barrier").mkdir()
    os.environ |= {"BACKEND": gate, "WORLD_SIZE": str(ranks), "TEMP_DIR": folder}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "INIT_METHOD": "env://"}
    with contextlib.suppress(ModuleNotFoundError):
        import expecttest  # type: ignore[import-not-found]  # noqa: F401
    # Only its class is wanted, as a base for tests that are not these.
    sys.modules.setdefault("expecttest", _module("expecttest", TestCase=unittest.TestCase))

    import torch.distributed as dist
    import torch.multiprocessing
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    import roundelay.torch  # noqa: F401 - registers the backend

    for feature in common_distributed.DistTestCases.backend_feature.values():
        feature.add(backend)
    common_distributed.TIMEOUT_DEFAULT = LIMIT_S
    os.environ["BACKEND"] = backend
    tests: Any = distributed_test.DistributedTest._DistTestBase
    base: Any = distributed_test.TestDistBackend

    class Suite(base, tests):  # type: ignore[misc] # torch's tests have no types
        @property
        def world_size(self) -> int:
            return ranks

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, *others: Any, **more: Any) -> None:
            distributed_test.BACKEND = backend
            if test_name.startswith(NAMES_GLOO):
                distributed_test.BACKEND, usual = "gloo", dist.init_process_group
                dist.init_process_group = lambda **o: usual(**{**o, "backend": backend})
            super()._run(rank, test_name, *others, **more)

    return Suite


def _module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(names)
    return made


def run_test(suite: type[unittest.TestCase], name: str) -> tuple[str, str]:
    """Run one test; return `passed`, `skipped` or `failed`, and why."""
    result = unittest.TestResult()
    with contextlib.redirect_stdout(io.StringIO()):
        suite(name).run(result)
    for _, why in result.skipped:
        return "skipped", why
    for _, why in (*result.failures, *result.errors):
        return "failed", told(why)
    return "passed", ""


def told(why: str) -> str:
    """Return the line of the tracebacks that says what went wrong."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Timeout|Lost|Mismatch)\b.*:", line)]
    errors = [line for line in errors if "exited with error code" not in line]
    return (errors or lines or [""])[-1][:200]


def work(gate: str, backend: str, ranks: int) -> None:
    """Run the tests that are asked for, and print each result as a line of JSON."""
    logging.disable(logging.CRITICAL)
    suite = suite_as(gate, backend, ranks)
    wanted = set(sys.stdin.read().split())
    for name in unittest.defaultTestLoader.getTestCaseNames(suite):
        if "*" in wanted or name in wanted:
            print(json.dumps([name, *run_test(suite, name)]), flush=True)


def results(backend: str, wanted: list[str] | None = None) -> dict[str, tuple[str, str]]:
    """Return how every test ended, run in processes whose imports are not ours."""
    found: dict[str, tuple[str, str]] = {}
    for gate, ranks in PASSES:
        skipped = [name for name, (status, _) in found.items() if status == "skipped"]
        names = skipped if found else wanted or ["*"]
        if not names:
            break
        done = subprocess.run(
            [sys.executable, __file__, "--work", gate, backend, str(ranks)],
            input="\n".join(names), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, check=True,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            if line.startswith('["test_'):
                name, status, why = json.loads(line)
                if name not in found or status != "skipped":
                    found[name] = status, why
    return found


def table(ours: dict[str, tuple[str, str]], gloo: dict[str, tuple[str, str]]) -> str:
    """Return in Markdown how many pass, and every test that gloo passes and ours does not."""
    counts = {name: Counter(status for status, _ in found.values())
              for name, found in (("roundelay", ours), ("gloo", gloo))}  # fmt: skip
    missing = {
        name: ours.get(name, ("skipped", "not run"))
        for name, (status, _) in gloo.items()
        if status == "passed" and ours.get(name, ("", ""))[0] != "passed"
    }
    more = sum(status == "passed" and gloo.get(name, ("", ""))[0] != "passed"
               for name, (status, _) in ours.items())  # fmt: skip
    lines = [
        "| backend | passed | failed | not for CPU tensors or this backend |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {count['passed']} | {count['failed']} | {count['skipped']} |"
        for name, count in counts.items()
    ]
    lines += ["", f"{more} tests pass here that gloo does not pass."]
    if not missing:
        lines += ["Every test that gloo passes, passes."]
    else:
        lines += ["", "| gloo passes it, we do not | why |", "|---|---|"]
        lines += [f"| `{name}` | {status}: {why} |" for name, (status, why) in missing.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run both backends, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", dest="part", help="only tests whose name has this; printed only")
    parser.add_argument("--work", nargs=3, metavar=("GATE", "BACKEND", "RANKS"),
                        help=argparse.SUPPRESS)  # fmt: skip
    arguments = parser.parse_args()
    if arguments.work:
        gate, backend, ranks = arguments.work
        work(gate, backend, int(ranks))
        return
    wanted = None
    if arguments.part:
        suite = suite_as("gloo", "roundelay", PASSES[0][1])
        names = unittest.defaultTestLoader.getTestCaseNames(suite)
        wanted = [name for name in names if arguments.part in name]
    ours, gloo = results("roundelay", wanted), results("gloo", wanted)
    made = table(ours, gloo)
    print(made)
    if wanted is None:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(TABLE.sub(rf"\g<1>{made}\g<2>", text), encoding="utf-8")


if __name__ == "__main__":
    main()
