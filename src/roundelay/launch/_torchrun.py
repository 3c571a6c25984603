"""`python -m roundelay.launch._torchrun`: torchrun, with one line where hosts find no others."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from roundelay.errors import RendezvousError
from roundelay.launch.ending import SIGNALLED
from roundelay.launch.environment import StoreAt
from roundelay.launch.store import store_at
from roundelay.rendezvous.store import first_line

QUIET = "TORCH_CPP_LOG_LEVEL"
ADVICE = (
    "See whether it was started on every host, with the same --master-addr and --master-port or "
    "--rdzv-endpoint, whether that port is free on the first host, and whether the others can "
    "reach it."
)
TORCHRUNS_S = 600.0  # that hosts wait for one another where nothing was said


def main(words: list[str]) -> int:
    """Run torchrun with these words, and return the exit code."""
    # Each failed attempt to connect would be a page. Torch reads this once, and ranks never do.
    ours = QUIET not in os.environ
    os.environ.setdefault(QUIET, "FATAL")
    distributed = importlib.import_module("torch.distributed")
    if ours:
        del os.environ[QUIET]
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous")
    workers = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    try:
        _find_the_first_host(distributed, words)
        importlib.import_module("torch.distributed.run").main(words)
    except RendezvousError as error:
        sys.stderr.write(f"roundelay: {error}\n")
        return 1
    except workers.SignalException as error:  # which the ranks have got too, and time to end
        sys.stderr.write(f"roundelay: ended by {signal.Signals(error.sigval).name}.\n")
        return SIGNALLED + int(error.sigval)
    except (distributed.DistError, rendezvous.RendezvousError) as error:
        sys.stderr.write(f"roundelay: the hosts did not come together: {first_line(error)}. ")
        sys.stderr.write(ADVICE + "\n")
        return 1
    return 0


def _find_the_first_host(distributed: Any, words: list[str]) -> None:
    """Raise why the first host can't be found, where this is another one that was told its place.

    Torchrun itself would wait for ever for an answer of what is no store.
    """
    options, rest = {"--node-rank": "0", "--master-port": "29500", "--rdzv-conf": ""}, list(words)
    while rest and rest[0].startswith("--"):  # each with its value, and then the script
        name, value, *rest = rest
        options[name] = value
    host, backend = options.get("--master-addr"), options.get("--rdzv-backend", "static")
    if options["--node-rank"] == "0" or host is None or backend != "static":
        return
    conf = dict(word.strip().partition("=")[::2] for word in options["--rdzv-conf"].split(","))
    at = StoreAt(host, int(options["--master-port"]), False, "", "torchrun")  # noqa: FBT003
    store_at(distributed, at, "this host", 1, b"", float(conf.get("timeout", TORCHRUNS_S)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
