"""What programs that JAX compiles need so that they may call ranks: an order, and our errors.

XLA may reorder calls that do not depend on each other. Calls with one and the same ordered effect
it may not: JAX threads a token through all of them, and through every loop and branch that they
stand in. And XLA knows no exceptions: a call that fails gives it a word by which we find the error
again. So that it comes from the program that failed, and not from whoever looks at its result
later, a program with such calls is waited for.
"""

# JAX tells little of its types to who writes primitives.
# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jax._src import dispatch, effects
from jax._src.interpreters import pxla
from jax.errors import JaxRuntimeError
from jax.interpreters import mlir

from roundelay.errors import CommunicationError

__all__ = ["EFFECT", "ERROR_OF", "CollectiveEffect", "kept_for", "lower_to_python", "raise_ours"]

#: As native/jax_py.cpp and `kept_for` say it.
FAILED = re.compile(r"\[roundelay call (-?\d+) ([^\]]*)\]")
#: Gives the error that a call stands for, told how it failed; by the number of the call.
ERROR_OF: dict[int, Callable[[str], BaseException]] = {}


class CollectiveEffect(effects.Effect):
    """A call that other ranks make too, in the same order."""

    def __repr__(self) -> str:
        return "Collective"


EFFECT = CollectiveEffect()

for _allowed in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.shardable_ordered_effects,  # JAX would refuse several devices without a way out
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(CollectiveEffect)


def lower_to_python(ctx: Any, call: Any, *xs: Any, sharding: Any = None) -> Any:
    """Have the program call Python here, in the order of its calls."""
    results, token, _ = mlir.emit_python_callback(
        ctx, call, ctx.tokens_in.get(EFFECT), list(xs), ctx.avals_in, ctx.avals_out,
        has_side_effect=True, returns_token=True, sharding=sharding,
    )  # fmt: skip
    ctx.set_tokens_out(mlir.TokenSet({EFFECT: token}))
    return results


def kept_for(whose: object, work: Callable[[], Any]) -> Any:  # Any: whatever it gives
    """Do what a program calls Python for; keep what it raises for who ran the program."""
    try:
        return work()
    except BaseException as error:  # noqa: BLE001 - raised again by who ran the program
        failure, number = error, -id(whose)
        ERROR_OF[number] = lambda _: failure
        raise CommunicationError(f"[roundelay call {number} raised]") from None


def raise_ours() -> None:
    """From now on, wait for programs with such calls and raise what went wrong in them."""
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
    error_of = ERROR_OF.get(int(found[1]))
    return None if error_of is None else error_of(found[2])
