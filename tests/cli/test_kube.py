"""`roundelay kube` prints, writes or applies a manifest; wrong use ends with exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

JOB = ("--nodes", "2", "--ranks", "8", "--image", "me/train:1")
SCRIPT = ("train.py", "--out", "x", "--lr", "-1", "two words")


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob", "mpijob"])
def test_it_is_printed_written_and_explained(
    run: Callable[..., Result], tmp_path: Path, kind: str
) -> None:
    printed = run("kube", kind, *JOB, *SCRIPT)
    assert (printed.exit_code, printed.stderr) == (0, "")
    for word in ("- train.py\n", '- "--lr"\n', '- "-1"\n', '- "two words"\n'):
        assert word in printed.stdout
    written = run("kube", kind, *JOB, "--out", str(tmp_path / "job.yaml"), *SCRIPT)
    assert (written.exit_code, written.stdout) == (0, "")
    assert "kubectl apply -f" in written.stderr
    assert (tmp_path / "job.yaml").read_text(encoding="utf-8") == printed.stdout
    explained = run("kube", kind, *JOB, "--explain", *SCRIPT).stdout.splitlines()
    assert [line.partition("  # ")[0].rstrip() for line in explained] == printed.stdout.splitlines()


KUBECTL = """#!/bin/sh
echo "$@" > said
cat > applied
echo trainjob created
exit {code}
"""


@pytest.mark.parametrize("code", [0, 1])
def test_kubectl_gets_it_and_its_exit_code_is_ours(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "kubectl").write_text(KUBECTL.format(code=code))
    (tmp_path / "kubectl").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    applied = run("kube", "trainjob", *JOB, "--apply", *SCRIPT)
    assert (applied.exit_code, applied.stdout) == (code, "")
    assert Path("said").read_text() == "apply -f -\n"
    assert Path("applied").read_text() == run("kube", "trainjob", *JOB, *SCRIPT).stdout


def test_without_kubectl_nothing_is_written_and_the_way_out_is_named(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = run("kube", "mpijob", *JOB, "--apply", "--out", str(tmp_path / "x.yaml"), *SCRIPT)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--out job.yaml" in refused.stderr
    assert list(tmp_path.iterdir()) == []
