"""The page's modules as one script that needs no server: from files, browsers load no modules."""

from __future__ import annotations

import re
from collections.abc import Mapping

IMPORT = re.compile(
    r"^import (?:\{ (?P<names>[^}]+) \}|\* as (?P<whole>\w+)) from \"\./(?P<file>[\w-]+\.js)\";$",
    re.MULTILINE,
)
EXPORT = re.compile(r"^export \{ ([^}]+) \};$", re.MULTILINE)
EXPORT_CONST = re.compile(r"^export const (\w+) =", re.MULTILINE)
DYNAMIC = "import(`./${name}.js`)"
HEAD = '"use strict";\n(() => {\nconst modules = {};\n'


def bundle(modules: Mapping[str, str], start: str, views: list[str]) -> str:
    """Return one script of all that `start` and the views import, each in a scope of its own."""
    ordered: dict[str, str] = {}
    for name in (*(f"{view}.js" for view in views), start):
        _visit(name, modules, ordered, ())
    return HEAD + "\n".join(ordered.values()) + "\n})();\n"


def _visit(
    name: str, modules: Mapping[str, str], ordered: dict[str, str], above: tuple[str, ...]
) -> None:
    if name in ordered:
        return
    if name in above:
        message = f"modules import each other in a circle: {', '.join((*above, name))}"
        raise ValueError(message)
    text = modules[name]
    for found in IMPORT.finditer(text):
        _visit(found["file"], modules, ordered, (*above, name))
    exported = [each.split(" as ")[0].strip() for each in ",".join(EXPORT.findall(text)).split(",")]
    exported += EXPORT_CONST.findall(text)
    body = IMPORT.sub(_imported, text)
    body = EXPORT_CONST.sub(r"const \1 =", EXPORT.sub("", body))
    body = body.replace(DYNAMIC, "Promise.resolve(modules[`${name}.js`])")
    if re.search(r"^(import|export)\b|\bimport\(", body, re.MULTILINE):
        message = f"{name} imports or exports in another form than the bundle knows"
        raise ValueError(message)
    names = ", ".join(filter(None, exported))
    ordered[name] = f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {names} }};\n}})();'


def _imported(found: re.Match[str]) -> str:
    target = f'modules["{found["file"]}"]'
    if found["whole"]:
        return f"const {found['whole']} = {target};"
    names = ", ".join(each.strip().replace(" as ", ": ") for each in found["names"].split(","))
    return f"const {{ {names} }} = {target};"
