"""The measuring process: `python -m roundelay.bench SPEC`, alone or on every rank of mpirun.

SPEC is a `Spec` as JSON. Rank 0 writes one message a line, as JSON, to standard output.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec

from roundelay.bench.messages import Message, Spec, read_spec
from roundelay.bench.peer_deepspeed import DeepSpeedPeer
from roundelay.bench.peer_gloo import GlooPeer
from roundelay.bench.peer_mpi import MPIS, MpiPeer
from roundelay.bench.rank import Peer, be_rank
from roundelay.communicator import Communicator
from roundelay.communicator.selection import Selection
from roundelay.engines import engines
from roundelay.launch import run
from roundelay.rendezvous.one_host import Job
from roundelay.rendezvous.place import JobPlace

RENDEZVOUS_S = 60.0


def main() -> None:
    """Run as the spec says."""
    spec = read_spec(sys.argv[1])
    for peer in MPIS:
        if peer in spec.contenders:
            _under_mpirun(spec, peer)
            return
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-") as folder:
        file = Path(folder, "gloo")
        run(lambda comm: _measure(comm, spec, file, {}), spec.size, spec.engine)


def _under_mpirun(spec: Spec, peer: str) -> None:
    mpi = MpiPeer()
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    place = JobPlace(mpi.rank, Job(spec.job, spec.size, folder))
    kind = engines.load(spec.engine)
    comm = Communicator(kind.join(place, select=Selection, timeout=RENDEZVOUS_S))
    file = folder / f"roundelay-bench-{spec.job}"
    try:
        _measure(comm, spec, file, {peer: mpi})
    finally:
        comm.close()
        if mpi.rank == 0:
            file.unlink(missing_ok=True)


def _measure(comm: Communicator, spec: Spec, file: Path, peers: dict[str, Peer]) -> None:
    with ExitStack() as stack:
        if "gloo" in spec.contenders:
            gloo = GlooPeer(comm.rank, comm.size, file)
            stack.callback(gloo.close)
            peers["gloo"] = gloo
        if "deepspeed" in spec.contenders:
            peers["deepspeed"] = DeepSpeedPeer(comm, spec.job)
        be_rank(comm, spec, peers, _report)


def _report(message: Message) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # whoever started us says so
        sys.exit(130)
