"""Data-parallel training with JAX: every rank its own batch, and the gradients of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from roundelay.communicator import Communicator
from roundelay.fronts.jax._group import array_of, group_of
from roundelay.fronts.jax.calls import all_reduce, broadcast

__all__ = ["average_gradients", "broadcast_parameters", "grad", "value_and_grad"]

#: Elements from which on an array travels by itself; smaller ones of a dtype go together.
ALONE = 1 << 18

Tree = Any  # whatever JAX takes for one


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    comm: Communicator,
) -> Callable[..., Any]:
    """Return a function like `jax.value_and_grad(fun)`: value and gradient are means of all ranks.

    `fun` is the mean loss of this rank's batch, and all batches have the same size; then the
    result is that of the whole batch on one device. What `fun` gives beside stays this rank's own.
    """
    here = jax.value_and_grad(fun, argnums, has_aux=has_aux)

    def of_all_ranks(*args: Any, **kwargs: Any) -> Any:
        found, gradients = here(*args, **kwargs)
        value, *beside = found if has_aux else (found,)
        mean, gradients = average_gradients((value, gradients), comm=comm)
        return ((mean, *beside) if has_aux else mean), gradients

    return of_all_ranks


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    comm: Communicator,
) -> Callable[..., Any]:
    """Return a function like `jax.grad(fun)`, whose gradient is the mean of all ranks."""
    both = value_and_grad(fun, argnums, has_aux=has_aux, comm=comm)

    def of_all_ranks(*args: Any, **kwargs: Any) -> Any:
        found, gradients = both(*args, **kwargs)
        return (gradients, found[1]) if has_aux else gradients

    return of_all_ranks


def average_gradients(tree: Tree, *, comm: Communicator) -> Tree:
    """Return the mean over all ranks of every array in a tree, in few calls."""
    return _fused("average_gradients", tree, comm, lambda x: all_reduce(x, "avg", comm=comm))


def broadcast_parameters(tree: Tree, root: int = 0, *, comm: Communicator) -> Tree:
    """Return the root's arrays on every rank: how ranks begin alike."""
    return _fused("broadcast_parameters", tree, comm, lambda x: broadcast(x, root, comm=comm))


def _fused(name: str, tree: Tree, comm: Communicator, call: Callable[[Any], Any]) -> Tree:
    """Call once for all small arrays of a dtype, and once for each large one."""
    leaves, form = jax.tree.flatten(tree)
    group = group_of(name, comm)
    leaves = [array_of(name, leaf, group) for leaf in leaves]
    small: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.size >= ALONE:
            leaves[number] = call(leaf)
        else:
            small.setdefault(leaf.dtype, []).append(number)
    for numbers in small.values():
        flat = call(jnp.concatenate([leaves[number].reshape(-1) for number in numbers]))
        at = 0
        for number in numbers:
            size, shape = leaves[number].size, leaves[number].shape
            leaves[number] = flat[at : at + size].reshape(shape)
            at += size
    return jax.tree.unflatten(form, leaves)
