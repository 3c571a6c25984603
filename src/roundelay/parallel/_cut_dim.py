"""Which dim of a result is cut between ranks, if one of what a function of torch is given is.

Dims count from the end. A function that is not known here leaves them unknown, which refuses
nothing by itself; one that goes along the dim that is cut gives another result than on the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["ENDS", "MIXED", "RESHAPES", "Call", "cut_dim_after", "name_of", "tells_nothing"]

MIXED = 0  # dims are negative
MATRICES = -3  # dims up to this one count matrices


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _words("""
    add sub mul div true_divide floor_divide remainder fmod neg abs exp exp2 expm1 log log1p log2
    sqrt rsqrt square pow reciprocal sign sin cos tan tanh sigmoid logsigmoid erf relu relu6 gelu
    silu mish elu selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid tanhshrink
    prelu threshold clamp clip clamp_min clamp_max round floor ceil trunc float double half bfloat16
    to type type_as cpu cuda clone detach contiguous where masked_fill nan_to_num lerp addcmul
    addcdiv dropout alpha_dropout eq ne lt le gt ge isnan isinf isfinite logical_not logical_and
    logical_or maximum minimum zeros_like ones_like empty_like full_like rand_like randn_like
    bernoulli data conj real imag int long bool rsub rdiv rpow rtruediv iadd isub imul itruediv idiv
    copy fill zero requires_grad batch_norm positive and or xor invert bitwise_not bitwise_and
    bitwise_or
""")
VIEWS = _words("""
    transpose permute movedim moveaxis swapaxes swapdims t T mT unsqueeze squeeze expand narrow
    select unbind chunk split tensor_split split_with_sizes getitem
""")
RESHAPES = _words("view reshape flatten unflatten view_as reshape_as ravel")
JOINS = _words("cat concat concatenate stack repeat_interleave")
#: What goes along dims and keeps all of them.
SAME_DIMS = _words("""
    softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip sort argsort roll
    index_select gather scatter scatter_add take_along_dim topk glu normalize gumbel_softmax
""")
#: What has one dim less for each that it goes along, or one of length 1 with `keepdim`.
REDUCES = _words("""
    sum mean prod amax amin max min argmax argmin std var std_mean var_mean logsumexp all any
    count_nonzero nansum nanmean median nanmedian mode norm linalg_norm linalg_vector_norm quantile
    kthvalue cosine_similarity
""")
#: Where those have their dims, if not in the second place, and which ones if nobody says.
PLACES = {"norm": 2, "linalg_norm": 2, "linalg_vector_norm": 2, "roll": 2, "quantile": 2, "topk": 2,
          "kthvalue": 2, "normalize": 2, "cosine_similarity": 2, "gumbel_softmax": 4}  # fmt: skip
UNSAID = {"glu": -1, "sort": -1, "argsort": -1, "topk": -1, "kthvalue": -1, "gumbel_softmax": -1,
          "normalize": 1, "cosine_similarity": 1}  # fmt: skip
#: What hands out numbers, or gradients.
ENDS = _words("""
    item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __format__ backward
    grad equal allclose
""")
#: What is about a tensor as it lies here, and gives none of its numbers.
ABOUT = _words("""
    size dim ndimension numel nelement stride storage_offset element_size get_device data_ptr
    register_hook register_post_accumulate_grad_hook retain_grad untyped_storage storage __repr__
    __len__ __hash__ __set__ _is_view
""")


class Call(NamedTuple):
    """A function of torch with what it is given, and which of that is cut where."""

    func: Any  # Any: torch's
    args: Sequence[Any]
    options: dict[str, Any]
    cut: Sequence[tuple[torch.Tensor, int]]

    @property
    def name(self) -> str:
        """What it is called, in place or not."""
        return name_of(self.func).strip("_")

    def given(self, name: str, position: int, otherwise: Any = None) -> Any:
        """Return an argument."""
        there = len(self.args) > position
        return self.options.get(name, self.args[position] if there else otherwise)


Rule = Callable[[Call, torch.Tensor, int], int | None]


def name_of(func: Any) -> str:
    """Return what a function of torch is called; a property by its own name.

    >>> name_of(torch.Tensor.T.__get__), name_of(torch.Tensor.add_)
    ('T', 'add_')
    """
    name: str = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
    return name


def tells_nothing(func: Any) -> bool:
    """Say whether a function gives no numbers of a tensor."""
    name = name_of(func)
    if func.__name__ == "__get__":
        return name not in ELEMENTWISE | VIEWS
    return name in ABOUT or name.startswith("is_")


def cut_dim_after(call: Call) -> int | None:
    """Return the dim of the result that is cut, None for one that can't be told, or `MIXED`."""
    name, (first, dim) = call.name, call.cut[0]
    if name.endswith("_loss") or "cross_entropy" in name or name == "kl_div":
        each = call.options.get("reduction") == "none" and name != "cross_entropy"
        return dim if each else MIXED
    if name in ("matmul", "bmm"):
        return _of_product(call)
    if any(other != dim for _, other in call.cut):
        return None
    for names, rule in RULES:
        if name in names:
            return rule(call, first, dim)
    return None


def _of_product(call: Call) -> int | None:
    """Return where a product of matrices is cut: by matrices, by rows, or by columns."""
    dims = {id(each): dim for each, dim in call.cut}
    left, right = (dims.get(id(each)) for each in call.args[:2])
    found = {each for each in (left, right) if each is not None}
    if len(found) == 1 and (max(found) <= MATRICES or (left, right) in ((-2, None), (None, -1))):
        return found.pop()
    return None


def _elementwise(_call: Call, _first: torch.Tensor, dim: int) -> int | None:
    return dim


def _attention(_call: Call, _first: torch.Tensor, dim: int) -> int | None:
    return dim if dim <= MATRICES else None


def _normed(call: Call, _first: torch.Tensor, dim: int) -> int | None:
    over = call.given("normalized_shape", 1, ())
    return MIXED if len(over) >= -dim else dim


def _reshaped(call: Call, first: torch.Tensor, dim: int) -> int | None:
    """Return where the dim has gone: with those after it in one, or as the first of several."""
    if isinstance(call.given("dtype", 1), torch.dtype):
        return dim
    others = [_like(one) if isinstance(one, torch.Tensor) else one for one in call.args[1:]]
    new = call.func(_like(first), *others, **call.options).shape
    before = first.shape[:dim].numel()
    places = [at for at in range(len(new)) if new[:at].numel() == before]
    # Behind a dim of length 1, features are as they were, or those of the one head of this rank.
    if not places:  # in one with dims before it: of heads, those of all rows
        heads = 0 < new[-1] < first.size(-1) and first.size(-1) % new[-1] == 0
        return None if heads else _some_of(dim)
    told = len(places) == 1 or first.size(dim) == 1
    return places[0] - len(new) if told else None


def _viewed(call: Call, first: torch.Tensor, dim: int) -> int | None:
    """Return where the dim is in a view: a tensor without memory tells it by its strides."""
    index = call.given("index", 1)
    parts = index if type(index) is tuple else (index,)
    if call.name == "getitem" and any(isinstance(each, torch.Tensor | list) for each in parts):
        return dim if dim == -1 and _leaves_last(parts, first.dim()) else _some_of(dim)
    strides = [7 ** (first.dim() - at) for at in range(first.dim())]
    made = call.func(
        torch.empty_strided(first.shape, strides, device="meta"), *call.args[1:], **call.options
    )
    found = set()
    for view in (made,) if isinstance(made, torch.Tensor) else made:
        lies = [at for at, stride in enumerate(view.stride()) if stride == strides[dim]]
        kept = len(lies) == 1 and view.size(lies[0]) == first.size(dim)
        found.add(lies[0] - view.dim() if kept else None)
    if len(found) == 1 and None not in found:
        return found.pop()
    return _some_of(dim)


def _some_of(dim: int) -> int | None:
    """Say what some of a dim are: of heads one may take some; of features these are others."""
    return MIXED if dim == -1 else None


def _leaves_last(parts: Sequence[Any], dims: int) -> bool:
    """Say whether what stands in brackets leaves the last dim as it is."""
    last = parts[-1]
    if last is Ellipsis or (isinstance(last, slice) and last == slice(None)):
        return True
    taken = 0
    for part in parts:
        if part is Ellipsis:
            return False
        masks = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
        taken += part.dim() if masks else int(part is not None)
    return taken < dims and last is not None


def _joined(call: Call, first: torch.Tensor, dim: int) -> int | None:
    """Return where the dim is once tensors are put together, or one is repeated."""
    repeats = call.name == "repeat_interleave"
    along = call.given("dim", 2) if repeats else call.given("dim", 1, call.options.get("axis", 0))
    if along is None:
        return MIXED
    at = along - first.dim() - (call.name == "stack") if along >= 0 else along
    if call.name == "stack":
        return dim - 1 if at >= dim else dim
    return dim if at != dim or (repeats and dim < -1) else _some_of(dim)


def _along(call: Call, first: torch.Tensor, dim: int) -> int | None:
    """Return where the dim is after a function that goes along others, or along this one."""
    place = PLACES.get(call.name, 1)
    dims = call.given("dim", place, call.options.get("axis", UNSAID.get(call.name)))
    if isinstance(dims, torch.Tensor):  # of two tensors, the larger ones
        return dim
    if isinstance(dims, int):
        dims = call.args[place:] if call.name == "flip" and call.args[place:] else [dims]
    if not isinstance(dims, Sequence) or not dims:
        return MIXED  # along all
    along: list[int] = [each - first.dim() if each >= 0 else each for each in dims]
    if dim in along:
        return MIXED
    if call.name in SAME_DIMS or call.given("keepdim", place + 1, False) is True:  # noqa: FBT003
        return dim
    return dim + sum(each > dim for each in along)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


RULES: tuple[tuple[frozenset[str], Rule], ...] = (
    (ELEMENTWISE, _elementwise),
    (VIEWS, _viewed),
    (RESHAPES, _reshaped),
    (JOINS, _joined),
    (SAME_DIMS | REDUCES, _along),
    (_words("layer_norm rms_norm"), _normed),
    (_words("scaled_dot_product_attention"), _attention),
)
