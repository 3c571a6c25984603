"""The two languages in which sentences for people are written: English, and Chinese beside it.

Whoever writes a sentence writes both, side by side, so that terminal, drawing and page share them.
"""

from __future__ import annotations

from typing import Literal

from roundelay.errors import UnknownNameError

__all__ = ["LANGUAGES", "Language", "language_called", "say"]

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


def say(language: Language, english: str, chinese: str) -> str:
    """Return a sentence in a language.

    >>> say("en", "2 ranks", "2 个 rank"), say("zh", "2 ranks", "2 个 rank")
    ('2 ranks', '2 个 rank')
    """
    return chinese if language == "zh" else english


def language_called(name: str) -> Language:
    """Return a language by its code.

    >>> language_called("zh")
    'zh'
    """
    for language in LANGUAGES:
        if name == language:
            return language
    raise UnknownNameError("languages", name, LANGUAGES)
