"""A drawing and its rules apart: a page whose policy forbids styles in markup adopts the rules."""

from __future__ import annotations

import re

__all__ = ["parted"]

STYLE = re.compile(r"<style>(.*?)</style>\n?", re.DOTALL)


def parted(svg: str) -> tuple[str, str]:
    """Return an SVG without its style elements, and the rules that were in them.

    >>> parted("<svg><style>.a{fill:red}</style><rect class='a'/></svg>")
    ("<svg><rect class='a'/></svg>", '.a{fill:red}')
    """
    return STYLE.sub("", svg), "\n".join(STYLE.findall(svg))
