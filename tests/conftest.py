"""Settings for all tests."""

import gc
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]

from roundelay.engines import engines
from roundelay.processes.amx import keep_off_amx

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")

#: Where torch is imported. Ranks are forked, and that takes ten times as long with torch in memory.
TORCH = (
    "tests/torch_backend", "tests/training", "tests/parallel", "tests/communicator/test_torch",
    "tests/fronts/ray", "tests/cli/test_plan.py", "tests/records/test_trace.py",
    "tests/engines/nccl_on_gpu.py", "tests/engines/test_gloo.py",
    "tests/engines/test_hierarchical.py", "tests/engines/test_nccl.py",
    "tests/engines/test_threads.py",
    "tests/launch/test_store.py", "tests/launch/test_two_hosts.py", "tests/test_docs.py",
    "tests/test_examples.py", "tests/test_house_rules.py", "tests/fronts/horovod/test_torch",
    "tests/fronts/horovod/test_negotiation.py",
)  # fmt: skip
ON_TORCH = ("gloo", "hierarchical", "nccl")
BROWSER = ("view/test_browser.py", "view/test_placing.py", "view/test_run_page.py")
BOTH = ("test_every_engine.py", "test_one_truth.py", "test_runner.py", "conftest.py")
#: What takes longest begins first, so that no worker is left alone with it at the end.
LONGEST = (
    "mpi", "browser", "web", "gloo", "tests/engines/test_mpi_end.py", "tests/cli/test_run.py",
    "tests/cli/test_bench.py", "tests/test_docs.py", "tests/test_examples.py",
    "tests/training/test_zoo.py", "tests/engines/test_hierarchical.py",
    "tests/torch_backend/test_one_word.py", "tests/launch/test_two_hosts.py",
    "tests/training/test_zero_saved.py",
)  # fmt: skip
FEW = 50  # descriptors: of pools and worlds that other files use too

#: With --sample, of a function with more cells than this one in three is run, and every value of
#: every parameter; in these files, whose cells take long or are very many, one in so many.
LARGE, ONE_IN = 12, 3
SAMPLED = {
    "cli/test_run_raised.py": 3,
    "communicator/test_end_raised.py": 6,
    "communicator/test_every_call.py": 3,
    "communicator/test_fault_mismatch.py": 4,
    "engines/test_every_engine.py": 12,
    "engines/test_hierarchical.py": 3,
    "engines/test_mpi_end.py": 8,
    "engines/test_one_truth.py": 12,
    "engines/test_over_hosts.py": 4,
    "native/test_reduce.py": 6,
    "parallel/test_expert.py": 4,
    "parallel/test_tensor.py": 3,
    "parallel/test_tensor_cross_entropy.py": 4,
    "parallel/test_tensor_layers.py": 2,
    "parallel/test_pipeline_data_parallel.py": 3,
    "parallel/test_pipeline_refused.py": 3,
    "schedule/test_compile.py": 4,
    "schedule/test_prove.py": 4,
    "torch_backend/test_collectives.py": 2,
    "training/test_ledger_memory.py": 3,
    "parallel/test_context.py": 4,
    "training/test_parameter_server.py": 3,
    "training/test_ps_order.py": 3,
    "training/test_same_values.py": 3,
    "training/test_steps.py": 4,
    "training/test_steps_written.py": 4,
    "training/test_zero_late.py": 3,
    "training/test_zero_offload.py": 3,
    "training/test_zero_saved.py": 3,
    "view/test_browser.py": 3,
    "view/test_placing.py": 4,
    "view/test_story.py": 4,
    "view/test_terminal.py": 4,
}

# Where AMX traps, PyTorch's bf16 would take workers down; they and their ranks inherit this.
if "PYTEST_XDIST_WORKER" not in os.environ:
    keep_off_amx(os.environ)

# Tests judge results; how quick the machine is today is not one of them.
settings.register_profile("roundelay", deadline=None)
settings.load_profile("roundelay")


# What a shell starts by `&` or nohup ignores these, and so would all that it starts in turn.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder() -> Iterator[None]:
    """Give every worker its own place for sockets and folders.

    Tests that look for what was left behind would find there what others just use. Its name is
    short: the address of a socket has 107 bytes.
    """
    with (
        tempfile.TemporaryDirectory(prefix="rd", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.delenv("XDG_RUNTIME_DIR", raising=False)  # ranks would meet there
        patch.setattr(tempfile, "tempdir", folder)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests that need torch in their own process be run apart, and large grids be sampled."""
    parser.addoption("--torch", choices=("with", "without"), help="run only tests with, or without")
    parser.addoption("--sample", metavar="SEED", help="of large grids run a sample by this seed")


def how_to_repeat(config: pytest.Config) -> str | None:
    """Say which cells of large grids are run, and how to run the same ones again, or all."""
    seed = config.getoption("--sample")
    if seed is None:
        return None
    return f"sample: `make test SEED={seed}` runs these cells again, `make test-all` all"


def pytest_report_header(config: pytest.Config) -> str | None:
    """Begin with the seed."""
    return how_to_repeat(config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Where something failed, end with the seed, too."""
    said = how_to_repeat(config)
    if said and terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(said)


def idle(cell: Any) -> bool:
    """Tell whether a cell is known to be skipped here: then it stands for no other."""
    return any(marker.args[:1] == (True,) for marker in cell.iter_markers("skipif"))


def drawn(cells: list[Any], values: Callable[[Any], set[Any]], wanted: int) -> list[Any]:
    """Take so many cells from the front, or more until every value of every parameter is there."""
    taken, spare, seen = list[Any](), list[Any](), set[Any]()
    for cell in cells:
        (spare if values(cell) <= seen else taken).append(cell)
        seen |= values(cell)
    return taken + spare[: max(0, wanted - len(taken))]


def parameters(cell: Any) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in cell.callspec.params.items()}


def sampled(cells: list[Any], one_in: int, dice: random.Random) -> list[Any]:
    """Draw one test in so many, and more until every value of every parameter was drawn."""
    wanted = math.ceil(sum(not idle(cell) for cell in cells) / one_in)
    return drawn(sorted(dice.sample(cells, len(cells)), key=idle), parameters, wanted)


def leave_out(config: pytest.Config, items: list[Any]) -> None:
    """Of the large grids, keep the cells that the seed draws."""
    seed = config.getoption("--sample")
    functions: dict[str, list[Any]] = defaultdict(list)
    for item in items if seed is not None else ():
        if hasattr(item, "callspec"):
            functions[item.nodeid.split("[")[0]].append(item)
    left = set()
    for name, cells in functions.items():
        file = f"{cells[0].path.parent.name}/{cells[0].path.name}"
        one_in = SAMPLED.get(file, ONE_IN if len(cells) > LARGE else None)
        if one_in is not None:
            left |= {*cells} - {*sampled(cells, one_in, random.Random(f"{seed} {name}"))}
    if left:
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))


class Sample:
    """What of a long walk or a grid inside a test is visited: all, or some drawn by a seed."""

    def __init__(self, seed: str | None, name: str) -> None:
        self.seed, self.name = seed, name

    def points(self, one_in: int) -> Iterator[int]:
        """Yield 1, 2, 3, …; of a sample, about one in so many."""
        dice, point = random.Random(f"{self.seed} {self.name}"), 0
        while True:
            point += 1 if self.seed is None else dice.randint(1, 2 * one_in - 1)
            yield point

    def cells(self, grid: Iterable[tuple[Any, ...]], one_in: int) -> list[tuple[Any, ...]]:
        """Return all cells; of a sample, one in so many, and every value of every column."""
        cells = list(grid)
        if self.seed is None:
            return cells
        dice = random.Random(f"{self.seed} {self.name}")
        order = dice.sample(range(len(cells)), len(cells))
        wanted = math.ceil(len(cells) / one_in)
        chosen = drawn(order, lambda at: {*enumerate(map(repr, cells[at]))}, wanted)
        return [cells[at] for at in sorted(chosen)]

    def some(self, cells: Sequence[Any], one_in: int) -> list[Any]:
        """Return all cells; of a sample, one in so many, whichever they are."""
        if self.seed is None:
            return list(cells)
        return random.Random(f"{self.seed} {self.name}").sample(cells, -(-len(cells) // one_in))

    def fewer(self, n: int, one_in: int) -> int:
        """Return how many of n are left, at least, of one in so many."""
        return n if self.seed is None else n // (2 * one_in)


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Sample:
    return Sample(request.config.getoption("--sample"), request.node.nodeid)


def group_of(nodeid: str) -> str:
    """Return what shares a worker, and so is started once: an engine, the browser, or a file."""
    file, _, name = nodeid.partition("::")
    engine = {*re.split(r"[\[\]-]", name)} & {*engines.names()}
    if file.endswith(BOTH) and engine:
        return min(engine)
    if file.startswith("tests/web/"):
        return "web"  # one server and one browser
    return "browser" if file.endswith(BROWSER) else file


class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
    """As xdist's, by our groups; and a test that takes its worker down fails alone.

    xdist gives the whole group to the next worker, which dies of the same test, until no more
    workers are started; and a worker that got a single test waits for a second one.
    """

    def _split_scope(self, nodeid: str) -> str:
        """Return the group of a test; xdist looks for a suffix, which pytest 9 does not let be."""
        return group_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that the worker ran; all others that it had wait for another worker."""
        workload = self.assigned_work.pop(node)
        left = [name for unit in workload.values() for name, done in unit.items() if not done]
        for scope, unit in workload.items():
            waiting = {name: False for name in unit if name in left[1:]}
            if waiting:
                self.workqueue[scope] = waiting
        return left[0] if left else None

    def schedule(self) -> None:
        """Hand out work; when there is no more, every worker may end with what it has."""
        super().schedule()
        if not self.workqueue:
            for node in self.nodes:
                node.shutdown()

    @property
    def tests_finished(self) -> bool:
        """Tell whether nothing is left, also of what a worker left behind."""
        return not self.workqueue and super().tests_finished


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadGroupScheduling | None:
    """Hand out tests by groups, if asked to (make test does)."""
    config.option.loadscopereorder = False  # as we have put them
    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out that are for the other run; the grid over engines is for both."""
    wanted = config.getoption("--torch")
    if wanted is None or collection_path.name in BOTH:
        return None
    with_torch = collection_path.relative_to(config.rootpath).as_posix().startswith(TORCH)
    if collection_path.is_dir():  # may hold some of both, but its conftest.py is read
        return (with_torch and wanted == "without") or None
    return with_torch != (wanted == "with") or None


def is_wanted(item: Any, half: str | None) -> bool:
    """Tell whether a test of the grid over engines is for this half; other files are by now."""
    with_torch = group_of(item.nodeid) in ON_TORCH
    return half is None or item.path.name not in BOTH or with_torch == (half == "with")


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Run what is for this half, of large grids a sample, and first what takes longest."""
    leave_out(config, items)
    first = {group: place for place, group in enumerate(LONGEST)}
    wanted = [item for item in items if is_wanted(item, config.getoption("--torch"))]
    items[:] = sorted(wanted, key=lambda item: first.get(group_of(item.nodeid), len(first)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse torch where it must not be; take all that is there out of sight of the collector.

    There is much of it, and it stays to the end: looking through it at every collection, here and
    in every forked rank, would take longer than most tests.
    """
    if session.config.getoption("--torch") == "without" and "torch" in sys.modules:
        found = (
            "a file imports torch while it is collected: TORCH in tests/conftest.py has to name it"
        )
        raise pytest.UsageError(found)
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let it be seen again, so that what still lives at the end is told."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _torch_stays_out(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail where a file brings torch into the run without it, and makes every later fork slow."""
    before = "torch" in sys.modules
    yield
    if request.config.getoption("--torch") == "without" and not before and "torch" in sys.modules:
        pytest.fail("torch was imported: TORCH in tests/conftest.py has to name this file")


@pytest.fixture(scope="module", autouse=True)
def _descriptors_come_back() -> Iterator[None]:
    """Fail where a file of tests leaves descriptors open: each may hold a whole shared memory."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    gc.collect()
    after = len(list(Path("/proc/self/fd").iterdir()))
    if after > before + FEW:
        pytest.fail(f"{after - before} descriptors were opened and not closed")


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """Start the system's Chromium, once for all tests."""
    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if found is None:
        pytest.skip(f"no Chromium on the path; install one of {', '.join(CHROMIUMS)}")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only these tests need it

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(QUIET))
        yield chromium
        chromium.close()
