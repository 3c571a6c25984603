"""Manifests as YAML: blocks, and strings that no reader takes for anything else.

A value may come with the reason for its line. Readers differ in what they take for a number, a
boolean or nothing (`no`, `on`, `1e3`, `1:20`), so whatever is not plainly a word is in quotes, in
which JSON and YAML are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Because", "plain", "to_yaml"]

PLAIN = re.compile(r"[A-Za-z/](?:[\w./@:+-]*[\w/])?", re.ASCII)
WORDS = re.compile(r"(?i:y|n|yes|no|on|off|true|false|null|nan|inf|infinity)")
#: What YAML allows in no text, and JSON does not escape; or what some take for the end of a line.
UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
LEAST_COLUMN, MOST_COLUMN = 30, 60  # at which the reasons stand


class Because(NamedTuple):
    """A value, and why it is there."""

    value: Any  # what JSON knows, with reasons inside
    why: str


def plain(value: Any) -> Any:  # what JSON knows
    """Return the value without reasons."""
    if isinstance(value, Because):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def to_yaml(manifest: Mapping[str, Any], *, explained: bool = False) -> str:
    """Return a manifest as YAML; `explained`, with the reason of each line behind it.

    >>> job = {"name": "no", "env": [{"name": "A", "value": Because("1e3", "a number as text")}]}
    >>> print(to_yaml(job), end="")
    name: "no"
    env:
    - name: A
      value: "1e3"
    >>> print(to_yaml(job, explained=True).splitlines()[-1])
      value: "1e3"                # a number as text
    """
    lines = list(_mapping(manifest, ""))
    if not explained:
        return "".join(f"{text}\n" for text, _ in lines)
    longest = max((len(text) for text, _ in lines), default=0)
    column = min(max(longest + 2, LEAST_COLUMN), MOST_COLUMN)
    return "".join(
        f"{text}{' ' * max(2, column - len(text))}# {why}\n" if why else f"{text}\n"
        for text, why in lines
    )


def _mapping(mapping: Mapping[str, Any], indent: str) -> Iterator[tuple[str, str]]:
    for key, given in mapping.items():
        value, why = _unwrapped(given)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_scalar(key)}:", why
            yield from _mapping(value, indent + "  ")
        elif isinstance(value, list) and value:
            yield f"{indent}{_scalar(key)}:", why
            yield from _sequence(value, indent)
        else:
            yield f"{indent}{_scalar(key)}: {_scalar(value)}", why


def _sequence(items: Sequence[Any], indent: str) -> Iterator[tuple[str, str]]:
    for given in items:
        value, why = _unwrapped(given)
        if isinstance(value, Mapping) and value:
            (first, reason), *rest = _mapping(value, indent + "  ")
            yield f"{indent}- {first[len(indent) + 2 :]}", reason or why
            yield from rest
        elif isinstance(value, list) and value:
            yield f"{indent}-", why
            yield from _sequence(value, indent + "  ")
        else:
            yield f"{indent}- {_scalar(value)}", why


def _unwrapped(given: Any) -> tuple[Any, str]:
    value, why = given, ""
    while isinstance(value, Because):
        value, why = value.value, why or value.why
    return value, why


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if PLAIN.fullmatch(value) and not WORDS.fullmatch(value):
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
