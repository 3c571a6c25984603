"""`roundelay web` as users start it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import Result

Run = Callable[..., Result]
WEB = [sys.executable, "-m", "roundelay", "web", "--no-open"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_its_address_and_ends_quietly(how: signal.Signals) -> None:
    with subprocess.Popen(
        [*WEB, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["address"].startswith("http://127.0.0.1:")
        assert told["link"].startswith(f"{told['address']}#token=")
        process.send_signal(how)
        out, err = process.communicate(timeout=30)
    assert "Traceback" not in err
    assert out == ""


def test_the_token_may_come_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_WEB_TOKEN", "0123456789abcdef")
    with subprocess.Popen(
        WEB, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("/#token=0123456789abcdef\n")
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--host", "0.0.0.0"], "everywhere"),
        (["--host", "no.such.host.invalid"], "Nothing can listen"),
        (["--token", "short"], "at least 16"),
        (["--port", "70000"], "70000"),
    ],
)
def test_wrong_use_is_told(words: list[str], told: str, run: Run) -> None:
    result = run("web", "--no-open", *words)
    assert result.exit_code == 2
    assert told in result.stderr


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_without_its_packages_it_says_how_to_install_them(package: str) -> None:
    program = (
        f"import sys; sys.modules['{package}'] = None; sys.argv = ['roundelay', 'web'];"
        "from roundelay.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pip install 'roundelay[web]'" in done.stderr
