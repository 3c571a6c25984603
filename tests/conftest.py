"""Settings for all tests."""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]

from roundelay.processes.amx import keep_off_amx

#: Where torch is imported. Ranks are forked, and that takes ten times as long with torch in memory.
TORCH = (
    "tests/torch_backend", "tests/training", "tests/communicator/test_torch.py",
    "tests/engines/nccl_on_gpu.py", "tests/engines/test_gloo.py",
    "tests/engines/test_hierarchical.py", "tests/engines/test_nccl.py",
    "tests/launch/test_store.py", "tests/launch/test_two_hosts.py", "tests/test_docs.py",
    "tests/test_examples.py", "tests/test_house_rules.py",
)  # fmt: skip
ON_TORCH = ("gloo", "nccl")
BOTH = ("test_every_engine.py", "conftest.py")
FEW = 50  # descriptors: of pools and worlds that other files use too

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
    """Let tests that need torch in their own process be run apart from those that don't."""
    parser.addoption("--torch", choices=("with", "without"), help="run only tests with, or without")


class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
    """As xdist's, but a test that takes its worker down fails, and the rest of its group goes on.

    xdist gives the whole group to the next worker, which dies of the same test, until no more
    workers are started; and a worker that got a single test waits for a second one.
    """

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Keep the tests of a file on one worker; the grid over engines is one part for each engine."""
    wanted = config.getoption("--torch")
    for item in list(items):
        engine = getattr(item, "callspec", None) and item.callspec.params.get("engine")
        group = f"{item.path.parent.name}-{item.path.stem} {engine or ''}"
        item.add_marker(pytest.mark.xdist_group(group.strip()))
        if item.path.name in BOTH and wanted not in (
            None,
            "with" if engine in ON_TORCH else "without",
        ):
            items.remove(item)


def pytest_collection_finish() -> None:
    """Take all that was imported and collected out of sight of the collector of garbage.

    There is much of it, and it stays to the end: looking through it at every collection, here and
    in every forked rank, would take longer than most tests.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let it be seen again, so that what still lives at the end is told."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _descriptors_come_back() -> Iterator[None]:
    """Fail where a file of tests leaves descriptors open: each may hold a whole shared memory."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    gc.collect()
    after = len(list(Path("/proc/self/fd").iterdir()))
    if after > before + FEW:
        pytest.fail(f"{after - before} descriptors were opened and not closed")
