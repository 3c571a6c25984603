"""Settings for all tests."""

import gc

from hypothesis import settings

# Tests judge results; how quick the machine is today is not one of them.
settings.register_profile("roundelay", deadline=None)
settings.load_profile("roundelay")


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
