"""Where a program of the zoo runs under torch's own data parallelism: each in the way of its pages.

A setting of a peer is a class; where a peer has several, they are tried in this order.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from roundelay.training.strategies.zero.units import find_units
from zoo.place import Place, State

__all__ = ["PEERS", "PeerPlace", "whole"]

CONTAINERS = nn.ModuleList | nn.ModuleDict  # which have no forward: each child is wrapped


def whole(found: State) -> State:
    """Return what a program does, as plain tensors, by the names that one device has for them."""
    return {
        name.replace("module.", ""): one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in found.items()
    }


class PeerPlace(Place):
    """What all peers have in common: gradients are means over ranks, and torch's own clipping."""

    refusals = (RuntimeError, ValueError)
    lacks: ClassVar[dict[str, str]] = {}  # habits that can't be written for this peer, and why

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(size, SimpleNamespace(rank=rank, size=size))
        self.scalars: set[str] = set()  # parameters that have become vectors
        self.local: set[str] = set()  # what only rank 0 is asked for: buffers, as it saves them

    def backward(self, of: Any, rows: Any, total: int | None = None) -> None:
        rank, share = next(self.shares(rows))
        loss = of(rank, share if len(share) else rows[:1]) * len(share)
        (loss * self.size / (total or len(rows))).backward()

    def loader(self, data: Any, batch_size: int) -> Any:
        rows = torch.utils.data.TensorDataset(data)
        mine: Any = DistributedSampler(rows, self.size, self.comm.rank, shuffle=False)
        return DataLoader(rows, batch_size // self.size, sampler=mine)

    def whole(self, model: Any) -> AbstractContextManager[Any]:  # noqa: ARG002 - nothing is away
        return nullcontext()

    def clip(self, optimizer: Any, limit: float) -> Any:
        groups = [one for group in optimizer.param_groups for one in group["params"]]
        return nn.utils.clip_grad_norm_(groups, limit)

    def clip_value(self, optimizer: Any, limit: float) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_value_(group["params"], limit)

    def state(self, model: Any) -> State:
        if self.comm.rank:
            self.local.update(name.replace("module.", "") for name, _ in model.named_buffers())
        return {
            name: one.detach().clone().reshape([] if name in self.scalars else one.shape)
            for name, one in whole(model.state_dict()).items()
        }


class Wrapped(DistributedDataParallel):
    """DDP that is asked for what its module has; programs are spared writing `.module`."""

    def __init__(self, module: Any, **options: bool) -> None:
        super().__init__(module, **options)
        self.__dict__["made"] = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.module, memo)

    def __setattr__(self, name: str, value: Any) -> None:
        if "made" in self.__dict__ and name not in self.__dict__:
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)


class Ddp(PeerPlace):
    options: ClassVar[dict[str, bool]] = {}
    lacks: ClassVar[dict[str, str]] = {
        "checkpoint_sequential": "its layers are called one by one, not by DDP's forward",
    }

    def prepare(self, model: Any, optimizer: Any, **_: Any) -> tuple[Any, Any]:
        if not isinstance(model, CONTAINERS):
            return Wrapped(model, **self.options), self.divided(optimizer)
        for name, child in list(model.named_children()):
            setattr(model, name, Wrapped(child, **self.options))
        return model, self.divided(optimizer)

    def divided(self, optimizer: Any) -> Any:
        return optimizer

    def unprepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        optimizer.zero_grad()
        return model.module, optimizer

    @contextmanager
    def adding(self, model: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for one in model.modules():
                if isinstance(one, DistributedDataParallel):
                    stack.enter_context(one.no_sync())
            yield


class DdpUnused(Ddp):
    options: ClassVar[dict[str, bool]] = {"find_unused_parameters": True}


class DdpStatic(Ddp):
    options: ClassVar[dict[str, bool]] = {"static_graph": True}


class Consolidated(ZeroRedundancyOptimizer):
    """Brings the state together wherever it is asked for, as its pages say to do before."""

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for rank in range(self.world_size):
            self.consolidate_state_dict(to=rank)
            if rank == self.rank:
                found = super().state_dict()
        return found


class ZeroOptimizer(Ddp):
    def divided(self, optimizer: Any) -> Any:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            return optimizer
        kind = type(optimizer)
        taken = inspect.signature(kind.__init__).parameters
        every = "kwargs" in taken or "args" in taken
        options = {name: value for name, value in optimizer.defaults.items()
                   if every or name in taken}  # fmt: skip
        groups = [{name: value for name, value in group.items() if name != "params"}
                  | {"params": group["params"]} for group in optimizer.param_groups]  # fmt: skip
        return Consolidated(groups, kind, **options)


class ZeroOptimizerUnused(ZeroOptimizer, DdpUnused):
    pass


class ZeroOptimizerStatic(ZeroOptimizer, DdpStatic):
    pass


def widened(model: Any, optimizer: Any) -> set[str]:
    """Make scalar parameters vectors of one element, as FSDP2 says to do; return their names."""
    scalars = {name: one for name, one in model.named_parameters() if one.dim() == 0}
    for name, one in scalars.items():
        owner, _, last = name.rpartition(".")
        wide = nn.Parameter(one.detach().reshape(1))
        setattr(model.get_submodule(owner), last, wide)
        for group in optimizer.param_groups:
            group["params"] = [wide if each is one else each for each in group["params"]]
    return set(scalars)


class Fsdp(PeerPlace):
    reshard: bool = True
    lacks: ClassVar[dict[str, str]] = {
        "freezing a layer between rd.unprepare and rd.prepare": "nothing undoes fully_shard",
        "unprepared, and prepared with another optimizer": "nothing undoes fully_shard",
        "gradients cleared by the model of a second optimizer": "both are built after fully_shard",
    }

    def prepare(self, model: Any, optimizer: Any, **_: Any) -> tuple[Any, Any]:
        """Shard blocks, then the model; give the optimizer the parameters that came of it."""
        self.scalars |= widened(model, optimizer)
        before = {id(one): name for name, one in model.named_parameters()}
        modules = [unit.module for unit in find_units(model, None)[1:]]
        modules += model.children() if isinstance(model, CONTAINERS) else [model]
        for one in dict.fromkeys(modules):
            fully_shard(one, reshard_after_forward=self.reshard)
            for name, method in vars(type(one).__mro__[1]).items():
                if callable(method) and not name.startswith("_") and name != "forward":
                    register_fsdp_forward_method(one, name)
        after = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [after[before[id(one)]] for one in group["params"]]
        return model, optimizer

    @contextmanager
    def adding(self, model: Any) -> Iterator[None]:
        roots = [one for one in (model, *model.children()) if isinstance(one, FSDPModule)]
        for one in roots[:1] if roots[0] is model else roots:
            one.set_requires_gradient_sync(False)
        yield
        for one in roots:
            one.set_requires_gradient_sync(True)

    def take_state(self, model: Any, optimizer: Any, other: Any, its: Any) -> None:
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(other, its)
        set_optimizer_state_dict(model, optimizer, state, options=options)


class FsdpKept(Fsdp):
    reshard = False


#: The rows of the table: each peer by its name, in its settings, and the strategy beside it.
PEERS: dict[str, tuple[list[type[PeerPlace]], str]] = {
    "DDP": ([Ddp, DdpUnused, DdpStatic], "ddp"),
    "ZeroRedundancyOptimizer": (
        [ZeroOptimizer, ZeroOptimizerUnused, ZeroOptimizerStatic], "zero1"),
    "FSDP2": ([Fsdp], "zero3"),
    "FSDP2, reshard_after_forward=False": ([FsdpKept], "zero2"),
}  # fmt: skip
