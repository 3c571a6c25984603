"""Modules whose parts only say that they are used, in the place of a model's while it is read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx, nn

IsOpen = Callable[[nn.Module, str], bool]
OWN = frozenset(vars(nn.Module()))  # what every module has
PLAIN = (bool, int, float, complex, str, bytes, type(None))
KEEPS = (list, dict, set)  # a forward may change these
SELF = "_stands_in"  # a stand-in's link to what it stands in for


class PlainValue(NamedTuple):
    """A value of a module that stages have been given for good, as it was read."""

    module: Callable[[], nn.Module | None]
    where: str
    name: str
    value: Any

    @property
    def changed(self) -> str:
        """What it is now, in words, if it is another."""
        module = self.module()
        now = self.value if module is None else vars(module).get(self.name)
        return "" if now is self.value or now == self.value else repr(now)


def rebind(old: torch.Tensor, name: str, new: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Stand for an assignment to a buffer in a graph; whoever runs it has the module."""
    del old
    return name, new


class StandIns:
    """Stand-ins for the modules of a model; a call of one that is not open is noted as such."""

    def __init__(self, model: nn.Module, reader: Any, is_open: IsOpen, *, training: bool) -> None:
        self.reader, self._is_open, self._training = reader, is_open, training
        self.plain: list[PlainValue] = []
        self._names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            self._names.setdefault(module, name)
        self._made: dict[nn.Module, nn.Module] = {}
        self._proxies: dict[int, fx.Proxy] = {}  # of parameters, which are read again and again
        self._kept: dict[int, tuple[Any, Any, str]] = {}  # containers, and what was in them

    def of(self, module: nn.Module) -> nn.Module:
        """Return what stands in for a module."""
        if module not in self._made:
            self._made[module] = self._make(module, self._names[module])
        return self._made[module]

    def _make(self, module: nn.Module, name: str) -> nn.Module:
        closed = bool(name) and not self._is_open(module, name)
        made: nn.Module = object.__new__(_class_for(type(module), closed=closed))
        here = vars(made)
        here.update(vars(module))
        here[SELF] = self, module, name
        children = module._modules.items()  # noqa: SLF001 - torch has no other name
        here["_modules"] = {part: child and self.of(child) for part, child in children}
        for kind in ("_parameters", "_buffers"):
            here[kind] = _Read(vars(module).get(kind, {}), self, name)
        if not closed:
            here["training"] = self._training
        return made

    def used(self, name: str, tensor: torch.Tensor) -> fx.Proxy:
        """Note that a tensor of the model is used."""
        if not isinstance(tensor, nn.Parameter):
            return self.reader.create_proxy("get_attr", name, (), {})  # type: ignore[no-any-return]
        if id(tensor) not in self._proxies:
            self._proxies[id(tensor)] = self.reader.create_proxy("get_attr", name, (), {})
        return self._proxies[id(tensor)]

    def note(self, module: nn.Module, where: str, name: str, value: Any) -> None:
        """Note that a value is read, which may be another one later."""
        if isinstance(value, KEEPS):
            self._kept.setdefault(id(value), (value, value.copy(), f"{where}.{name}"))
        elif isinstance(value, PLAIN):
            self.plain.append(
                PlainValue(weakref.ref(module), where or type(module).__name__, name, value)
            )

    def sets(self, made: nn.Module, name: str, value: Any) -> None:
        """Note that a buffer is set; refuse what else a forward sets, as stages would not."""
        _, _, where = vars(made)[SELF]
        buffers, inside = vars(made)["_buffers"], f"{where}.{name}" if where else name
        kept = dict.get(buffers, name)
        if kept is not None and isinstance(value, torch.Tensor | fx.Proxy):
            if isinstance(value, torch.Tensor):  # one for all passes, and each has its own
                value = self.reader.create_proxy("call_function", torch.clone, (value,), {})
            old = self.used(inside, kept)
            self.reader.create_proxy("call_function", rebind, (old, inside, value), {})
            buffers.now[name] = value
            return
        self.reader.refuse(
            f"It sets {inside}, and stages would not. Set buffers only, or do it in a module that "
            f"is called as it is, and in which no stage starts."
        )

    def done(self) -> None:
        """Give back what was kept in containers; refuse a forward that has changed one."""
        for value, before, where in self._kept.values():
            same = len(value) == len(before) and all(
                one is other for one, other in zip(_items(value), _items(before), strict=True)
            )
            if not same:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(before)
                self.reader.refused.append(
                    f"It changes what is in {where.removeprefix('.')}, and stages would not. Do it "
                    f"in a module that is called as it is, and in which no stage starts."
                )


def _items(value: Any) -> Iterator[Any]:
    yield from value
    if isinstance(value, dict):
        yield from value.values()


class _Read(dict[str, Any]):
    """Parameters or buffers of a module: a use of one is noted when it is read."""

    def __init__(self, kept: dict[str, Any], stand_ins: StandIns, where: str) -> None:
        super().__init__(kept)
        self._stand_ins, self._prefix = stand_ins, f"{where}." if where else ""
        self.now: dict[str, Any] = {}  # what the forward has set

    def __getitem__(self, part: str) -> Any:
        value = super().__getitem__(part)
        if value is None or part in self.now:
            return self.now.get(part)
        return self._stand_ins.used(self._prefix + part, value)

    def get(self, part: str, other: Any = None) -> Any:
        return self[part] if part in self else other  # noqa: SIM401 - this is get

    def values(self) -> Any:
        return [self[part] for part in self]

    def items(self) -> Any:
        return [(part, self[part]) for part in self]


def _class_for(kind: type[nn.Module], *, closed: bool) -> type[nn.Module]:
    """Return the class of stand-ins for modules of one class."""
    base: Any = nn.Module if issubclass(kind, torch.jit.ScriptModule) else kind

    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807 - python's name
        value = base.__getattribute__(self, name)
        if name not in OWN and name in object.__getattribute__(self, "__dict__") and name != SELF:
            stand_ins, module, where = vars(self)[SELF]
            stand_ins.note(module, where, name, value)
        return value

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807 - likewise
        vars(self)[SELF][0].sets(self, name, value)

    def called(self: Any, *args: Any, **options: Any) -> Any:
        stand_ins, _, name = vars(self)[SELF]
        return stand_ins.reader.create_proxy("call_module", name, args, options)

    methods = {"__getattribute__": __getattribute__, "__setattr__": __setattr__}
    if closed:
        methods |= {"__call__": called, "forward": called}
    return type(kind.__name__, (base,), {**methods, "__module__": kind.__module__})
