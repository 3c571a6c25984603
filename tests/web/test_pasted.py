"""A pasted text is read in a child, whose memory, time and output have limits."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from roundelay.algorithms import algorithms
from roundelay.schedule import Schedule, prove, to_json
from roundelay.view.languages import Language
from roundelay.web import pasted
from roundelay.web.pasted import PastedError, run_pasted

if TYPE_CHECKING:
    from tests.web.conftest import Served

PROOF = "/api/collectives/proof"
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "name", ["all_reduce_ring", "barrier_tree", "scan_pipeline", "all_to_all_bruck"]
)
def test_what_is_proved_here_is_proved_there(name: str, served: Served) -> None:
    schedule = algorithms.load(name).schedule(5)
    found = served.ask("POST", PROOF, JSON, to_json(schedule).encode()).document
    assert found["proved"] is True
    assert found["first"] == 0
    assert found["order"] in ("", prove(schedule).order)
    assert found["pictures"][0]["failures"] == []


@pytest.mark.parametrize("at", [0, 5, 11, 17, 23])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_what_breaks_is_found_at_its_step(at: int, language: str, served: Served) -> None:
    ring = algorithms.load("all_reduce_ring").schedule(4)
    kept = [transfer for index, transfer in enumerate(ring.transfers) if index != at]
    broken = Schedule(ring.collective, 4, kept, parts=4, name="a ring with a hole")
    path = f"{PROOF}?lang={language}"
    found = served.ask("POST", path, JSON, to_json(broken).encode()).document
    assert found["proved"] is False
    failures = found["pictures"][0]["failures"]
    assert found["first"] == min(frame for frame, *_ in failures)
    assert ("chunk" in failures[0][3]) == (language == "en")


def test_names_are_data(served: Served) -> None:
    name = "</script><img src=x onerror=alert(1)>"
    ring = algorithms.load("all_reduce_ring").schedule(2)
    named = Schedule(ring.collective, 2, ring.transfers, parts=2, name=name)
    answer = served.ask("POST", PROOF, JSON, to_json(named).encode())
    assert answer.headers["content-type"] == "application/json"
    assert answer.document["name"] == name


def run_apart(module: str, text: bytes, language: Language) -> bytes:
    """Run it in a thread: where a browser is open, this one has a loop already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, run_pasted(module, text, language)).result(60)


CHILDREN = {
    "spins": ("while True: pass", "time"),
    "grows": ("held = bytearray(4 << 30)", "memory"),
    "writes a file": ("open(__file__ + '.out', 'wb', 0).write(b'x' * 10)", "memory"),
    "starts others": ("import os; os.fork(); os.fork(); raise SystemExit(7)", "memory"),
    "says too much": ("return {'a': 'x' * (33 << 20)}", "memory"),
    "dies": ("import os; os.abort()", "memory"),
}


@pytest.mark.parametrize("what", CHILDREN)
def test_a_child_that_misbehaves_is_ended(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, expected = CHILDREN[what]
    (tmp_path / "bad_child.py").write_text(
        "from roundelay.web.pasted import answer_pasted\n"
        f"def work(text, language):\n    {body}\nanswer_pasted(work)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(pasted, "SECONDS", 3.0)
    with pytest.raises(PastedError, match=r"time|seconds") as caught:
        run_apart("bad_child", b"{}", "en")
    assert caught.value.status == 422
    assert expected in str(caught.value) or "seconds" in str(caught.value)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.out")) == 0


def test_a_child_is_told_the_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good_child.py").write_text(
        "from roundelay.web.pasted import answer_pasted\n"
        "answer_pasted(lambda text, language: {'text': text.decode(), 'language': language})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = run_apart("good_child", b"hello", "zh")
    assert json.loads(answer) == {"text": "hello", "language": "zh"}
