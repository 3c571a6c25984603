"""A cut matrix product as one HTML file that steps from product to product; needs no network."""

from __future__ import annotations

from html import escape
from string import Template

from roundelay.language import say
from roundelay.view.cube import CubePicture, cube_words
from roundelay.view.cube_svg import WIDTH, cube_drawing, cube_style
from roundelay.view.html import digest, embedded, joined, read

__all__ = ["cube_page"]

STYLE = """
.cube{display:block;width:100%;height:auto}
.cube .frame{transition:opacity .2s}
.cube .frame.away{opacity:.22}
.cube-words{min-height:3em;max-width:92ch;font-size:16px;padding-top:12px}
.cube .page{fill:none}
"""
ENGLISH = (
    "One colour is one rank's piece; stripes are the same piece on each of these ranks; 0+1 is a "
    "sum of theirs."
)
CHINESE = "一种颜色是一个 rank 的片；条纹表示这些 rank 各有相同的一片；0+1 是它们的和。"


def cube_page(picture: CubePicture) -> str:
    """Return a page: the drawing, with one product in the light at a time, and words to it."""
    style = f"{read('page.css')}{cube_style(picture)}{STYLE}"
    script = joined(("kit.js", "words.js", "page-language.js", "player.js", "cube.js"))
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    height, parts = cube_drawing(picture)
    top = 74  # the page has its own title
    drawing = (
        f'<svg class="cube" role="img" aria-label="{escape(picture.title)}" '
        f'viewBox="0 {top} {WIDTH:g} {height - top:g}">{"".join(parts)}</svg>'
    )
    return Template(read("cube.html")).substitute(
        language=picture.language,
        policy=policy,
        title=escape(picture.title),
        about=escape(picture.about),
        style=style,
        drawing=drawing,
        key=say(picture.language, ENGLISH, CHINESE),
        data=embedded({"frames": cube_words(picture)}),
        script=script,
    )
