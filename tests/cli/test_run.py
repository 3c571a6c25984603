"""`roundelay run`: ranks start with the right variables, talk in whole lines, and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

MAIN = [sys.executable, "-c", "from roundelay.cli import main; main()", "run"]


class Launched:
    """`roundelay run` under way, with a script of its own."""

    def __init__(self, folder: Path, script: str, *options: str, **extra: Any) -> None:
        (folder / "script.py").write_text(script)
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder / "meet"), "COLUMNS": "200"}
        (folder / "meet").mkdir(exist_ok=True)
        self.meet = folder / "meet"
        self.process = subprocess.Popen(
            [*MAIN, *options], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            **{"stdin": subprocess.DEVNULL, **extra},
        )  # fmt: skip

    def lines(self, count: int) -> list[str]:
        """Wait for lines of output."""
        assert self.process.stdout is not None
        return [self.process.stdout.readline().rstrip("\n") for _ in range(count)]

    def end(self, text: str | None = None) -> tuple[int, list[str], list[str]]:
        stdout, stderr = self.process.communicate(text, timeout=60)
        assert list(self.meet.iterdir()) == []
        return self.process.returncode, stdout.splitlines(), stderr.splitlines()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(script: str, *options: str, **extra: Any) -> Launched:
        started.append(Launched(tmp_path, script, *options, **extra))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


Launch = Callable[..., Launched]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while not all(map(gone, pids)):
        assert time.monotonic() < end, f"{[pid for pid in pids if not gone(pid)]} are left"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "options",
    [["-n", "3"], ["-np", "3"], ["--nproc-per-node", "3"], ["--nproc_per_node", "3"],
     ["-np", "3", "-H", "localhost:2,localhost:2"], ["-H", "127.0.0.1:2,localhost"]],
    ids=" ".join,
)  # fmt: skip
def test_every_rank_gets_what_torchrun_would_give_it(launch: Launch, options: list[str]) -> None:
    script = """
import os, sys
names = "RANK LOCAL_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR".split()
print(*(os.environ[name] for name in names), int(os.environ["MASTER_PORT"]) > 0, *sys.argv[1:])
"""
    code, stdout, stderr = launch(script, *options, "script.py", "-n", "7", "--x=1").end()
    assert (code, stderr) == (0, [])
    due = [f"[{r}] {r} {r} {r} 3 3 0 127.0.0.1 True -n 7 --x=1" for r in range(3)]
    assert sorted(stdout) == due


def test_the_port_is_nobodys_but_the_jobs(launch: Launch) -> None:
    script = """
import os, socket
port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    for reuse in False, True:
        for address in "127.0.0.1", "0.0.0.0":
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                try:
                    server.bind((address, port))
                    server.listen()
                    print(reuse, "listens")
                except OSError as error:
                    print(reuse, error.strerror)
"""
    code, stdout, stderr = launch(script, "-n", "2", "script.py").end()
    assert (code, stderr) == (0, [])
    assert stdout == ["[0] False Address already in use"] * 2 + ["[0] True listens"] * 2


@pytest.mark.parametrize("words", [["auto"], ["cpu"]])
def test_one_rank_per_core_by_name(launch: Launch, words: list[str]) -> None:
    from roundelay.launch.ranks_here import ranks_here  # noqa: PLC0415

    code, stdout, _ = launch("print('here')", "-n", *words, "script.py").end()
    assert (code, len(stdout)) == (0, ranks_here(words[0]))


def test_a_module_is_run_with_its_arguments(launch: Launch) -> None:
    code, stdout, _ = launch("import sys; print(sys.argv[1:])", "-n2", "-m", "script", "-m").end()
    assert (code, sorted(stdout)) == (0, ["[0] ['-m']", "[1] ['-m']"])


def test_a_script_with_the_communicator(launch: Launch) -> None:
    script = """
import numpy as np, roundelay as rd
comm = rd.init()
print(comm.rank, comm.timeout, comm.all_reduce(np.ones(2)))
"""
    code, stdout, stderr = launch(script, "-n", "3", "--timeout", "9", "script.py").end()
    assert (code, stderr) == (0, [])
    assert sorted(stdout) == [f"[{rank}] {rank} 9.0 [3. 3.]" for rank in range(3)]


def test_outputs_stay_apart_and_only_rank_0_hears(launch: Launch) -> None:
    script = """
import os, sys
print("out", repr(sys.stdin.read()))
print("err", file=sys.stderr)
"""
    job = launch(script, "-n", "2", "script.py", stdin=subprocess.PIPE)
    code, stdout, stderr = job.end("hello")
    assert code == 0
    assert sorted(stdout) == ["[0] out 'hello'", "[1] out ''"]
    assert sorted(stderr) == ["[0] err", "[1] err"]


def test_output_comes_as_it_is_printed_also_without_an_end(launch: Launch) -> None:
    script = """
import sys
print("early")
sys.stdout.write("name? ")
print("got", input())
"""
    job = launch(script, "-n", "1", "script.py", stdin=subprocess.PIPE)
    assert job.lines(1) == ["[0] early"]
    assert job.process.stdout is not None
    assert job.process.stdout.read(10) == "[0] name? "
    assert job.end("you\n")[1] == ["got you"]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("raise ValueError('x')", 1),
        ("os._exit(42)", 42),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("os.abort()", 134),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
    ],
)
def test_the_exit_code_is_the_first_failing_ranks(launch: Launch, end: str, code: int) -> None:
    script = f"""
import os, signal, sys
if os.environ["RANK"] == "1":
    {end}
"""
    found, _, stderr = launch(script, "-n", "3", "script.py").end()
    assert found == code
    assert sum("rank 1 " in line for line in stderr) == bool(code)


def test_when_one_fails_the_others_are_asked_and_then_made_to_end(launch: Launch) -> None:
    script = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
if rank == 2:
    sys.exit(5)
signal.signal(signal.SIGTERM, signal.SIG_IGN if rank else lambda *_: sys.exit(77))
print(os.getpid())
time.sleep(600)
"""
    job = launch(script, "-n", "3", "script.py")
    pids = [int(line.split()[1]) for line in job.lines(2)]
    code, _, stderr = job.end()
    assert code == 5
    then = "After that, rank 0 ended with exit code 77; rank 1 had to be ended."
    assert stderr == [f"roundelay: rank 2 ended with exit code 5. {then}"]
    assert all(map(gone, pids))


def test_the_first_failing_ranks_traceback_comes_last_and_alone(launch: Launch) -> None:
    script = """
import numpy as np, roundelay as rd
comm = rd.init()
comm.barrier()
if comm.rank == 2:
    raise ValueError("no such layer")
comm.all_reduce(np.ones(4))
"""
    code, stdout, stderr = launch(script, "-n", "4", "script.py").end()
    assert (code, stdout) == (1, [])
    head = "roundelay: rank 2 raised ValueError. After that, ranks 0, 1, 3 raised PeerLost."
    assert stderr[0] == head
    assert stderr[1] == "Traceback (most recent call last):"
    assert stderr[-1] == "ValueError: no such layer"
    assert sum(line.startswith("Traceback") for line in stderr) == 1


def test_who_failed_first_is_told_though_another_ended_first(launch: Launch) -> None:
    script = """
import os, sys, time, roundelay as rd
show = sys.excepthook
sys.excepthook = lambda *told: (show(*told), time.sleep(1))  # it takes a while to end
comm = rd.init()
if comm.rank == 1:
    raise ValueError("the cause")
try:
    comm.barrier()
except rd.RoundelayError:
    os._exit(9)
"""
    code, _, stderr = launch(script, "-n", "2", "script.py").end()
    assert code == 1
    head = "roundelay: rank 1 raised ValueError. After that, rank 0 ended with exit code 9."
    assert (stderr[0], stderr[-1]) == (head, "ValueError: the cause")


def test_a_killed_rank_is_named_and_what_the_others_say_is_one_line(launch: Launch) -> None:
    script = """
import os, numpy as np, roundelay as rd
comm = rd.init()
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), 9)
comm.all_reduce(np.ones(4))
"""
    began = time.monotonic()
    code, _, stderr = launch(script, "-n", "3", "script.py").end()
    assert time.monotonic() - began < 20
    assert code == 137
    assert stderr == [
        "roundelay: rank 1 was killed by SIGKILL. After that, ranks 0, 2 raised PeerLost."
    ]


def test_tracebacks_that_a_rank_survives_are_output_like_any(launch: Launch) -> None:
    script = """
import traceback
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
"""
    code, _, stderr = launch(script, "-n", "1", "script.py").end()
    assert code == 0
    assert stderr[0] == "[0] Traceback (most recent call last):"
    assert stderr[-1] == "[0] ZeroDivisionError: division by zero"


SLEEPER = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if "stubborn" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
print(f"{os.getpid()} {child.pid}\\n", end="", flush=True)
time.sleep(600)
"""


def sleeping(launch: Launch, *arguments: str) -> tuple[Launched, list[int]]:
    job = launch(SLEEPER, "-n", "3", "script.py", *arguments)
    return job, [int(pid) for line in job.lines(3) for pid in line.split()[1:]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_all_ranks_and_what_they_started(
    launch: Launch, number: signal.Signals
) -> None:
    job, pids = sleeping(launch)
    assert len(set(pids)) == 6
    job.process.send_signal(number)
    code, _, stderr = job.end()
    assert (code, stderr) == (128 + number, [f"roundelay: ended by {number.name}."])
    assert all(map(gone, pids))


def test_the_second_signal_kills(launch: Launch) -> None:
    job, pids = sleeping(launch, "stubborn")
    began = time.monotonic()
    for _ in range(2):
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert job.end()[0] == 130
    assert time.monotonic() - began < 4  # sooner than a single one would
    assert all(map(gone, pids))


def test_ranks_end_with_a_launcher_that_is_killed(launch: Launch) -> None:
    job, pids = sleeping(launch)
    job.process.kill()
    job.process.communicate()
    wait_gone(pids[::2])  # the ranks; what they started is theirs to end
    for pid in pids[1::2]:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_what_a_rank_leaves_running_ends_with_the_job(launch: Launch) -> None:
    job = launch(SLEEPER.rsplit("time.sleep(600)", 1)[0], "-n", "2", "script.py")
    pids = [int(pid) for line in job.lines(2) for pid in line.split()[1:]]
    assert job.end()[0] == 0
    assert all(map(gone, pids))


def test_a_reader_that_leaves_early_ends_the_job(launch: Launch) -> None:
    job = launch("while True: print('line')", "-n", "2", "script.py")
    job.lines(1)
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert job.process.stderr is not None
    assert job.process.stderr.read() == ""
    job.process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.py"], "there is no file 'nope.py'"),
        (["nope"], "For a module: -m nope"),
        (["-np", "2", "python", "train.py"], "Leave out 'python'"),
        (["/no/bin/python3.12", "train.py"], "Leave out '/no/bin/python3.12'"),
        (["."], "'.' is a directory"),
        (["-m", "no_such_module_x"], "there is no module 'no_such_module_x'"),
        (["-m", ""], "there is no module ''"),
        ([], "Missing argument 'SCRIPT'"),
        (["-n", "0", "x.py"], "1 to 1024 ranks"),
        (["-n", "9999", "x.py"], "1 to 1024 ranks"),
        (["-n", "-1", "x.py"], "not a number of ranks"),
        (["-n", "two", "x.py"], "'two' is not a number of ranks; write 4, auto, cpu or gpu"),
        (["--timeout", "0", "x.py"], "--timeout is a positive number of seconds"),
        (["--timeout", "nan", "x.py"], "--timeout is a positive number of seconds"),
        (["--rank", "2", "x.py"], "No such option"),
    ],
)
def test_wrong_use_exits_with_2(
    run: Callable[..., Result], arguments: list[str], message: str
) -> None:
    result = run("run", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("localhost slots=1\n", 3, "-n 3 is more than the 1 ranks that --hostfile has room for"),
        ("localhost:1\n", 3, "as in localhost slots=3, or take -n 1"),
        ("# two\nn0 slots=2 max-slots=9\n\nn1 slots = 1 # 4\n", 4, "more than the 3 ranks"),
        (None, 2, "can't read it, No such file"),
        ("", 2, "no host is in it"),
        ("\n# n0\n", 2, "no host is in it"),
        (b"\xff\xfe", 2, "can't read it, it is no text"),
    ],
)
def test_a_hostfile_without_room_or_hosts_is_wrong_use(
    run: Callable[..., Result], tmp_path: Path, text: str | bytes | None, ranks: int, message: str
) -> None:
    script, hosts = tmp_path / "script.py", tmp_path / "hosts"
    script.touch()
    if text is not None:
        hosts.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = run("run", "-n", str(ranks), "--hostfile", str(hosts), str(script))
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("place", ["/proc/x", "/dev/full"])
def test_a_trace_that_can_not_be_written_is_wrong_use(
    run: Callable[..., Result], tmp_path: Path, place: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it ran')")
    result = run("run", "-n", "2", "--trace", place, str(script))
    assert result.exit_code == 2
    assert f"--trace {place}: ranks can't write there" in result.stderr
    assert "it ran" not in result.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_script_that_can_not_be_read_is_wrong_use(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.touch(mode=0)
    result = run("run", "-n", "1", str(script))
    assert result.exit_code == 2
    assert "can't be read" in result.stderr


def test_on_a_terminal_ranks_have_colours(terminal: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print('rank', os.environ['RANK'])")
    screen = terminal("run", "-n", "2", str(script))
    assert screen.exit_code() == 0
    assert "\x1b[36m[0]\x1b[0m rank 0" in screen.text
    assert "\x1b[33m[1]\x1b[0m rank 1" in screen.text


def test_ctrl_c_on_a_terminal_reaches_the_ranks_once(
    terminal: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import signal, sys, time
def handler(*_):
    print("interrupted")
    sys.exit(1)
signal.signal(signal.SIGINT, handler)
print("ready")
time.sleep(600)
""")
    screen = terminal("run", "-n", "2", str(script))
    screen.wait_for("[0]\x1b[0m ready")
    screen.wait_for("[1]\x1b[0m ready")
    screen.send("\x03")
    assert screen.exit_code() == 130
    assert screen.text.count("interrupted") == 2
