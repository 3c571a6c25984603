"""Numbers in environment variables, read exactly or refused by name and value."""

from __future__ import annotations

import re
from collections.abc import Mapping

from roundelay.errors import InvalidArgumentError


def whole_variable(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    """Return the whole number in a variable."""
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise InvalidArgumentError(
            f"{name}={text[:60]!r} is not a whole number from {least} to {most}. Launchers set it: "
            f"start with `roundelay run` or torchrun, or unset it."
        )
    return int(text)
