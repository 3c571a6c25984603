"""What goes wrong in a compiled program is raised as ours, on the line that ran the program.

XLA knows no exceptions: a call that fails gives it a word by which we find the error again. So that
it comes from the program that failed, and not from whoever looks at its result later, a program
with collectives is waited for.
"""

# JAX tells little of its types to who writes primitives.
# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import re
from typing import Any

from jax._src import dispatch
from jax._src.interpreters import pxla
from jax.errors import JaxRuntimeError

from roundelay.fronts.jax._effect import EFFECT
from roundelay.fronts.jax._group import JaxGroup

__all__ = ["raise_ours"]

#: As native/jax_py.cpp and `JaxGroup.run` say it.
FAILED = re.compile(r"\[roundelay call (-?\d+) ([^\]]*)\]")


def raise_ours() -> None:
    """From now on, wait for programs with collectives and raise what went wrong in them."""
    plain = pxla.ExecuteReplicated.__call__
    if getattr(plain, "raises_ours", False):
        return

    def call(self: Any, *args: Any) -> Any:  # Any: whatever the program takes and gives
        if EFFECT not in self.ordered_effects:
            return plain(self, *args)
        try:
            results = plain(self, *args)
            dispatch.runtime_tokens.current_tokens[EFFECT].block_until_ready()
        except JaxRuntimeError as error:
            ours = _ours(error)
            if ours is None:
                raise
            raise ours.with_traceback(None) from None
        return results

    call.raises_ours = True  # type: ignore[attr-defined] # a mark of ours
    _begin_anew()
    pxla.ExecuteReplicated.__call__ = call  # type: ignore[method-assign]


def _begin_anew() -> None:
    """Let a program begin with one and the same token: what came before has been waited for.

    JAX would hand on the last program's, through a transfer that costs more than the call.
    """
    usual = dispatch.RuntimeTokenSet.get_token_input
    ready: dict[tuple[Any, ...], Any] = {}  # by devices

    def token(self: Any, eff: Any, devices: Any) -> Any:
        if eff is not EFFECT:
            return usual(self, eff, devices)
        key = tuple(devices)
        if key not in ready:
            self.current_tokens.pop(EFFECT, None)
            ready[key] = usual(self, eff, devices)
        return ready[key]

    dispatch.RuntimeTokenSet.get_token_input = token  # type: ignore[method-assign]


def _ours(error: BaseException) -> BaseException | None:
    """Return the error that XLA's one stands for, if it is one of ours."""
    found = FAILED.search(str(error))
    if found is None:
        return None
    dispatch.runtime_tokens.clear()  # else it would be raised again at exit
    group = JaxGroup.of_call.get(int(found[1]))
    return None if group is None else group.error(found[2])
