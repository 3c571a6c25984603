"""Ranks for the tests: torch is imported once here, and every rank is a fork.

Started as a script with the address of the tests; each line of input asks for so many ranks. A
rank connects back and runs the functions it is sent, which are named by file and name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import signal
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel

import roundelay.torch  # noqa: F401 - registers the backend

KEY = b"roundelay-tests"


def load(file: str, known: dict[str, ModuleType]) -> ModuleType:
    if file not in known:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        known[file] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = known[file]
        spec.loader.exec_module(known[file])
    return known[file]


def answer(task: tuple[str, str, tuple[Any, ...]], known: dict[str, ModuleType]) -> tuple[str, Any]:
    file, name, arguments = task
    try:
        with contextlib.redirect_stderr(sys.stdout):
            return "value", getattr(load(file, known), name)(*arguments)
    except Exception as error:  # noqa: BLE001 - how it ended is what the test asks
        notes = "\n".join(getattr(error, "__notes__", ()))
        return "error", (type(error).__name__, f"{error}\n{notes}".strip(), traceback.format_exc())


def serve(line: Connection) -> None:
    known: dict[str, ModuleType] = {}
    while True:
        try:
            task = line.recv()
        except EOFError:
            return
        line.send(answer(task, known))


def be_rank(address: str, number: int, rank: int, size: int, store: str, timeout: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1)  # says where a rank hangs
    torch.set_num_threads(1)
    with Client(address, authkey=KEY) as line:
        line.send((number, rank, os.getpid()))
        warnings.simplefilter("ignore")
        dist.init_process_group(
            "roundelay",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        serve(line)
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    address = sys.argv[1]
    for request in sys.stdin:
        number, size, timeout = request.split()
        with tempfile.NamedTemporaryFile(delete=False) as file:
            store = file.name
        for rank in range(int(size)):
            if os.fork() == 0:
                os.close(0)
                be_rank(address, int(number), rank, int(size), store, float(timeout))


if __name__ == "__main__":
    main()
