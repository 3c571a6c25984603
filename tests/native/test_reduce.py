"""The native kernels mean what `reductions.py` means: bit for bit, on every instruction set."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from roundelay import _core
from roundelay.errors import UnsupportedReductionError
from roundelay.reductions import REDUCTIONS, Array, fold

Bytes = npt.NDArray[np.uint8]

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
NAMES = ["bool", *INTEGERS, *FLOATS, "complex64", "complex128"]
DTYPES = {
    name: np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name) for name in NAMES
}
LOCATED = ("maxloc", "minloc")
PAIRS = [(op, dtype) for op in REDUCTIONS for dtype in NAMES if _core.supports(op, dtype)]
SOURCES = (1, 2, 3, 4, 5, 9)
COUNTS = (0, 1, 7, 64, 1000)
#: Bytes before and after every buffer that nobody may touch.
GUARD = 64


@pytest.fixture(params=_core.instruction_sets(), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _core.instruction_set()
    _core.use_instruction_set(request.param)
    yield request.param
    _core.use_instruction_set(before)


def specials(dtype: np.dtype[Any]) -> Array:
    """Return the values at the edges of a dtype."""
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        limits = [info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, info.max // 2 + 1]
        return np.array(limits, dtype)
    finfo: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    plain = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.5]
    # Added to 1, these lie halfway between two representable numbers.
    halfway = [float(finfo.eps) / 2, float(finfo.eps) * 3 / 2]
    small = [float(finfo.smallest_subnormal), float(finfo.tiny), float(finfo.tiny) * 3 / 4]
    return np.array([*plain, *halfway, *small, float(finfo.max), -float(finfo.max)]).astype(dtype)


def reals(dtype: np.dtype[Any], generator: np.random.Generator, count: int) -> Array:
    """Return random numbers, half of them random bits and half near 1."""
    if dtype.kind == "b":
        return generator.integers(0, 2, count).astype(dtype)
    values = np.frombuffer(generator.bytes(count * dtype.itemsize), dtype).copy()
    values[::2] = (generator.standard_normal(len(values[::2])) * 3).astype(dtype)
    return values


@cache
def operands(op: str, name: str) -> list[Array]:
    """Return nine arrays of 1000 elements; the first two hold every pair of special values."""
    generator = np.random.default_rng(NAMES.index(name))
    dtype = DTYPES[name]
    real = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    count = 1000 * dtype.itemsize // real.itemsize
    edges = specials(real)
    made = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # casting NaN and large numbers to integers is meant
        for source in range(max(SOURCES)):
            values = reals(real, generator, count)
            pairs = np.arange(len(edges) ** 2) // len(edges) ** (source % 2) % len(edges)
            values[-len(pairs) :] = edges[pairs]
            values = values.view(dtype)
            made.append(located(values, generator) if op in LOCATED else values)
    return made


def located(values: Array, generator: np.random.Generator) -> Array:
    """Give each value a location; few locations and many equal values make ties."""
    records = np.zeros(len(values), [("value", values.dtype), ("location", np.int64)])
    records["value"] = np.where(generator.integers(0, 2, len(values)) == 0, values, values[0])
    records["location"] = generator.integers(-2, 3, len(values))
    return records


@cache
def expected(op: str, name: str, sources: int) -> Array:
    divide_by = sources if op == "avg" else None
    return fold(REDUCTIONS[op], operands(op, name)[:sources], divide_by=divide_by)


def assert_same(found: Array, wanted: Array) -> None:
    """Compare bits, NaN payloads aside."""
    if wanted.dtype.names:
        for field in wanted.dtype.names:
            assert_same(found[field], wanted[field])
        return
    real = np.dtype(f"f{wanted.dtype.itemsize // 2}") if wanted.dtype.kind == "c" else wanted.dtype
    found, wanted = (np.ascontiguousarray(each).view(real) for each in (found, wanted))
    bits = np.dtype(f"u{real.itemsize}")
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like any other
        both_nan = np.isnan(found) & np.isnan(wanted)
    same = (found.view(bits) == wanted.view(bits)) | both_nan
    at = np.flatnonzero(~same)[:5]
    assert not len(at), f"elements {at}: {found[at]}, not {wanted[at]}"


def placed(values: Array, offset: int) -> Bytes:
    """Copy values to memory that starts `offset` bytes past an aligned address."""
    memory = np.empty(values.nbytes + offset, np.uint8)
    memory[offset:] = values.view(np.uint8)
    return memory[offset:]


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_equals_the_reference(op: str, name: str, offset: int) -> None:
    arrays = operands(op, name)
    itemsize = arrays[0].itemsize
    placements = [placed(array, (offset * (1 + index)) % 8) for index, array in enumerate(arrays)]
    for sources, count, targets in itertools.product(SOURCES, COUNTS, (1, 2, 3)):
        length = count * itemsize
        # From the back, where the special values are.
        srcs = [each[len(each) - length :] for each in placements[:sources]]
        memory = np.full((targets, GUARD + offset + length + GUARD), 0xA5, np.uint8)
        dsts = [row[GUARD + offset : GUARD + offset + length] for row in memory]
        _core.fold(op, name, dsts, srcs, sources if op == "avg" else 0)

        wanted = expected(op, name, sources)
        assert_same(dsts[0].copy().view(wanted.dtype), wanted[len(wanted) - count :])
        assert (memory == memory[0]).all(), "destinations differ"
        assert (memory[:, : GUARD + offset] == 0xA5).all(), "wrote before the destination"
        assert (memory[:, GUARD + offset + length :] == 0xA5).all(), "wrote past the destination"


def aligned(nbytes: int, offset: int) -> Bytes:
    """Return memory that begins `offset` bytes past a cache line, with room before and after."""
    memory = np.full(nbytes + 64 + 2 * GUARD + offset, 0xA5, np.uint8)
    start = -(memory.ctypes.data + GUARD) % 64 + GUARD + offset
    return memory[start - GUARD : start + nbytes + GUARD]


@pytest.mark.parametrize("name", NAMES)
def test_operands_that_begin_alike_within_a_cache_line(name: str) -> None:
    op, itemsize = "sum", DTYPES[name].itemsize
    arrays = operands(op, name)[:2]
    for offset in range(0, 64, itemsize):
        places = [aligned(arrays[0].nbytes, offset) for _ in range(4)]
        inner = [place[GUARD:-GUARD] for place in places]
        for place, array in zip(inner[2:], arrays, strict=True):
            place[:] = array.view(np.uint8)
        _core.fold(op, name, inner[:2], inner[2:], 0)
        wanted = expected(op, name, 2)
        for place, dst in zip(places[:2], inner[:2], strict=True):
            assert_same(dst.copy().view(wanted.dtype), wanted)
            assert (place[:GUARD] == 0xA5).all(), "wrote before the destination"
            assert (place[-GUARD:] == 0xA5).all(), "wrote past the destination"


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_destinations_may_be_sources(op: str, name: str) -> None:
    arrays = operands(op, name)
    for sources in SOURCES:
        wanted = expected(op, name, sources)
        divide_by = sources if op == "avg" else 0
        # Into each source alone, then into all at once, the last first.
        choices = [[index] for index in range(sources)] + [list(reversed(range(sources)))]
        for chosen in choices:
            srcs = [array.view(np.uint8).copy() for array in arrays[:sources]]
            other = np.empty_like(srcs[0])
            _core.fold(op, name, [*(srcs[index] for index in chosen), other], srcs, divide_by)
            assert_same(other.view(wanted.dtype), wanted)
            for index, src in enumerate(srcs):
                assert_same(src.view(wanted.dtype), wanted if index in chosen else arrays[index])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("other", [0.0, 1.0, -1.0, 1e-7, 3e-5, 1e-40, 6e4, 1e38])
def test_every_half_number_is_widened_and_rounded_right(name: str, other: float) -> None:
    dtype = DTYPES[name]
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(over="ignore"):
        partner = np.full(len(every), other).astype(dtype)
    for op, divide_by in (("sum", None), ("prod", None), ("avg", 3), ("max", None)):
        found = np.empty_like(every)
        srcs = [every.view(np.uint8), partner.view(np.uint8)]
        _core.fold(op, name, [found.view(np.uint8)], srcs, divide_by or 0)
        assert_same(found, fold(REDUCTIONS[op], [every, partner], divide_by=divide_by))


def test_a_copy_keeps_every_bit() -> None:
    for name, dtype in DTYPES.items():
        source = np.frombuffer(np.random.default_rng(1).bytes(40000 * dtype.itemsize), np.uint8)
        dsts = [np.empty_like(source) for _ in range(3)]
        _core.fold("sum", name, dsts, [source])
        assert all((dst == source).all() for dst in dsts)


def test_avg_without_a_divisor_is_a_sum() -> None:
    found = np.empty(1000, np.float32)
    _core.fold("avg", "float32", [found], operands("sum", "float32")[:3])
    assert_same(found, expected("sum", "float32", 3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_takes_what_the_table_takes(op: str, name: str) -> None:
    try:
        REDUCTIONS[op].check(DTYPES[name])
        takes = True
    except UnsupportedReductionError:
        takes = False
    assert _core.supports(op, name) == takes


def test_the_chosen_instruction_set_runs(instruction_set: str) -> None:
    assert _core.instruction_set() == instruction_set
    with pytest.raises(ValueError, match="no kernels for 'mmx'"):
        _core.use_instruction_set("mmx")
    with pytest.raises(ValueError, match="no kernels for ''"):
        _core.use_instruction_set("")
    assert _core.instruction_set() == instruction_set


def zeros(count: int) -> Array:
    return np.zeros(count, np.float32)


def read_only() -> Array:
    array = zeros(2)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("median", "float32", [zeros(2)], [zeros(2)]), "no reduction 'median'"),
        (("sum", "float8", [zeros(2)], [zeros(2)]), "no dtype 'float8'"),
        (("band", "float32", [zeros(2)], [zeros(2)]), "band does not take 'float32'"),
        (("sum", "float32", [], [zeros(2)]), "at least one of dsts"),
        (("sum", "float32", [zeros(2)], []), "at least one of srcs"),
        (("sum", "float32", [zeros(3)], [zeros(2)]), "length of the first source"),
        (("sum", "float32", [zeros(2)], [zeros(2), zeros(1)]), "length of the first source"),
        (("sum", "complex128", [zeros(2)], [zeros(2)]), "8 bytes are no whole number of elements"),
        (("maxloc", "float32", [zeros(2)], [zeros(2)]), "of 12 bytes"),
        (("sum", "float32", [zeros(2)], [zeros(2)], 2), "for avg only"),
        (("avg", "float32", [zeros(2)], [zeros(2)], -1), "positive number"),
        (("sum", "float32", [read_only()], [zeros(2)]), "read-only"),
        (("sum", "float32", [zeros(4)[::2]], [zeros(2)]), "contiguous"),
    ],
)
def test_refuses_what_it_cannot_fold(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, BufferError), match=message):
        _core.fold(*arguments)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_checked_copy_tells_what_is_not_finite(dtype: str) -> None:
    kind = DTYPES[dtype]
    for count, offset in itertools.product(COUNTS, (0, 1)):
        values = np.linspace(-3, 3, count + offset).astype(kind)[offset:]
        values[-1:] = max(one for one in specials(kind) if np.isfinite(one))
        copied = np.zeros(count, kind)
        assert _core.copy_checked(copied.view(np.uint8), values.view(np.uint8), dtype)
        assert copied.tobytes() == values.tobytes()
        for at in {0, count // 2, count - 1} if count else ():
            for bad in (np.inf, -np.inf, np.nan):
                broken = values.copy()
                broken[at] = bad
                assert not _core.copy_checked(copied.view(np.uint8), broken.view(np.uint8), dtype)
                assert copied.tobytes() == broken.tobytes()


def test_a_checked_copy_refuses_what_it_can_not_copy() -> None:
    data = np.zeros(16, np.uint8)
    for given, dtype in [
        ((data[:8], data[8:12]), "float32"),
        ((data[:6], data[8:14]), "float32"),
        ((data[:8], data[4:12]), "float32"),
        ((data[:8], data[8:]), "complex64"),
        ((data[:8], data[8:]), "float8"),
    ]:
        with pytest.raises(ValueError, match="copy_checked"):
            _core.copy_checked(*given, dtype)


def test_float32_is_rounded_to_bfloat16_and_widened_back() -> None:
    """As ml_dtypes rounds: to nearest even, NaN to NaN, what is too large to infinity."""
    words = np.arange(1 << 16, dtype=np.uint32) << 16
    # Every bfloat16 there is, and what lies around the middle between two of them.
    edges = [words + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    values = np.concatenate(edges).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        due = values.astype(ml_dtypes.bfloat16)
    for count, offset in itertools.product((*COUNTS, len(values) - 1), (0, 1)):
        given = values[offset : count + offset]
        memory = np.full(2 * count + 2 * GUARD, 7, np.uint8)
        _core.to_bfloat16(memory[GUARD : 2 * count + GUARD], given)
        found = memory[GUARD : 2 * count + GUARD].view(ml_dtypes.bfloat16)
        nan = np.isnan(given)
        assert np.array_equal(np.isnan(found), nan)
        assert found[~nan].tobytes() == due[offset : count + offset][~nan].tobytes()
        assert set(memory[:GUARD]) | set(memory[2 * count + GUARD :]) == {7}
        wide = np.full(count + 2, 7, np.float32)
        _core.from_bfloat16(wide[1:-1], found.view(np.uint16))
        assert wide[1:-1].tobytes() == found.astype(np.float32).tobytes()
        assert wide[0] == wide[-1] == 7


@pytest.mark.parametrize("convert", [_core.to_bfloat16, _core.from_bfloat16])
def test_a_conversion_refuses_what_does_not_fit(convert: Any) -> None:
    data = np.zeros(32, np.uint8)
    for dst, src in [(data[:8], data[8:16]), (data[:6], data[8:11]), (data[:3], data[8:14])]:
        with pytest.raises(ValueError, match="as many elements"):
            convert(dst, src)
    wide, narrow = data[:16], data[12:20]
    with pytest.raises(ValueError, match="do not overlap"):
        convert(*((narrow, wide) if convert is _core.to_bfloat16 else (wide, narrow)))
