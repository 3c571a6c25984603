"""Threads that compute answers, so many at once; the server ends without waiting for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

__all__ = ["Workers"]

Result = TypeVar("Result")


class Workers:
    """Runs functions in threads. A pool's threads would be joined when the interpreter ends."""

    def __init__(self, at_once: int) -> None:
        self._free = asyncio.Semaphore(at_once)

    async def run(self, compute: Callable[[], Result]) -> Result:
        """Return what `compute` returns, or raise what it raises."""
        async with self._free:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[Result] = loop.create_future()

            def settle(tell: Callable[[], None]) -> None:
                if not done.cancelled():
                    tell()

            def work() -> None:
                try:
                    tell = partial(done.set_result, compute())
                except BaseException as error:  # noqa: BLE001 - it is raised where it was asked for
                    tell = partial(done.set_exception, error)
                with suppress(RuntimeError):  # the server has ended meanwhile
                    loop.call_soon_threadsafe(settle, tell)

            threading.Thread(target=work, name="answer", daemon=True).start()
            return await done
