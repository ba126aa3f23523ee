"""Number formats against their published limits, and rounding against the list of all values of a format."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diag.numerics.formats import FORMATS, clamp_to, dequantize, quantize, round_to, symmetric_scale

FLOATS = ["fp16", "bf16", "fp8"]
OVERFLOW = {"fp16": 65520.0, "bf16": (2 - 2.0**-8) * 2.0**127, "fp8": 464.0}
"""The first magnitude that is nearer to the next power of the exponent than to the largest value (a tie)."""


def values_of(fmt: str) -> np.ndarray:
    """Every finite non-negative value of a float format, ascending, decoded by hand from its bits."""
    mantissa, exponent, bias = {"fp16": (10, 5, 15), "bf16": (7, 8, 127), "fp8": (3, 4, 7)}[fmt]
    codes = range(1 << (mantissa + exponent))
    found = []
    for code in codes:
        e, m = code >> mantissa, code & ((1 << mantissa) - 1)
        if fmt == "fp8":
            if code == 0x7F:
                continue  # E4M3's only NaN
        elif e == (1 << exponent) - 1:
            continue  # infinity and NaN
        fraction = m / (1 << mantissa)
        found.append(math.ldexp(fraction if e == 0 else 1 + fraction, (e or 1) - bias))
    return np.array(found)


@pytest.mark.parametrize(
    ("fmt", "largest", "smallest", "unit_roundoff"),
    [
        ("fp32", (2 - 2.0**-23) * 2.0**127, 2.0**-149, 2.0**-24),
        ("fp16", 65504.0, 2.0**-24, 2.0**-11),
        ("bf16", (2 - 2.0**-7) * 2.0**127, 2.0**-133, 2.0**-8),
        ("fp8", 448.0, 2.0**-9, 2.0**-4),
    ],
)
def test_the_limits_are_the_published_ones(
    fmt: str, largest: float, smallest: float, unit_roundoff: float
) -> None:
    known = FORMATS[fmt]
    assert known.max == largest
    assert known.unit_roundoff == unit_roundoff
    tiny = np.array([smallest, smallest / 2, smallest * 0.75], np.float64).astype(np.float32)
    assert round_to(tiny, known).tolist() == [smallest, 0.0, smallest]


def test_integer_formats_have_symmetric_limits_and_no_roundoff() -> None:
    assert (FORMATS["int8"].max, FORMATS["int4"].max) == (127.0, 7.0)
    assert FORMATS["int8"].unit_roundoff == FORMATS["int4"].unit_roundoff == 0
    quantized = [name for name, fmt in FORMATS.items() if fmt.quantized]
    assert quantized == ["fp8", "int8", "int4", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("fmt", FLOATS)
def test_every_value_of_a_format_rounds_to_itself(fmt: str) -> None:
    values = values_of(fmt).astype(np.float32)
    for signed in (values, -values):
        rounded = round_to(signed, FORMATS[fmt])
        assert np.array_equal(rounded.view(np.uint32), signed.view(np.uint32))  # the sign of zero included
    assert values[-1] == FORMATS[fmt].max


@pytest.mark.parametrize("fmt", FLOATS)
def test_halfway_goes_to_the_even_code_and_a_hair_beside_it_to_the_nearer(fmt: str) -> None:
    values = values_of(fmt)
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    exact = middle == (values[:-1] + values[1:]) / 2  # bf16's smallest halves are below float32's
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    even = np.where(np.arange(len(middle)) % 2 == 0, values[:-1], values[1:])
    assert exact.all()
    assert np.array_equal(round_to(middle, FORMATS[fmt]), even)
    assert np.array_equal(round_to(below, FORMATS[fmt]), values[:-1])
    assert np.array_equal(round_to(above, FORMATS[fmt]), values[1:])


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_beyond_half_a_step_above_the_largest_value_is_infinity(fmt: str) -> None:
    first = np.float32(OVERFLOW[fmt])
    edge = np.array([np.nextafter(first, np.float32(0)), first, -first, np.inf], np.float32)
    assert round_to(edge, FORMATS[fmt]).tolist() == [FORMATS[fmt].max, math.inf, -math.inf, math.inf]


def test_e4m3_has_no_infinity_and_keeps_448_up_to_the_tie() -> None:
    rounded = round_to(np.array([464, -464, 464.001, -500, np.inf], np.float32), FORMATS["fp8"])
    assert rounded[:2].tolist() == [448, -448]  # the tie goes to the even code, which is 448's
    assert np.isnan(rounded[2:]).all()


@pytest.mark.parametrize("fmt", FLOATS)
def test_nan_stays_nan(fmt: str) -> None:
    assert np.isnan(round_to(np.array([np.nan], np.float32), FORMATS[fmt])).all()
    assert np.isnan(clamp_to(np.array([np.nan], np.float32), FORMATS[fmt])).all()


@given(hnp.arrays(np.float32, 16, elements=st.floats(-500, 500, width=32)), st.sampled_from(FLOATS))
def test_rounding_picks_the_nearest_value(values: np.ndarray, fmt: str) -> None:
    inside = np.clip(values, -440, 440)
    known = values_of(fmt)
    known = np.concatenate([-known[::-1], known])
    distance = np.abs(known[np.newaxis, :] - inside.astype(np.float64)[:, np.newaxis]).min(axis=1)
    rounded = round_to(inside, FORMATS[fmt]).astype(np.float64)
    assert np.array_equal(np.abs(rounded - inside), distance)


def test_clamping_keeps_what_fits() -> None:
    values = np.array([-np.inf, -70000, -1.5, 0, 65504, 65520, np.inf], np.float32)
    assert clamp_to(values, FORMATS["fp16"]).tolist() == [-65504, -65504, -1.5, 0, 65504, 65504, 65504]


def by_hand(values: np.ndarray, scale: float, low: int, high: int) -> list[int]:
    """ONNX's definition with Python's own rounding, which sends ties to even."""
    return [min(max(round(float(np.float32(v) / np.float32(scale))), low), high) for v in values]


@given(
    hnp.arrays(np.float32, 32, elements=st.floats(-300, 300, width=32)),
    st.sampled_from([0.25, 0.5, 1.0, 0.1, 3.0]),
)
def test_integer_codes_are_those_of_the_definition(values: np.ndarray, scale: float) -> None:
    step = np.float32(scale)
    assert quantize(values, step, FORMATS["int8"]).tolist() == by_hand(values, scale, -128, 127)
    assert quantize(values, step, FORMATS["int4"]).astype(int).tolist() == by_hand(values, scale, -8, 7)


def test_ties_and_saturation_of_int8() -> None:
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 127.5, 1e9, -127.5, -128.6, -1e9], np.float32)
    codes = quantize(values, np.float32(1), FORMATS["int8"])
    assert codes.dtype == np.int8
    assert codes.tolist() == [0, 2, 2, 0, -2, 127, 127, -128, -128, -128]


def test_fp8_saturates_when_it_quantizes() -> None:
    values = np.array([2.0, 1e6, -np.inf, np.nan], np.float32)
    codes = quantize(values, np.float32(0.001), FORMATS["fp8"]).astype(np.float32)
    assert codes[:3].tolist() == [448, 448, -448]
    assert math.isnan(codes[3])


def test_non_finite_and_overflowing_quotients_do_not_warn() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 3e38], np.float32)
    assert quantize(values, np.float32(1e-30), FORMATS["int8"]).tolist() == [0, 127, -128, 127]
    assert quantize(values, np.float32(1e-30), FORMATS["int4"]).astype(int).tolist() == [0, 7, -8, 7]


@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_channel_uses_its_own_scale_and_comes_back_within_half_a_step(fmt: str, axis: int) -> None:
    rng = np.random.default_rng(axis)
    values = rng.standard_normal((3, 4, 5)).astype(np.float32)
    values *= np.float32(10.0) ** rng.integers(-6, 6, values.shape[axis]).reshape(
        [-1 if a == axis else 1 for a in range(3)]
    ).astype(np.float32)
    absmax = np.abs(values).max(axis=tuple(a for a in range(3) if a != axis))
    scale = symmetric_scale(absmax, FORMATS[fmt])
    back = dequantize(quantize(values, scale, FORMATS[fmt], axis), scale, axis)
    error = np.abs(back - values).max(axis=tuple(a for a in range(3) if a != axis))
    step = scale * (16 if fmt == "fp8" else 0.5) * (1 + 1e-5)  # E4M3's largest step is 32
    assert (error <= step).all()
    for index, one in enumerate(scale):  # the same as channel by channel
        alone = quantize(np.take(values, index, axis), one, FORMATS[fmt])
        assert np.array_equal(alone, np.take(quantize(values, scale, FORMATS[fmt], axis), index, axis))


@pytest.mark.parametrize(("fmt", "code"), [("int8", 127), ("int4", 7), ("fp8", 448)])
def test_the_largest_magnitude_gets_the_largest_code(fmt: str, code: float) -> None:
    absmax = np.array([1e-30, 0.3, 1.0, 1e30], np.float32)
    scale = symmetric_scale(absmax, FORMATS[fmt])
    assert scale.dtype == np.float32
    assert quantize(absmax, scale, FORMATS[fmt], 0).astype(np.float32).tolist() == [code] * 4
    assert quantize(-absmax, scale, FORMATS[fmt], 0).astype(np.float32).tolist() == [-code] * 4


def test_dead_channels_get_a_scale_that_an_engine_accepts() -> None:
    absmax = np.array([0.0, 1e-45, np.nan, np.inf, 2.0])
    scale = symmetric_scale(absmax, FORMATS["int8"])
    tiny = np.finfo(np.float32).tiny
    expected = [1 / 127, tiny, 1 / 127, np.finfo(np.float32).max / 127, 2 / 127]
    assert scale.tolist() == pytest.approx(expected, rel=1e-6, abs=0)
    assert (scale >= tiny).all()
    assert np.isfinite(scale).all()
    zeros = quantize(np.zeros(3, np.float32), scale[0], FORMATS["int8"])
    assert dequantize(zeros, scale[0]).tolist() == [0, 0, 0]


def test_a_scalar_is_quantized_too() -> None:
    assert quantize(np.float32(3), np.float32(2), FORMATS["int8"]).shape == ()
    assert float(dequantize(np.int8(2), np.float32(1.5))) == 3.0  # type: ignore[arg-type]
