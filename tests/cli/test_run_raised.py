"""`roundelay run` tells the user's own error, and its exit code, however a rank cleans up.

In every front, whatever a script closes in `finally`, or leaves open.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HEAD = {
    "rd": "import numpy as np, roundelay as rd; comm = rd.init(); rank = comm.rank",
    "dist": "import torch, torch.distributed as dist; dist.init_process_group('roundelay'); "
    "rank = dist.get_rank()",
    "hvd": "import torch, roundelay.horovod.torch as hvd; hvd.init(); rank = hvd.rank()",
}
STEP = {
    "rd": "comm.all_reduce(np.ones(3))",
    "dist": "dist.all_reduce(torch.ones(3))",
    "hvd": "hvd.allreduce(torch.ones(3), name='a')",
}
CLOSE = {"rd": "comm.close()", "dist": "dist.destroy_process_group()", "hvd": "hvd.shutdown()"}
CLEANED = {
    "not at all": "main()",
    "in finally": "try: main()\nfinally: {close}",
    "in except": "try: main()\nexcept BaseException:\n    {close}\n    raise\n{close}",
    "by a stack": "with contextlib.ExitStack() as stack:\n    stack.callback(clean); main()",
    "at exit": "atexit.register(clean); main()",
}
ENDS = {"raise ValueError('no data')": 1, "sys.exit(3)": 3}
FRONTS = [name for name in HEAD if name == "rd" or find_spec("torch") is not None]


def script(front: str, clean: str, at_ten: str) -> str:
    """Return one in which all ranks make calls until `at_ten` happens, then clean up."""
    return f"""
import atexit, contextlib, sys
{HEAD[front]}
def clean():
    {CLOSE[front]}
def main():
    for turn in range(20):
        {STEP[front]}
        if turn == 10:
            {at_ten}
{clean.format(close=CLOSE[front])}
"""


def run(folder: Path, text: str) -> tuple[int, list[str]]:
    """Run it on three ranks; return the exit code and the lines that are nobody's warnings."""
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "roundelay", "run", "-n", "3", "script.py"],
        cwd=folder, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout == ""
    return done.returncode, [line for line in done.stderr.splitlines() if line[:1] != "["]


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("clean", CLEANED)
@pytest.mark.parametrize("end", ENDS)
def test_the_first_that_failed_is_told_once_however_it_cleans_up(
    front: str, clean: str, end: str, tmp_path: Path
) -> None:
    only_rank_1 = f"if rank == 1: {end}"
    code, told = run(tmp_path, script(front, CLEANED[clean], only_rank_1))
    assert code == ENDS[end], told
    assert told[0].startswith("roundelay: rank 1 "), told
    assert "; rank 1" not in told[0]
    if "raise" in end:
        assert "rank 1 raised ValueError. After that, ranks 0, 2 raised PeerLost." in told[0]
        assert told[-1] == "ValueError: no data"
        assert sum(line.startswith("Traceback") for line in told) == 1


@pytest.mark.parametrize("front", [name for name in FRONTS if name != "rd"])
def test_who_closes_in_order_and_then_fails_is_told_first(front: str, tmp_path: Path) -> None:
    """What the others raise says only that it has left. rd's close waits for them, and raises."""
    leave = f"if rank == 1: {CLOSE[front]}; sys.exit(3)"
    code, told = run(tmp_path, script(front, "main()", leave))
    assert code == 3, told
    assert told[0].startswith("roundelay: rank 1 ended with exit code 3. After that, "), told


@pytest.mark.parametrize("front", FRONTS)
def test_all_may_close_where_they_have_caught_an_exception(front: str, tmp_path: Path) -> None:
    clean = "try: main()\nexcept StopIteration: {close}"
    assert run(tmp_path, script(front, clean, "raise StopIteration")) == (0, [])
