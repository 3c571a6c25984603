"""README.zh.md beside README.md: the same commands, outputs and tables, in the same places."""

from __future__ import annotations

import re

#: What is not translated: blocks of code, and tables that are generated.
SAME = re.compile(
    r"^```.*?^```$|^<!-- generated: \w+ -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE
)
HEADING = re.compile(r"^#+ ", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
#: The two link to each other.
EACH_OTHER = {"README.md", "README.zh.md"}


def in_step(chinese: str, english: str) -> str:
    """Return the Chinese page with the blocks and generated tables of the English one, in turn."""
    fresh = SAME.findall(english)
    if len(SAME.findall(chinese)) != len(fresh):
        message = f"README.zh.md must have the {len(fresh)} blocks and tables of README.md, in turn"
        raise ValueError(message)
    blocks = iter(fresh)
    return SAME.sub(lambda _: next(blocks), chinese)


def links(text: str) -> set[str]:
    """Return where a page leads to, but for places in itself and the other language."""
    found = set(LINK.findall(SAME.sub("", text)))
    return {link for link in found if not link.startswith("#")} - EACH_OTHER


def headings(text: str) -> list[str]:
    """Return the levels of the headings, as they follow each other."""
    return HEADING.findall(SAME.sub("", text))


def codes(text: str) -> list[str]:
    """Return what stands in the prose as code, wherever its lines break."""
    return sorted(" ".join(code.split()) for code in re.findall(r"`[^`]+`", SAME.sub("", text)))


def rows(text: str) -> list[int]:
    """Return the columns of each row of the written tables."""
    lines = SAME.sub("", text).splitlines()
    return [line.count("|") for line in lines if line.startswith("|")]
