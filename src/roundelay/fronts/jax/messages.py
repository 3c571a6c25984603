"""Messages between two ranks, for JAX arrays: a program calls Python for them, in its order."""

# JAX tells little of its types to who writes primitives.
# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from roundelay.arguments import shown
from roundelay.communicator import ANY, Communicator
from roundelay.communicator.point_to_point import Wanted
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.jax._group import (
    JaxGroup,
    SourceLine,
    array_of,
    check_dtype,
    group_of,
    place_here,
)
from roundelay.fronts.jax._primitives import register_primitive
from roundelay.fronts.jax_programs import EFFECT, lower_to_python

__all__ = ["recv", "send", "sendrecv"]


def send(x: Any, dst: int, tag: int = 0, *, comm: Communicator) -> None:
    """Send `x` to a rank, which receives it by `rd.jax.recv` or `rd.jax.sendrecv`.

    It is not differentiated; what `rd.jax.recv` returns is a constant to JAX.
    """
    group = group_of("send", comm)
    x = array_of("send", x, group)
    MESSAGES["send"].bind(x, **_params(group, dst, None, tag, tag, None))


def recv(like: Any, src: Wanted, tag: Wanted = 0, *, comm: Communicator) -> jax.Array:
    """Return what a rank sends, of the shape and dtype of `like`."""
    group = group_of("recv", comm)
    form = _form("recv", like, group)
    (result,) = MESSAGES["recv"].bind(**_params(group, None, src, tag, tag, form))
    return result


def sendrecv(
    x: Any,
    dst: int,
    src: Wanted,
    tag: int = 0,
    *,
    like: Any = None,
    recv_tag: Wanted | None = None,
    comm: Communicator,
) -> jax.Array:
    """Send `x` to one rank and return what another sends, which is like `x` unless told.

    It is differentiated: a cotangent goes back from `dst` to `src`.
    """
    group = group_of("sendrecv", comm)
    x = array_of("sendrecv", x, group)
    form = _form("sendrecv", x if like is None else like, group)
    expected = tag if recv_tag is None else recv_tag
    (result,) = MESSAGES["sendrecv"].bind(x, **_params(group, dst, src, tag, expected, form))
    return result


def _params(
    group: JaxGroup, dst: int | None, src: Any, tag: Any, recv_tag: Any, form: Any
) -> dict[str, Any]:
    said = {"dst": dst, "src": src, "tag": tag, "recv_tag": recv_tag}
    for name, value in said.items():
        if isinstance(value, jax.core.Tracer) or not isinstance(value, Hashable):
            raise InvalidArgumentError(
                f"rd.jax: {name} of a message is a whole number that is known when the program is "
                f"compiled, not {shown(value)}. Make it an argument of static_argnums, or choose "
                f"between messages by jax.lax.switch."
            )
    return {"group": group, **said, "form": form, "place": place_here()}


def _form(call: str, like: Any, group: JaxGroup) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if not isinstance(like, jax.ShapeDtypeStruct):
        like = jax.typeof(like) if hasattr(like, "dtype") else array_of(call, like, group)
    check_dtype(call, like.dtype, group)
    return tuple(like.shape), np.dtype(like.dtype)


def _abstract(*_: Any, form: Any, **__: object) -> Any:
    return [] if form is None else [jax.core.ShapedArray(*form)], {EFFECT}


def _lower(
    name: str, ctx: Any, *xs: Any, group: JaxGroup, dst: Any, src: Any, tag: Any, recv_tag: Any,
    form: Any, place: SourceLine | None,
) -> Any:  # fmt: skip
    def call(*arrays: Any) -> tuple[Any, ...]:
        given = [np.ascontiguousarray(array) for array in arrays]
        into: Any = None if form is None else np.empty(*form)

        def move(comm: Communicator) -> Any:
            if name == "send":
                return comm.send(given[0], dst, tag)
            if name == "recv":
                return comm.recv(into, src, recv_tag)
            return comm.sendrecv(given[0], dst, into, src, tag=tag, recv_tag=recv_tag)

        group.run(place, move)
        return () if into is None else (into,)

    return lower_to_python(ctx, call, *xs)


def _batch(name: str, xs: Any, axes: Any, **params: Any) -> Any:
    """Send all of a batch in one message."""
    (x,), (axis,) = xs, axes
    x = jnp.moveaxis(x, axis, 0)
    if params["form"] is not None:
        shape, dtype = params["form"]
        params["form"] = ((x.shape[0], *shape), dtype)
    results = MESSAGES[name].bind(x, **params)
    return results, [0] * len(results)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    made = MESSAGES["sendrecv"]
    tangent = ad.instantiate_zeros(tangents[0])
    return made.bind(*primals, **params), made.bind(tangent, **params)


def _refuse_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """Refuse to differentiate what is sent: its cotangent could only come from who received it."""
    if all(isinstance(tangent, ad.Zero) for tangent in tangents):
        return MESSAGES["send"].bind(*primals, **params), []
    raise InvalidArgumentError(
        f"rd.jax.send at {params['place']} can't be differentiated: its cotangent would have to "
        f"come back from rank {params['dst']}. Use rd.jax.sendrecv, which is; or send "
        f"jax.lax.stop_gradient(x)."
    )


def _transpose(cotangents: Any, x: Any, **params: Any) -> Any:
    dst, src, tag, recv_tag = (params[name] for name in ("dst", "src", "tag", "recv_tag"))
    if src is ANY:
        raise InvalidArgumentError(
            "rd.jax.sendrecv from any rank can't be differentiated: it is not known where a "
            "cotangent goes. Name the rank."
        )
    if recv_tag is not ANY:
        tag, recv_tag = recv_tag, tag
    back = {**params, "dst": src, "src": dst, "tag": tag, "recv_tag": recv_tag,
            "form": (x.aval.shape, x.aval.dtype)}  # fmt: skip
    return MESSAGES["sendrecv"].bind(ad.instantiate_zeros(cotangents[0]), **back)


MESSAGES = {
    name: register_primitive(name, partial(_lower, name), _abstract)
    for name in ("send", "recv", "sendrecv")
}
for _name, _made in MESSAGES.items():
    _made.multiple_results = True
    batching.primitive_batchers[_made] = partial(_batch, _name)
ad.primitive_jvps[MESSAGES["send"]] = _refuse_jvp
ad.primitive_jvps[MESSAGES["sendrecv"]] = _jvp
ad.primitive_transposes[MESSAGES["sendrecv"]] = _transpose
