"""A script that was written for gloo runs on ours after one word of it is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

SCRIPT = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(10):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(32, 16, generator=generator)
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    if dist.get_rank() == 0:
        print("loss", loss.item().hex(), flush=True)
dist.monitored_barrier()
dist.destroy_process_group()
"""
#: What is needed beside the word only where torch may not look for names.
IMPORT = "import roundelay.torch\n"
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OURS = ["roundelay", "run", "-n", "2"]


def losses(script: Path, text: str, launcher: list[str]) -> list[str]:
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [line.split()[-1] for line in done.stdout.splitlines() if "loss" in line]


@pytest.fixture(autouse=True)
def entry() -> None:
    if "roundelay" not in [one.name for one in entry_points(group="torch.backends")]:
        pytest.skip("Roundelay was installed before pyproject.toml named its backend to torch")


def test_one_word_is_all_that_changes(tmp_path: Path) -> None:
    changed = SCRIPT.replace('"gloo"', '"roundelay"')
    assert len(changed) - len(SCRIPT) == len("roundelay") - len("gloo")
    script = tmp_path / "train.py"
    first, again = losses(script, changed, TORCHRUN), losses(script, changed, OURS)
    assert len(first) == 10
    assert first == again  # to the last bit, whatever started them
    gloo = losses(script, SCRIPT, TORCHRUN)
    numbers = [torch.tensor([float.fromhex(one) for one in run]) for run in (first, gloo)]
    torch.testing.assert_close(*numbers)


NAMED = """\
import sys
import torch

brought = sorted(name for name in sys.modules if name.startswith("roundelay"))
assert torch.distributed.is_backend_available("roundelay"), torch.distributed.Backend.backend_list
assert set(brought) <= {"roundelay", "roundelay.errors", "roundelay.torch_autoload"}, brought

def refuses(*given, **options):  # a name that it knows, as older torch does
    raise AssertionError("ROUNDELAY c10d backend already exist")

torch.distributed.Backend.register_backend = refuses
import roundelay.torch
for again in range(2):
    for name in ("monitored_barrier", "batch_isend_irecv"):
        function = getattr(torch.distributed, name)
        assert "roundelay" in function.__code__.co_filename, name
        assert function is getattr(torch.distributed.distributed_c10d, name)
        assert "roundelay" not in function.__wrapped__.__code__.co_filename  # once
    roundelay.torch.register()
for there in (None, object()):
    sys.modules["torch.distributed"] = there
    sys.modules["roundelay.torch_autoload"].name_backend()  # raises nothing, whatever torch is
"""


def test_the_name_is_known_to_torch_alone_and_brings_nothing_in() -> None:
    subprocess.run([sys.executable, "-c", NAMED], check=True, timeout=200)


ALONE = """\
import sys
import types

sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
known = []
class Backend:
    _plugins = {}
    register_backend = staticmethod(lambda *given, **options: known.append(given))
sys.modules["torch.distributed"].Backend = Backend
from roundelay.torch_autoload import name_backend
name_backend()
assert known and known[0][0] == "roundelay", known
brought = {name.partition(".")[0] for name in sys.modules} & {"numpy", "msgspec", "click", "rich"}
assert not brought, brought
assert "roundelay._core" not in sys.modules
"""


def test_the_name_alone_brings_neither_numpy_nor_the_core() -> None:
    """Torch brings numpy itself, so that is seen only without torch."""
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=200)


IMPORTED = (
    "import torch\nassert not torch.distributed.is_backend_available('roundelay')\n"
    + IMPORT
    + "assert torch.distributed.is_backend_available('roundelay')\n"
)


def test_where_torch_may_not_look_for_names_a_line_is_needed() -> None:
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", IMPORTED], check=True, timeout=200, env=environ)


FAILING = (
    IMPORT
    + """\
import torch
import torch.distributed as dist

dist.init_process_group("roundelay")
if dist.get_rank() == 1:
    raise ValueError("no such layer")
try:
    dist.all_reduce(torch.ones(3))
except Exception as error:
    print("told:", error)
    raise
"""
)


def test_a_rank_that_raises_tells_the_others_why(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    done = subprocess.run(
        [sys.executable, "-m", *OURS, str(script)],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1
    assert "told: Rank 1 failed: ValueError: no such layer" in done.stdout
    # The first to fail has the last word, and the only one.
    assert "rank 1 raised ValueError. After that, rank 0 raised PeerLost." in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("ValueError: no such layer")


LEAVING = (
    IMPORT
    + """\
import threading
import time
import torch
import torch.distributed as dist

dist.init_process_group("roundelay")
begun = threading.Event()

def then(future):
    begun.set()
    time.sleep(0.5)
    print("the callback saw", int(future.value()[0].sum()), flush=True)

dist.all_reduce(torch.ones(3), async_op=True).get_future().then(then)
begun.wait()
"""
)


def test_a_script_that_ends_with_a_callback_under_way_lets_it_run(tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    done = subprocess.run(
        [sys.executable, "-m", *OURS, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] the callback saw 6" for rank in range(2)]
