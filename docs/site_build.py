"""Build the static site: `make site` writes out/site/, which opens from disk or from any server.

It has the page with answers that were computed beforehand, and every page of the documentation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from base64 import b64encode
from collections.abc import Iterator
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from site_bundle import bundle
from site_states import answers, said

from roundelay.web.app import view_list
from roundelay.web.assets import assets

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "README.zh.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
MISSING = {
    "en": "This copy has no answer to that. Run `roundelay web`: it has all of them.",
    "zh": "这个副本里没有这个状态。请运行 `roundelay web`，那里什么都有。",
}


def build(out: Path, *, few: bool = False) -> None:
    """Write the whole site; `few` computes fewer answers beforehand."""
    if out.exists():
        shutil.rmtree(out)
    (out / "answers").mkdir(parents=True)
    _page(out, few=few)
    _documentation(out)


def _page(out: Path, *, few: bool) -> None:
    files = {name.lstrip("/"): asset.body.decode() for name, asset in assets().items()}
    views = [each["name"] for each in view_list()["views"]]
    site = {
        "views": [{"name": name, "style": False} for name in views],
        "missing": MISSING,
        **_answers(out / "answers", few=few),
    }
    modules = {**{name: text for name, text in files.items() if name.endswith(".js")},
               "source.js": _read("site_source.js")}  # fmt: skip
    script = bundle(modules, "main.js", views)
    # From files a page may not look into styles that are files, and the theme does.
    named = ["page.css", "web.css", *(f"{name}.css" for name in views if f"{name}.css" in files)]
    style = "\n".join(files[name] for name in named) + _read("site.css")
    (out / "answers" / "site.js").write_text(
        f"window.roundelaySite = {_script_json(site)};\n", encoding="utf-8"
    )
    (out / "icon.svg").write_text(files["icon.svg"], encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src 'self' {_digest(script)}; style-src {_digest(style)}; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'"
    )
    html = files[""]
    html = re.sub(r'<link rel="stylesheet" href="[^"]+">\n', "", html)
    html = html.replace(
        '<meta charset="utf-8">\n',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{style}</style>\n",
    )
    html = html.replace('<script type="module" src="main.js"></script>\n', "")
    notes = "".join(f'<p lang="{language}">{_coded(said(language, few=few))}</p>'
                    for language in ("en", "zh"))  # fmt: skip
    links = ('<p lang="en"><a href="README.html">README</a> · <a href="docs/index.html">'
             'Documentation</a></p><p lang="zh"><a href="README.zh.html">README</a> · '
             '<a href="docs/index.html">文档（英文）</a></p>')  # fmt: skip
    foot = f'<footer class="site-note">{notes}{links}</footer>\n'
    scripts = f'<script src="answers/site.js"></script>\n<script>{script}</script>\n'
    (out / "index.html").write_text(
        html.replace("</body>", f"{foot}{scripts}</body>"), encoding="utf-8"
    )


def _read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def _answers(folder: Path, *, few: bool) -> dict[str, object]:
    """Write a file for each answer, and return how the page finds them."""
    entries: dict[str, list[object]] = {}
    usual: dict[str, int] = {}
    for each in answers(few=few):
        body = _script_json(each.document)
        name = hashlib.sha256(body.encode()).hexdigest()[:16]
        text = f'window.roundelayAnswer("{name}", {body});\n'
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
        plain = json.dumps({"lang": "en", **each.usual}, sort_keys=True)
        number = usual.setdefault(plain, len(usual))
        entries.setdefault(each.question, []).append([name, each.given, number])
    return {"entries": entries, "usual": [json.loads(plain) for plain in usual]}


def _script_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _digest(text: str) -> str:
    return "'sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _coded(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _documentation(out: Path) -> None:
    """Render every page, and whatever file a page leads to."""
    style = assets()["/page.css"].body.decode() + _read("site.css")
    (out / "docs").mkdir(exist_ok=True)
    (out / "docs" / "docs.css").write_text(style, encoding="utf-8")
    pages = [ROOT / name for name in PAGES]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "native").glob("*.md")]
    sources: set[Path] = set()
    for page in pages:
        target = out / page.relative_to(ROOT).with_suffix(".html")
        _write(target, _rendered(page, sources), out, title=_title(page))
    names = sorted(page.stem for page in (ROOT / "docs").rglob("*.md"))
    listed = "".join(f'<li><a href="{_place(name)}">{escape(_title(_found(name)))}</a></li>'
                     for name in names)  # fmt: skip
    _write(out / "docs" / "index.html", f"<h1>Documentation</h1><ul>{listed}</ul>", out,
           title="Documentation")  # fmt: skip
    for path in sorted(sources):
        _source(path, out)


def _found(stem: str) -> Path:
    return next((ROOT / "docs").rglob(f"{stem}.md"))


def _place(stem: str) -> str:
    return str(_found(stem).relative_to(ROOT / "docs").with_suffix(".html"))


def _title(page: Path) -> str:
    lines = page.read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("# ") for line in lines if line.startswith("# "))


def _source(path: Path, out: Path) -> None:
    """Write a file of the repository as it is, or as a page to read."""
    place = out / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        names = sorted(each for each in path.iterdir() if each.suffix in (".py", ".md"))
        listed = "".join(f'<li><a href="{each.name}.html">{each.name}</a></li>' for each in names)
        _write(place / "index.html", f"<h1>{path.name}</h1><ul>{listed}</ul>", out, title=path.name)
        for each in names:
            _source(each, out)
    elif path.suffix in (".svg", ".png"):
        shutil.copyfile(path, place)
    else:
        text = escape(path.read_text(encoding="utf-8"))
        name = path.relative_to(ROOT)
        _write(place.with_name(f"{path.name}.html"), f"<h1>{name}</h1><pre>{text}</pre>", out,
               title=str(name))  # fmt: skip


def _write(target: Path, body: str, out: Path, *, title: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    up = "../" * (len(target.relative_to(out).parts) - 1)
    policy = "default-src 'none'; style-src 'self'; img-src 'self' data:; base-uri 'none'"
    language = "zh-CN" if target.name == "README.zh.html" else "en"
    target.write_text(
        f'<!doctype html>\n<html lang="{language}"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)} · Roundelay</title>\n"
        f'<link rel="icon" href="{up}icon.svg" type="image/svg+xml">\n'
        f'<link rel="stylesheet" href="{up}docs/docs.css"></head>\n<body class="docs">\n'
        f'<nav><a href="{up}index.html">Roundelay</a><a href="{up}README.html">README</a>'
        f'<a href="{up}README.zh.html">中文</a>'
        f'<a href="{up}docs/index.html">Documentation</a></nav>\n'
        f"{body}\n</body></html>\n",
        encoding="utf-8",
    )


def _rendered(page: Path, sources: set[Path]) -> str:
    """Return a page's HTML, with links that lead to what the site has."""
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = reader.parse(page.read_text(encoding="utf-8"))
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", _anchor(tokens[at + 1].content))
        for child in _with_links(token):
            name = "href" if child.type == "link_open" else "src"
            child.attrSet(name, _link(str(child.attrGet(name)), page, sources))
    html: str = reader.renderer.render(tokens, reader.options, {})
    # The page's policy allows no style in markup.
    html = re.sub(r'style="text-align:(\w+)"', r'class="to-\1"', html)
    html = html.replace("<table>", '<div class="wide"><table>')
    return html.replace("</table>", "</table></div>")


def _with_links(token: Token) -> Iterator[Token]:
    for child in token.children or ():
        if child.type in ("link_open", "image"):
            yield child


def _anchor(heading: str) -> str:
    """Return the place of a heading, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _link(link: str, page: Path, sources: set[Path]) -> str:
    if re.match(r"[a-z]+:", link) or link.startswith("#"):
        return link
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve()
    tail = f"#{anchor}" if anchor else ""
    if target.suffix == ".md":
        return f"{file.removesuffix('.md')}.html{tail}"
    sources.add(target)
    if target.is_dir():
        return f"{file.rstrip('/')}/index.html"
    return link if target.suffix in (".svg", ".png") else f"{file}.html"


def main() -> None:
    """Build it where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "out" / "site")
    parser.add_argument("--few", action="store_true", help="fewer answers computed beforehand")
    given = parser.parse_args()
    build(given.out, few=given.few)
    print(f"wrote {given.out / 'index.html'}: open it in a browser")


if __name__ == "__main__":
    main()
