"""A drawing as nested lists, so that a page builds it of elements and text and parses no markup."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

__all__ = ["svg_tree"]

Tree = list[Any]  # a tag, attributes, then texts and trees


def svg_tree(svg: str) -> Tree:
    """Return a drawing of ours as `[tag, attributes, *children]`.

    >>> svg_tree('<svg xmlns="http://www.w3.org/2000/svg"><text x="1">a &lt; b</text></svg>')
    ['svg', {}, ['text', {'x': '1'}, 'a < b']]
    """
    return _tree(ET.fromstring(svg))  # noqa: S314 - drawn here, and of no other source


def _tree(element: ET.Element) -> Tree:
    text = [element.text] if element.text and element.text.strip() else []
    return [element.tag.rpartition("}")[2], dict(element.attrib), *text, *map(_tree, element)]
