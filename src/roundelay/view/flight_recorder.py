"""A recorded run in the form of torch's flight recorder, for its analyzer.

`python -m torch.distributed.flight_recorder.fr_trace DIR` reads these files and says which ranks
made different calls, or did not come to one. It knows only its own libraries' names, so that calls
bear that of gloo; scan and exscan, which it does not know at all, are left out.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundelay.collectives import collectives
from roundelay.records import Event, RankRecord, RunRecord
from roundelay.view.captions import printable

__all__ = ["flight_recorder"]

PREFIX, VERSION = "nccl_trace_rank_", "2.10"
UNKNOWN = ("scan", "exscan")
#: Collectives whose largest buffer has a block for each rank: what comes in, what goes out.
BLOCKS = {
    "all_gather": (1, 0),
    "gather": (1, 0),
    "reduce_scatter": (0, 1),
    "scatter": (0, 1),
    "all_to_all": (0, 0),
}  # 0: as many as there are ranks

Json = dict[str, Any]


def flight_recorder(run: RunRecord, folder: Path) -> list[Path]:
    """Write a file for every rank into a folder; return them."""
    members = {group: run.members(group) for record in run.ranks for group in record.groups}
    first = _first_on_all(run)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for record in run.ranks:
        path = folder / f"{PREFIX}{record.rank}"
        path.write_bytes(pickle.dumps(_dump(record, run, members, first), protocol=2))
        paths.append(path)
    return paths


def _first_on_all(run: RunRecord) -> dict[int, int]:
    """Return for every group the first call that all of its ranks still have in their rings."""
    found: dict[int, int] = {}
    for record in run.ranks:
        mine: dict[int, int] = {}
        for event in record.events:
            if event.kind == "call":
                mine[event.group] = min(event.call, mine.get(event.group, event.call))
        for group, call in mine.items():
            found[group] = max(call, found.get(group, call))
    return found


def _dump(
    record: RankRecord, run: RunRecord, members: Mapping[int, list[int]], first: Mapping[int, int]
) -> Json:
    groups = {group: members[group] for group in record.groups}
    kept = [event for event in record.events if event.kind == "call" and event.group in groups
            and event.collective in collectives.names() and event.collective not in UNKNOWN
            and event.call >= first[event.group]]  # fmt: skip
    return {
        "version": VERSION,
        "pg_config": {
            str(group): {"name": str(group), "desc": _called(group), "ranks": str(ranks)}
            for group, ranks in groups.items()
        },
        "pg_status": {},
        "entries": [
            _entry(number, event, len(groups[event.group]), run.origin)
            for number, event in enumerate(kept)
        ],
    }


def _called(group: int) -> str:
    return "default_pg" if group == 0 else f"group {group}"


def _entry(number: int, event: Event, size: int, origin: int) -> Json:
    wide, narrow = size * event.elements, event.elements
    blocks_in, blocks_out = BLOCKS.get(event.collective, (1, 1))
    file, _, line = printable(event.site).rpartition(":")
    done = event.ended is not None and not event.failed
    return {
        "record_id": number,
        "pg_id": event.group,
        "process_group": (str(event.group), _called(event.group)),
        "collective_seq_id": event.call,
        "p2p_seq_id": 0,
        "op_id": event.call,
        "profiling_name": f"gloo:{event.collective}",
        "time_created_ns": origin + event.asked,
        "time_discovered_started_ns": origin + event.began,
        "time_discovered_completed_ns": origin + event.ended if event.ended is not None else None,
        "duration_ms": (event.ended - event.began) / 1e6 if event.ended is not None else None,
        "input_sizes": [[narrow if blocks_in else wide]],
        "input_dtypes": [event.dtype],
        "output_sizes": [[narrow if blocks_out else wide]],
        "output_dtypes": [event.dtype],
        "state": "completed" if done else "started",
        "retired": done,
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [{"name": event.title, "filename": file, "line": int(line)}]
        if line.isdigit()
        else [],
    }
