"""The languages that pictures and pages speak."""

from __future__ import annotations

from roundelay.language import LANGUAGES, Language

__all__ = ["LANGUAGES", "Language"]
