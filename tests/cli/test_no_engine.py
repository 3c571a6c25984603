"""Where there is no native core (macOS, Windows, a build that failed): what works, what says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from roundelay.cli._group import COMMANDS
from roundelay.errors import NoEngineError

#: Takes away what other systems do not have, as far as one can from Linux, and more: `absent`.
ELSEWHERE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ABSENT or name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
NOT_THERE = ("roundelay._core", "fcntl", "resource", "termios", "tty", "pty", "pwd", "grp")
NUMBERS = ("numpy", "torch", "msgspec", "mpi4py")
MAIN = "from roundelay.cli import main; main()"
LOOKING = ("list", "prove", "explain", "kube", "plan", "view", "web")


def run(
    *arguments: str, code: str = MAIN, absent: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    prelude = f"ABSENT = {(*NOT_THERE, *absent)!r}{ELSEWHERE}"
    return subprocess.run(
        [sys.executable, "-c", prelude + code, *arguments],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    "line",
    ["list", "prove barrier --sizes 1-5", "explain all_reduce -n 3",
     "explain all_reduce --program 0", "explain all_reduce --diff ring,tree", "--version",
     "plan --params 7e9 --gpus 8 --why --plot"],
)  # fmt: skip
def test_looking_at_algorithms_needs_no_core_and_no_numpy(line: str) -> None:
    done = run(*line.split(), absent=NUMBERS)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout


def test_the_page_needs_no_core_but_for_what_runs() -> None:
    code = """
from roundelay.errors import NoEngineError
from roundelay.web.query import Query
from roundelay.web.views import views
for view in views:
    for question, answer in view.answers.items():
        try:
            answer(Query({}))
        except NoEngineError:
            print(view.name, question)
        except Exception:
            pass  # which needs more than defaults
"""
    done = run(code=code)
    assert (done.stderr, done.stdout.split("\n")) == ("", ["axes cube", ""])


def test_pictures_are_written_without_a_core(tmp_path: Path) -> None:
    paths = [tmp_path / f"ring.{ending}" for ending in ("html", "svg", "json")]
    outs = [word for path in paths for word in ("--out", str(path))]
    done = run("explain", "all_reduce", *outs, absent=NUMBERS)
    assert done.returncode == 0, done.stderr
    assert all(path.stat().st_size > 0 for path in paths)


def test_real_numbers_need_numpy_alone() -> None:
    done = run("explain", "all_reduce", "--values", "1,1 2,2")
    assert done.returncode == 0, done.stderr
    assert "[3, 3]" in done.stdout


def test_the_doctor_says_what_is_missing_and_the_way_out() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    found = {each["name"]: each for each in told["findings"]}
    assert told["usable"] is False
    assert found["native core"]["mark"] == "failed"
    assert "pip install" in found["native core"]["cure"]


def test_help_names_every_command_all_the_same() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert all(f"  {name}" in done.stdout for name in COMMANDS.names())


@pytest.mark.parametrize("name", sorted({*COMMANDS.names()} - {*LOOKING, "doctor"}))
def test_every_command_that_needs_ranks_says_why_not(name: str) -> None:
    words = {"run": ["-n", "2", __file__], "verify": [f"{__file__}:job"],
             "export": ["checkpoint", "model.safetensors"]}.get(name, [])  # fmt: skip
    done = run(name, *words)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: Ranks run on Roundelay's native core"), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "code",
    ["rd.run(lambda comm: 1)", "rd.init()", "rd.Communicator", "import roundelay.communicator",
     "import roundelay.engines.threads", "import roundelay.engines.shared_memory"],
)  # fmt: skip
def test_whatever_needs_ranks_raises_one_typed_error(code: str) -> None:
    program = f"""
import roundelay as rd
from roundelay.errors import NoEngineError
from roundelay.engines.reference import Reference
try:
    {code}
except NoEngineError as error:
    print(error)
"""
    done = run(code=program, absent=("torch", "mpi4py"))
    assert done.returncode == 0, done.stderr
    assert "native core" in done.stdout


@pytest.mark.parametrize("platform", ["darwin", "win32", "linux", "freebsd14"])
def test_the_error_names_the_platform_and_the_way_out(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    said = str(NoEngineError())
    assert platform in said
    assert ("pip install" if platform == "linux" else "Run ranks on Linux") in said


def job() -> dict[str, object]:
    return {}
