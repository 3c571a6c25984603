"""A pasted text, computed in a child with limits on its memory, its seconds and its output.

The server reads nothing of the text. The child is a fresh interpreter that runs one module of
ours, named by the view and not by the request: it reads the text and writes a document.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable

from roundelay.errors import RoundelayError
from roundelay.view.languages import LANGUAGES, Language
from roundelay.web.view import Document

__all__ = ["MOST_BYTES", "PastedError", "answer_pasted", "run_pasted"]

MOST_BYTES = 1 << 20
#: Of the child: bytes of its memory, seconds of its CPU, and seconds until it is ended.
MEMORY, CPU_SECONDS, SECONDS = 1 << 30, 10, 20.0
MOST_ANSWER = 32 << 20  # bytes
#: Children at once; others wait their turn.
AT_ONCE = 2
REFUSED = 3  # exit status: the text is not well formed, and the answer says where

_turns: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


class PastedError(Exception):
    """What to answer in place of a document."""

    def __init__(self, status: int, words: str) -> None:
        self.status = status
        super().__init__(words)


async def run_pasted(module: str, text: bytes, language: Language) -> bytes:
    """Run a module in a child on a text, and return the document it writes."""
    loop = asyncio.get_running_loop()
    async with _turns.setdefault(loop, asyncio.Semaphore(AT_ONCE)):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", module, language,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, limit=MOST_ANSWER,
        )  # fmt: skip
        try:
            answer, _ = await asyncio.wait_for(child.communicate(text), SECONDS)
        except TimeoutError:
            raise PastedError(
                422, f"This takes more than {SECONDS:.0f} seconds to prove."
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode == REFUSED:
        raise PastedError(400, json.loads(answer)["error"])
    if child.returncode != 0 or len(answer) > MOST_ANSWER:
        raise PastedError(422, "This schedule takes more memory or time to prove than is given.")
    return answer


def answer_pasted(work: Callable[[bytes, Language], Document]) -> None:
    """Be the child: set the limits, then read the text, work on it and write the document."""
    import resource  # noqa: PLC0415 - where there is none, nothing is computed here

    for what, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),  # nothing is written to any file
        (resource.RLIMIT_NPROC, 0),  # nor is anything started
    ):
        resource.setrlimit(what, (most, most))
    text = sys.stdin.buffer.read(MOST_BYTES + 1)
    language = next(each for each in LANGUAGES if each == sys.argv[1])
    status = 0
    try:
        document = work(text, language)
    except RoundelayError as error:
        document, status = {"error": str(error)}, REFUSED
    sys.stdout.write(json.dumps(document, separators=(",", ":")))
    sys.stdout.flush()
    sys.exit(status)
