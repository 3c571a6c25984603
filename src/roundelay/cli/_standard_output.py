"""Standard output that is closed, full, or has lost its reader."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import click

from roundelay.errors import RoundelayError

READER_LEFT = 141  # what shells report of a command that SIGPIPE ended: `yes | head`


def open_standard_streams() -> None:
    """Open on nothing what of the three standard streams is closed (`>&-`).

    Python has none then, and the next file opened, a rank's memory say, would take its number and
    get what others write there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


@contextlib.contextmanager
def output_kept() -> Iterator[None]:
    """Turn an output that can't be written into an end: quiet if nobody reads, or with a word."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _write_no_more()
        raise click.exceptions.Exit(READER_LEFT) from None
    except RoundelayError:
        raise  # a limit that was hit is an OSError, too
    except OSError as error:
        if error.filename is not None:  # a file that the user named, not the output
            raise click.ClickException(f"{error.filename}: {error.strerror}.") from error
        _write_no_more()
        raise click.ClickException(
            f"The output can't be written: {error.strerror or error}. Send it elsewhere."
        ) from error


def _write_no_more() -> None:
    """Let go of what is left to write, or Python complains about it at its exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
