"""Which dim of a result is cut between ranks, if one of what a function of torch is given is.

Functions that are not known here, and those that go along the dim that is cut, give another result
for a part than for the whole, for all that anybody knows: they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundelay.parallel._cut import Call, CutDim, Rule, name_of
from roundelay.parallel._cut_product import ATTENTION, PRODUCTS, attended, multiplied
from roundelay.parallel._cut_reshape import reshaped
from roundelay.parallel._cut_views import elements_set, moved, viewed

__all__ = [
    "ELEMENTWISE",
    "ENDS",
    "RESHAPES",
    "VIEWS",
    "cut_after",
    "gives_none",
    "tells_nothing",
    "words",
]


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


ELEMENTWISE = words("""
    abs absolute acos acosh add addcdiv addcmul alpha_dropout and angle arccos arccosh arcsin
    arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh bernoulli bessel_j0 bessel_j1
    bfloat16 bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
    bool byte cauchy cdouble ceil celu cfloat char clamp clamp_max clamp_min clip clone complex conj
    conj_physical contiguous copy copysign cos cosh cpu cuda data deg2rad detach digamma div divide
    double dropout elu empty_like entr eq erf erfc erfcx erfinv exp exp2 expit expm1 exponential
    feature_alpha_dropout fill fix float float_power floor floor_divide floordiv fmax fmin fmod frac
    full_like gammaln ge gelu geometric greater greater_equal gt half hardshrink hardsigmoid
    hardswish hardtanh heaviside hypot i0 i0e i1 i1e iadd iand idiv ifloordiv imag imul int invert
    ior ipow isclose isfinite isinf isnan isneginf isposinf isreal isub itruediv ixor ldexp le
    leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_ndtr log_normal log_sigmoid
    logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid long lshift
    lt masked_fill maximum minimum mish mod mul multigammaln multiply mvlgamma nan_to_num ndtr ndtri
    ne neg negative nextafter normal not_equal ones_like or polygamma positive pow psi rad2deg
    rand_like randint_like randn_like random rdiv real reciprocal relu relu6 remainder requires_grad
    resolve_conj resolve_neg rfloordiv rmod rmul round rpow rrelu rshift rsqrt rsub rtruediv selu
    sgn short sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub
    subtract tan tanh tanhshrink threshold to true_divide truediv trunc type type_as uniform where
    xlog1py xlogy xor radd rand ror rxor zero zeros_like zeta
""")
#: Losses that are elementwise where nothing is reduced.
LOSSES = words("""
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div soft_margin_loss
    binary_cross_entropy_with_logits poisson_nll_loss
""")
VIEWS = words("""
    transpose permute movedim moveaxis swapaxes swapdims t T mT H mH adjoint unsqueeze squeeze
    expand expand_as broadcast_to narrow select unbind chunk split tensor_split split_with_sizes
    getitem unsafe_chunk unsafe_split
""")
RESHAPES = words("view reshape flatten unflatten view_as reshape_as ravel")
#: What moves elements, and keeps all of a dim or not.
MOVES = words("""
    flip fliplr flipud roll rot90 index_select tile repeat unfold cat concat concatenate stack
    hstack vstack dstack diagonal atleast_1d atleast_2d atleast_3d
""")
#: What goes along dims and keeps all of them.
SAME_DIMS = words("""
    softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin sort argsort gather
    scatter scatter_add take_along_dim topk normalize gumbel_softmax glu
""")
#: What has one dim less for each that it goes along, or one of length 1 with `keepdim`.
REDUCES = words("""
    sum mean prod amax amin max min argmax argmin std var std_mean var_mean logsumexp all any
    count_nonzero nansum nanmean median nanmedian mode norm linalg_norm linalg_vector_norm quantile
    nanquantile kthvalue cosine_similarity aminmax
""")
#: Where those have their dims, if not in the second place, and which ones if nobody says.
PLACES = {"norm": 2, "linalg_norm": 2, "linalg_vector_norm": 2, "quantile": 2, "nanquantile": 2,
          "topk": 2, "kthvalue": 2, "normalize": 2, "cosine_similarity": 2, "gumbel_softmax": 4,
          "aminmax": 9}  # fmt: skip
UNSAID = {"glu": -1, "sort": -1, "argsort": -1, "topk": -1, "kthvalue": -1, "gumbel_softmax": -1,
          "normalize": 1, "cosine_similarity": 1, "median": None}  # fmt: skip
LATER = words("std var std_mean var_mean")  # between their dims and `keepdim` is another one
#: What hands out numbers, or gradients.
ENDS = words("""
    item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __format__ backward
    grad equal allclose __contains__
""")
#: What is about a tensor as it lies here, and gives none of its numbers.
ABOUT = words("""
    size dim ndimension numel nelement stride storage_offset element_size get_device data_ptr
    register_hook register_post_accumulate_grad_hook retain_grad untyped_storage storage __repr__
    __len__ __hash__ __set__ _is_view dense_dim sparse_dim has_names result_type
    broadcast_tensors_shapes new_zeros new_ones new_empty new_full new_tensor new
""")
#: What takes of a second tensor its shape or dtype only.
LIKE = words("to type_as expand_as view_as reshape_as")


def tells_nothing(func: Any) -> bool:
    """Say whether a function gives no numbers of a tensor."""
    name = name_of(func)
    if func.__name__ == "__get__":
        return name not in ELEMENTWISE and name not in VIEWS
    return name in ABOUT or name.startswith("is_")


def gives_none(call: Call) -> bool:
    """Say whether a function takes nothing but the shape or dtype of what is cut."""
    return call.name in LIKE and bool(call.args) and call.of(call.args[0]) is None


def cut_after(call: Call) -> CutDim | list[CutDim] | None:
    """Return how the result, or each of several, is cut; None if it is not known to be right."""
    cuts = [*call.cuts.values()]
    if call.options.get("out") is not None or _writes_elsewhere(call):
        return None
    if any(one.piece for one in cuts):
        return _of_pieces(call, cuts)
    if call.name in ("to", "type_as"):
        return call.of(call.args[0])
    for names, rule in RULES:
        if call.name in names:
            return rule(call)
    return None


def _within(call: Call) -> bool:
    """Say whether it changes the first tensor that it is given."""
    name = name_of(call.func)
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return True
    return name.startswith("__i") and name not in ("__invert__", "__index__")


def _writes_elsewhere(call: Call) -> bool:
    """Say whether a part is written into a tensor that is not known to be one."""
    return _within(call) and call.of(call.args[0]) is None


def _of_pieces(call: Call, cuts: list[CutDim]) -> CutDim | None:
    """Return what comes of single heads: another one, or, once all are put together, a part."""
    first = cuts[0]
    if all(one == first for one in cuts):
        return None if _within(call) else first  # it may be that of one rank's head alone
    tensors = call.given("tensors", 0)
    joins = call.name in ("cat", "concat", "concatenate", "stack") and type(tensors) in (
        list,
        tuple,
    )
    found = [one for one in map(call.of, tensors) if one is not None] if joins else []
    if not found or [one.piece for one in found] != [
        (at, len(found)) for at in range(len(tensors))
    ]:
        return None
    if (
        any(one._replace(piece=first.piece) != first for one in found)
        or len(found) != first.parts[first.rank]
    ):
        return None
    dim = call.given("dim", 1, 0)
    dims = tensors[0].dim() + (call.name == "stack")
    whole = first._replace(piece=None, dim=dim - dims if dim >= 0 else dim)
    joined = whole._replace(heads=False).times(tensors[0].size(dim))
    return whole if call.name == "stack" else joined


def _elementwise(call: Call) -> CutDim | None:
    cut = call.cut[1]
    return cut if call.fits(cut) else None


def _loss(call: Call) -> CutDim | None:
    return _elementwise(call) if call.options.get("reduction") == "none" else None


def _prelu(call: Call) -> CutDim | None:
    (first, cut), weight = call.cut, call.given("weight", 1)
    alone = first is call.args[0] and call.of(weight) is None
    return cut if alone and (weight.numel() == 1 or first.dim() + cut.dim != 1) else None


def _batch_normed(call: Call) -> CutDim | None:
    """Return the cut of features that are normed over rows, each by itself."""
    first, cut = call.cut
    return cut if first.dim() + cut.dim == 1 and len([*call.tensors()]) == 1 else None


def _normed(call: Call) -> CutDim | None:
    cut = call.cut[1]
    alone = len(call.cuts) == 1 and call.of(call.given("input", 0)) is not None
    return cut if alone and len(call.given("normalized_shape", 1, ())) < -cut.dim else None


def _of_matrices(call: Call) -> CutDim | None:
    cut = call.cut[1]
    return cut if cut.dim < -2 else None  # noqa: PLR2004 - a row and a column


def _padded(call: Call) -> CutDim | None:
    cut, pad = call.cut[1], call.given("pad", 1, ())
    own = [*pad][-2 * cut.dim - 2 : -2 * cut.dim]
    return cut if not any(own) else None


def _repeated(call: Call) -> CutDim | None:
    """Return the cut where every element has become several."""
    (first, cut), times, along = call.cut, call.given("repeats", 1), call.given("dim", 2)
    if along is None or not isinstance(times, int):
        return None
    at = along - first.dim() if along >= 0 else along
    return cut.times(times) if at == cut.dim else cut


def _along(call: Call) -> CutDim | None:
    """Return where the dim is after a function that goes along others, or along this one."""
    (first, cut), name = call.cut, call.name
    place = PLACES.get(name, 1)
    dims = call.given("dim", place, call.options.get("axis", UNSAID.get(name)))
    if isinstance(dims, torch.Tensor):  # of two tensors, the larger ones
        return _elementwise(call)
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, Sequence) or isinstance(dims, str) or not dims or not call.fits(cut):
        return None  # along all
    along: list[int] = [each - first.dim() if each >= 0 else each for each in dims]
    if cut.dim in along:
        return None
    keep = call.given("keepdim", place + 1 + (name in LATER), False)  # noqa: FBT003
    if name in SAME_DIMS or (keep is True and name != "cosine_similarity"):
        return cut
    return cut._replace(dim=cut.dim + sum(each > cut.dim for each in along))


RULES: tuple[tuple[frozenset[str], Rule], ...] = (
    (ELEMENTWISE, _elementwise),
    (VIEWS, viewed),
    (RESHAPES, reshaped),
    (frozenset(PRODUCTS), multiplied),
    (SAME_DIMS | REDUCES, _along),
    (MOVES, moved),
    (LOSSES, _loss),
    (ATTENTION, attended),
    (words("layer_norm rms_norm"), _normed),
    (words("repeat_interleave"), _repeated),
    (words("prelu"), _prelu),
    (words("batch_norm"), _batch_normed),
    (words("tril triu"), _of_matrices),
    (words("pad"), _padded),
    (words("setitem"), elements_set),
)
