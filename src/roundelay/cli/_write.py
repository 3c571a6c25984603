"""Pictures as files: the ending of the name chooses page, drawing or schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from roundelay.errors import InvalidArgumentError
from roundelay.schedule import to_json
from roundelay.view import Picture

OPENING = {
    ".html": "open it in any browser; it needs no network",
    ".svg": "open it in a browser, or put it in a document",
    ".json": "draw it again with: roundelay explain --schedule {path}",
}


def check_out(path: Path, *, several: bool) -> None:
    """Refuse a file that can't be written, before any work is done."""
    if path.suffix.lower() not in OPENING and not path.is_dir():
        raise InvalidArgumentError(
            f"--out {path}: the name must end in .html (a page to step through), .svg (a drawing) "
            f"or .json (the schedule itself)."
        )
    if several and path.suffix.lower() == ".json":
        raise InvalidArgumentError(
            f"--out {path}: a .json file holds one schedule. Leave out --diff, or write .html."
        )
    check_place(path)


def check_drawing(path: Path) -> None:
    """Refuse a file that is neither a page nor a drawing, or can't be written."""
    if path.suffix.lower() not in (".html", ".svg") and not path.is_dir():
        raise InvalidArgumentError(
            f"--out {path}: the name must end in .html (a page to step through) or .svg "
            f"(a drawing)."
        )
    check_place(path)


def check_place(path: Path, *, example: str = "ring.html", option: str = "--out") -> None:
    """Refuse a file that can't be written where it is to be."""
    if path.is_dir():
        raise InvalidArgumentError(
            f"{option} {path}: this is a folder. Add a file name: {path / example}."
        )
    if not path.parent.is_dir():
        raise InvalidArgumentError(
            f"{option} {path}: there is no folder {path.parent}. Create it, or choose another."
        )


def write(path: Path, pictures: Sequence[Picture]) -> None:
    """Write the pictures and say, on stderr, how to open them."""
    write_text(path, _text(path.suffix.lower(), pictures))


def write_text(path: Path, text: str, opening: str | None = None, *, option: str = "--out") -> None:
    """Write one file and say, on stderr, how to open it."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} {path}: can't write ({error.strerror or error}). Choose another place."
        ) from error
    how = opening or OPENING[path.suffix.lower()].format(path=path)
    click.echo(f"Wrote {path}: {how}.", err=True)


def _text(kind: str, pictures: Sequence[Picture]) -> str:
    if kind == ".html":
        from roundelay.view.html import html  # noqa: PLC0415 - drawing in a terminal needs none

        return html(pictures)
    if kind == ".svg":
        from roundelay.view.svg import svg  # noqa: PLC0415 - likewise

        return svg(pictures)
    return to_json(pictures[0].schedule)
