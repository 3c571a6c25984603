"""The files of the page: a fixed map, made by listing two folders of the package, and no path."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from roundelay.errors import InvalidArgumentError

__all__ = ["Asset", "assets"]

#: Folders whose files the page is made of; what one has the other may not have.
FOLDERS = ("roundelay.web", "roundelay.view")
KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
         ".svg": "image/svg+xml"}  # fmt: skip
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page, and what it is."""

    body: bytes
    kind: str


def assets() -> dict[str, Asset]:
    """Return every file by the path it is asked for at.

    >>> sorted(assets())[0], "/kit.js" in assets(), "/../errors.py" in assets()
    ('/', True, False)
    """
    found: dict[str, Asset] = {}
    for package in FOLDERS:
        for file in resources.files(package).joinpath("page").iterdir():
            kind = KINDS.get(file.name[file.name.rfind(".") :])
            if kind is None:
                continue
            if f"/{file.name}" in found:
                raise InvalidArgumentError(
                    f"{file.name} is in two folders of the page. Rename one."
                )
            found[f"/{file.name}"] = Asset(file.read_bytes(), kind)
    index = resources.files(FOLDERS[0]).joinpath("page", INDEX).read_bytes()
    return {"/": Asset(index, "text/html; charset=utf-8"), **found}
