"""Write the schema of one version of a CustomResourceDefinition, without words, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def without_words(node: Any) -> Any:
    """Return a schema without descriptions; a property may be called so."""
    if isinstance(node, dict):
        return {
            key: without_words(value)
            for key, value in node.items()
            if key != "description" or not isinstance(value, str)
        }
    return [without_words(value) for value in node] if isinstance(node, list) else node


def main(path: str, version: str) -> None:
    import yaml  # type: ignore[import-untyped]  # noqa: PLC0415 - only to take them anew

    crd = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    (found,) = [each for each in crd["spec"]["versions"] if each["name"] == version]
    schema = without_words(found["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    sys.stdout.write(json.dumps(schema, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
