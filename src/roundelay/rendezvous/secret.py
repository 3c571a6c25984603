"""What only the ranks of one job know, so that they can tell one another from anybody else."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from roundelay.errors import InvalidArgumentError

__all__ = ["found_secret"]

LEAST_SECRET, MOST_SECRET = 16, 4096  # characters


def found_secret(environ: Mapping[str, str]) -> bytes:
    """Read what only the ranks of this job know: ROUNDELAY_SECRET, or the file that holds it.

    >>> found_secret({}), found_secret({"ROUNDELAY_SECRET": "correct horse battery"})
    (b'', b'correct horse battery')
    """
    text, name = environ.get("ROUNDELAY_SECRET", ""), environ.get("ROUNDELAY_SECRET_FILE", "")
    if name:
        try:
            with Path(name).open("rb") as file:
                shared = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
                text = file.read(MOST_SECRET + 1).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise InvalidArgumentError(
                f"ROUNDELAY_SECRET_FILE={name} can't be read: {why}."
            ) from None
        if shared:
            raise InvalidArgumentError(
                f"ROUNDELAY_SECRET_FILE={name} can be read by others. Let only yourself do so: "
                f"chmod 600 {name}"
            )
    if (text or name) and not LEAST_SECRET <= len(text) <= MOST_SECRET:
        raise InvalidArgumentError(
            f"ROUNDELAY_SECRET{'_FILE' if name else ''} has {len(text)} characters; a secret has "
            f"{LEAST_SECRET} to {MOST_SECRET}. Make one: openssl rand -hex 32"
        )
    return text.encode()
