"""`rd.context_parallel`: a model's own calls of attention go over all ranks, within a block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from roundelay.arguments import shown
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.context._mixing import Mixing, mixing
from roundelay.parallel.context._places import Places, problem
from roundelay.parallel.context._tokens import Tokens, mixed
from roundelay.parallel.context.attention import attention, refuse
from roundelay.parallel.context.plan import METHODS, check_layout
from roundelay.parallel.cut_tensor import local

__all__ = ["context_parallel"]

_OURS = torch.nn.functional.scaled_dot_product_attention
_MODULES_OWN = torch.nn.functional.multi_head_attention_forward
_SOFTMAX = (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax)
SQUARE = 3  # dims at least of scores by hand: [batch, tokens, tokens]


def context_parallel(
    comm: Communicator, *, method: str = "ring", layout: str = "contiguous"
) -> AbstractContextManager[None]:
    """Have every `scaled_dot_product_attention` in a `with` block go over the ranks of `comm`.

    The model gets this rank's tokens, by `rd.shard_sequence`, and their places, by
    `rd.sequence_positions`. Backward may be called behind the block. Masks, dropout, attention in
    `nn.MultiheadAttention` or by a softmax of a square are refused, what else is seen to mix
    tokens, and a block in which none was called. What `torch.utils.checkpoint` computes again needs
    a block of its own, by `context_fn`.
    """
    if not isinstance(comm, Communicator):
        raise InvalidArgumentError(
            f"context_parallel needs the ranks that share the sequence, mesh['cp'] say, not "
            f"{shown(comm)}."
        )
    if method not in METHODS:
        raise InvalidArgumentError(
            f"context_parallel has no method {shown(method)}. Known: {', '.join(METHODS)}."
        )
    return _block(_OverRanks(comm, method, check_layout(layout)))


@contextmanager
def _block(mode: _OverRanks) -> Iterator[None]:
    with mode:
        yield
    if not mode.calls:
        raise InvalidArgumentError(
            "Nothing in this block of context_parallel called scaled_dot_product_attention, so no "
            "rank has seen another's tokens. Have the model call that function (in transformers: "
            "attn_implementation='sdpa'), or rd.attention itself."
        )


class _OverRanks(TorchFunctionMode):
    """Sees what torch is called for in this thread."""

    def __init__(self, comm: Communicator, method: str, layout: str) -> None:
        super().__init__()
        self.comm, self.method, self.layout = comm, method, layout
        self.calls = 0
        #: How many tokens this rank has, once attention was called; and what was, by then.
        self._length: int | None = None
        self._before: dict[int, Mixing] = {}
        self._tokens = Tokens(comm.size)
        #: Of the first rank, places from 0 on are the right ones, where its tokens lie together.
        self._places = Places() if comm.rank or layout != "contiguous" else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what was called for; attention over all ranks."""
        del types
        if func is _OURS:
            self.calls += 1
            return self._tokens.given(self._attend(*args, **(kwargs or {})))
        if func is _MODULES_OWN or (func in _SOFTMAX and _is_square(*args, **(kwargs or {}))):
            name = "nn.MultiheadAttention" if func is _MODULES_OWN else "a softmax of a square"
            raise InvalidArgumentError(
                f"context_parallel sees scaled_dot_product_attention alone, and this model has "
                f"attention by {name}: it would go over this rank's tokens only. Call "
                f"torch.nn.functional.scaled_dot_product_attention there, or rd.attention."
            )
        if func is local:
            own = args[0].view_as(args[0])  # of which nobody knows that it has tokens
            return own if self._places is None else self._places.let(own)
        if self.comm.size == 1 or _ours(sys._getframe(1)):  # noqa: SLF001 - who calls
            return func(*args, **(kwargs or {}))
        found = mixing(func, args, kwargs or {})
        if found is not None:
            self._note(found)
        if self._places is None:
            return self._tokens.run(func, args, kwargs or {})
        leaves = tree_leaves((args, kwargs))
        wrong = self._wrong_places(leaves) if self._tokens.among(leaves) else ""
        if wrong:
            raise InvalidArgumentError(wrong)
        result = self._tokens.run(func, args, kwargs or {})
        self._places.follow(func, args, kwargs or {}, result)
        return result

    def _wrong_places(self, given: Sequence[Any]) -> str:
        """Say which places from 0 on went into tensors that meet attention or its tokens."""
        found = {} if self._places is None else self._places.of(given)
        length = self._length
        return problem(found[length], length) if length is not None and length in found else ""

    def _note(self, found: Mixing) -> None:
        """Refuse what mixes tokens; as long as nobody knows how many there are, note it."""
        if found.length and self._length is None:
            self._before.setdefault(found.length, found)
        elif found.length in (0, self._length):
            raise mixed(found.what)

    def _learn(self, length: int) -> None:
        """Hear how many tokens this rank has, and refuse what has mixed them before."""
        self._length = length
        found = self._before.get(length)
        if found is not None:
            self._note(found)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002 - torch's
    ) -> torch.Tensor:
        if not enable_gqa and query.size(-3) != key.size(-3):
            raise InvalidArgumentError(
                f"scaled_dot_product_attention has {query.size(-3)} heads of queries and "
                f"{key.size(-3)} of keys: that needs enable_gqa=True."
            )
        if query.dim() > 1:
            self._learn(query.size(-2))
            wrong = self._wrong_places((query, key, value))
            if wrong:
                refuse(self.comm, wrong)
        if not torch.is_grad_enabled():
            _refuse_checkpoint(sys._getframe())  # noqa: SLF001 - who calls
        return attention(
            query, key, value, comm=self.comm, method=self.method, layout=self.layout,
            causal=bool(is_causal), scale=scale, attn_mask=attn_mask, dropout_p=dropout_p,
        )  # fmt: skip


def _is_square(*args: Any, **kwargs: Any) -> bool:
    """Tell whether a softmax goes over scores of as many keys as queries."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, torch.Tensor) or x.dim() < SQUARE:
        return False
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return x.size(-1) == x.size(-2) and dim in (-1, x.dim() - 1)


def _ours(frame: FrameType | None) -> bool:
    """Tell whether a layer of this library calls, which knows where tokens are."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("roundelay.")


def _refuse_checkpoint(frame: FrameType | None) -> None:
    """Refuse to be called where backward will call again without asking us."""
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise InvalidArgumentError(
                "context_parallel can't be behind checkpoint(…, use_reentrant=True): what that "
                "computes again in backward would see this rank's tokens alone. Pass "
                "use_reentrant=False, context_fn=lambda: (nullcontext(), rd.context_parallel(…)), "
                "or use rd.attention in the model."
            )
        frame = frame.f_back
