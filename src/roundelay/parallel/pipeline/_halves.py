"""A backward pass in two halves: gradients of the inputs at once, those of the weights later.

The graph of a stage is cut beside the paths that lead from its outputs to its inputs. The first
half walks those paths and notes what comes to each node from which weights branch off; the second
goes from there into the branches. Together they do what one pass would, each gradient once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # torch.autograd.graph.Node
Tensors = Sequence[torch.Tensor]
Grads = Sequence[torch.Tensor | None]


def backward_inputs(
    outputs: Tensors, grads: Grads, inputs: Tensors
) -> tuple[list[torch.Tensor | None], Callable[[], None]]:
    """Return the gradients of the inputs, and what computes those of all else later.

    Where weights branch off in ways that can't be told apart, the latter is a whole pass.
    """

    def whole() -> None:
        torch.autograd.backward(list(outputs), list(grads))

    if not inputs:
        return [], whole  # nobody waits for a part of it
    branches = _Branches(outputs, inputs)
    with branches.noting():
        found = torch.autograd.grad(
            list(outputs), list(inputs), list(grads), retain_graph=True, allow_unused=True
        )
    if branches.shared:
        return list(found), whole

    def weights() -> None:
        edges, arrived = branches.arrivals()
        for output, grad in zip(outputs, grads, strict=True):
            edge = get_gradient_edge(output)
            if edge.node not in branches.on_path:  # it depends on weights alone
                edges.append(edge)
                arrived.append(torch.ones_like(output) if grad is None else grad)
        if edges:
            torch.autograd.backward(edges, arrived)

    return list(found), weights


class _Branches:
    """Where, on the way from outputs to inputs, other paths branch off."""

    def __init__(self, outputs: Tensors, inputs: Tensors) -> None:
        roots = [get_gradient_edge(output).node for output in outputs]
        leaves = {get_gradient_edge(leaf).node for leaf in inputs}
        self.on_path: set[Node] = _leading_to(leaves, roots)
        self._edges: dict[Node, list[tuple[Node, int]]] = {}
        self._came: dict[Node, tuple[Any, ...]] = {}
        parents: dict[Node, int] = {root: 1 for root in roots if root not in self.on_path}
        for node in self.on_path - leaves:
            off = [
                (child, number)
                for child, number in node.next_functions
                if child is not None and child not in self.on_path
            ]
            if off:
                self._edges[node] = list(dict.fromkeys(off))
                for child in {child for child, _ in off}:
                    parents[child] = parents.get(child, 0) + 1
        # A branch that several nodes lead into would be walked from one through the other, and
        # hooks on a weight would be called by both halves.
        self.shared = any(
            count > 1 or getattr(getattr(child, "variable", None), "_backward_hooks", None)
            for child, count in parents.items()
        )

    def noting(self) -> _Noting:
        """Return what notes, while it is entered, the gradients that come to branching nodes."""
        return _Noting(() if self.shared else tuple(self._edges), self._came)

    def arrivals(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return where branches begin, and the gradients that go into them."""
        edges: list[GradientEdge] = []
        arrived: list[torch.Tensor] = []
        for node, came in self._came.items():
            starts = [(GradientEdge(node, at), grad) for at, grad in enumerate(came)
                      if grad is not None]  # fmt: skip
            ends = [GradientEdge(child, number) for child, number in self._edges[node]]
            grads = torch.autograd.grad(
                [edge for edge, _ in starts], ends, [grad for _, grad in starts], allow_unused=True
            )
            for end, grad in zip(ends, grads, strict=True):
                if grad is not None:
                    edges.append(end)
                    arrived.append(grad)
        self._came.clear()
        return edges, arrived


class _Noting:
    def __init__(self, nodes: Sequence[Node], came: dict[Node, tuple[Any, ...]]) -> None:
        self._nodes, self._came = nodes, came
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        self._hooks = [node.register_prehook(self._note(node)) for node in self._nodes]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, node: Node) -> Callable[[tuple[Any, ...]], None]:
        def note(grads: tuple[Any, ...]) -> None:
            self._came[node] = grads

        return note


def _leading_to(leaves: set[Node], roots: Sequence[Node]) -> set[Node]:
    """Return the nodes, among all that can be reached from roots, which lead to leaves."""
    parents: dict[Node, list[Node]] = {}
    seen, left = set(roots), list(roots)
    while left:
        node = left.pop()
        for child in _children(node):
            parents.setdefault(child, []).append(node)
            if child not in seen:
                seen.add(child)
                left.append(child)
    leading = leaves & seen
    left = list(leading)
    while left:
        for parent in parents.get(left.pop(), ()):
            if parent not in leading:
                leading.add(parent)
                left.append(parent)
    return leading


def _children(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)
