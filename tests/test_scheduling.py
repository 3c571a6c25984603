"""A worker runs whole files, and a test that takes it down fails alone: all others are run."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEADLY = """
import os, signal
import pytest

@pytest.mark.parametrize("number", range(5))
def test_one(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


PLAIN = """
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(20))
def test_plain(number):
    Path(__file__).with_name(os.environ["PYTEST_XDIST_WORKER"]).touch()
"""


def test_a_worker_that_dies_fails_its_test_alone(tmp_path: Path) -> None:
    (tmp_path / "test_deadly.py").write_text(DEADLY)
    (tmp_path / "test_plain.py").write_text(PLAIN)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup"),
            *("-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)),
            *("--junitxml", "found.xml", str(tmp_path)),
        ],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**outer, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    suite = ET.parse(tmp_path / "found.xml").getroot()[0]
    failed = [case.get("name") for case in suite.iter("testcase") if len(case)]
    assert (suite.get("tests"), len(failed)) == ("25", 1), done.stdout
    assert len(list(tmp_path.glob("gw*"))) == 1  # the tests of a file share what they start
    assert "crashed while running 'test_deadly.py::test_one[2]" in done.stdout
