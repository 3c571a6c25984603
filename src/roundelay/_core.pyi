from types import CodeType
from typing import Any

version: str

def instruction_sets() -> list[str]: ...
def compiler() -> str: ...

# Any: what speaks the buffer protocol, which has no type before Python 3.12.
def fold(op: str, dtype: str, dsts: list[Any], srcs: list[Any], divide_by: int = 0) -> None: ...
def supports(op: str, dtype: str) -> bool: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str) -> None: ...

# Below: ranks of one host, on Linux only.
ANY_TAG: int

class Broken(Exception): ...  # noqa: N818 - never seen by users
class OutOfMemory(MemoryError): ...  # noqa: N818

def set_package(folder: str) -> None: ...
def skip_package(folder: str) -> None: ...
def caller() -> tuple[CodeType, int, int] | None: ...
def work_for(place: tuple[CodeType, int, int] | None) -> None: ...
def available_cores() -> int: ...
def available_memory() -> int: ...
def set_kill_point(points: int, by: int = ...) -> None: ...

class World:
    size: int
    fd: int
    used: int
    foreign: bool
    token: bytes
    trouble: tuple[str, int, int, int, int, str] | None
    @staticmethod
    def create(size: int, arena: int = ..., slot_bytes: int = ...) -> World: ...
    @staticmethod
    def attach(fd: int, token: bytes) -> World: ...
    def enter(self, rank: int) -> None: ...
    def leave(self, rank: int) -> None: ...
    def watch(self, pipes: list[int], own: int) -> None: ...
    def fail(self, kind: str, culprit: int, text: str) -> None: ...
    def life(self, rank: int) -> int: ...
    def pid(self, rank: int) -> int: ...
    def heartbeat(self, rank: int) -> int: ...
    def next_serial(self) -> int: ...
    def allocate(self, nbytes: int) -> int: ...
    def release(self, offset: int, nbytes: int) -> None: ...
    def make_block(self, nbytes: int, ranks: int) -> int: ...

class View:
    count: int
    dtype: int
    bytes: int
    writable: bool
    contiguous: bool
    def __init__(self, buffer: Any) -> None: ...  # what speaks the buffer protocol

class Plan:
    def __init__(
        self,
        rank: int,
        size: int,
        posts: int,
        slots: int,
        blocks: int,
        parts: int,
        reaches_in: bool,
        reaches_out: bool,
        in_place: bool,
        posts_last: list[bool],
        name: int,
        lines: list[list[int]],
        operands: list[list[int]],
        in_blocks: list[list[int]],
        out_blocks: list[list[int]],
    ) -> None: ...

class Task:
    times: tuple[float, float]

class Block:
    at: int
    def __init__(self, world: World, at: int, nbytes: int) -> None: ...
    def bytes(self, start: int, count: int) -> Any: ...  # a numpy array of uint8

class Group:
    at: int
    calls: int
    def __init__(
        self,
        world: World,
        at: int,
        rank: int,
        world_ranks: list[int],
        slot_bytes: int = ...,
        *,
        on_slow: object,
        on_broken: object = None,
        parent: Group | None = None,
    ) -> None: ...
    @staticmethod
    def bytes_for(size: int, slot_bytes: int = ...) -> int: ...
    def set_timeout(self, seconds: float) -> None: ...
    def set_spin(self, seconds: float) -> None: ...
    def moved(self, rank: int) -> tuple[int, int]: ...  # bytes pulled from it, pushed to it
    # Any: the twelve arguments of a call, made in one place (communicator.py).
    def call(self, *arguments: Any) -> None: ...
    def start(self, *arguments: Any) -> Task: ...
    def done(self, task: Task) -> bool: ...
    def wait(self, task: Task) -> None: ...
    def teach(
        self,
        collective: int,
        root: int,
        reduces: bool,
        in_blocks: int,
        out_blocks: int,
        most_blocks: int,
        ladder: list[tuple[int, Plan, Plan | None, int]],
    ) -> None: ...
    def quick(self, collective: int, given: Any, result: Any, op: int, root: int) -> bool: ...
    def record(self, rank: int, call: int) -> tuple[int, int, int, int, int, int, int, str]: ...

class Letter:
    done: bool
    found: tuple[int, int, int, int]

class Mailbox:
    def __init__(self, world: World, rank: int) -> None: ...
    def post(
        self,
        sends: bool,
        other: int,
        group: int,
        tag: int,
        view: View,
        dtype: int,
        background: bool,
    ) -> Letter: ...
    def wait(self, letter: Letter, seconds: float, on_slow: object) -> None: ...
