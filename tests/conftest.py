"""Settings for all tests."""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

FEW = 50  # descriptors: of pools and worlds that other files use too

# Tests judge results; how quick the machine is today is not one of them.
settings.register_profile("roundelay", deadline=None)
settings.load_profile("roundelay")


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


def pytest_collection_modifyitems(items: list[Any]) -> None:  # Any: of functions and others
    """Keep the tests of a file on one worker; the grid over engines is one part for each engine."""
    for item in items:
        engine = getattr(item, "callspec", None) and item.callspec.params.get("engine")
        group = f"{item.path.parent.name}-{item.path.stem} {engine or ''}"
        item.add_marker(pytest.mark.xdist_group(group.strip()))


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
