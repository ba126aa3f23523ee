"""Every code of the small formats against the published tables, written here from the specifications' bit
layouts, with `ml_dtypes` as a second oracle; and rounding to each of them by search over all values.

OCP OFP8 1.0: E4M3 (bias 7, no infinity, S.1111.111 is NaN), E5M2 (bias 15, IEEE infinities and NaNs).
OCP MX 1.0: E2M1 (bias 1, all codes finite), E8M0 (bias 127, 255 is NaN). INT4: two's complement.
"""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diag.numerics.blocks import E8M0, e8m0_scale
from diag.numerics.formats import FORMATS, quantize

E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E2M1_TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""OCP MX 1.0, table of E2M1: the codes 0 to 7."""


def decoded(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of a code without regard to infinities and NaNs."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def codes_as(dtype: np.dtype, count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)


def test_e4m3_has_the_published_codes() -> None:
    values = codes_as(FORMATS["fp8"].dtype, 256)
    wanted = [math.nan if code & 0x7F == 0x7F else decoded(code, 4, 3, 7) for code in range(256)]
    np.testing.assert_array_equal(values, np.array(wanted, np.float32))
    assert (values[0x7E], values[0x08], values[0x01]) == (448.0, 2.0**-6, 2.0**-9)


def test_e5m2_has_the_published_codes() -> None:
    values = codes_as(E5M2, 256)
    wanted = []
    for code in range(256):
        special = code & 0x7F
        sign = -1 if code & 0x80 else 1
        finite = decoded(code, 5, 2, 15)
        wanted.append(sign * math.inf if special == 0x7C else math.nan if special > 0x7C else finite)
    np.testing.assert_array_equal(values, np.array(wanted, np.float32))
    assert (values[0x7B], values[0x04], values[0x01]) == (57344.0, 2.0**-14, 2.0**-16)


def test_e2m1_has_the_published_codes() -> None:
    values = codes_as(FORMATS["nvfp4"].dtype, 16)
    assert values.tolist() == E2M1_TABLE + [-value for value in E2M1_TABLE]
    assert [decoded(code, 2, 1, 1) for code in range(16)] == values.tolist()
    assert FORMATS["nvfp4"].max == 6.0


def test_e8m0_has_the_published_codes() -> None:
    values = codes_as(E8M0, 256)
    with np.errstate(over="ignore"):
        wanted = [*(np.float32(math.ldexp(1, code - 127)) for code in range(255)), np.float32(math.nan)]
    np.testing.assert_array_equal(values, np.array(wanted))


def test_int4_has_the_published_codes() -> None:
    codes = np.arange(16, dtype=np.uint8)
    signed = np.where(codes > 7, codes.astype(int) - 16, codes)
    assert signed.astype(ml_dtypes.int4).astype(int).tolist() == signed.tolist()
    info = ml_dtypes.iinfo(FORMATS["int4"].dtype)
    assert (info.min, info.max) == (-8, 7)


TABLES = {
    "fp8": [decoded(code, 4, 3, 7) for code in range(0x7F)],
    "mxfp8": [decoded(code, 4, 3, 7) for code in range(0x7F)],
    "nvfp4": E2M1_TABLE,
}


def nearest(value: float, table: list[float]) -> float:
    """Nearest of all values; of two equally near the one with the even code; beyond the last, the last."""
    size = min(abs(value), table[-1])
    best = min(range(len(table)), key=lambda code: (abs(table[code] - size), code % 2))
    return math.copysign(table[best], value)


@pytest.mark.parametrize("fmt", TABLES)
def test_every_tie_and_its_neighbours_round_as_published(fmt: str) -> None:
    table = TABLES[fmt]
    ties = np.array([(a + b) / 2 for a, b in itertools.pairwise(table)], np.float32)
    near = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    values = np.concatenate([near, -near, np.array([*table, 1e9, np.inf, -np.inf], np.float32)])
    codes = quantize(values, np.float32(1), FORMATS[fmt]).astype(np.float32)
    assert codes.tolist() == [nearest(float(v), table) for v in values]


@given(st.floats(-1e4, 1e4, width=32))
@pytest.mark.parametrize("fmt", TABLES)
def test_rounding_is_the_nearest_value(fmt: str, value: float) -> None:
    (code,) = quantize(np.array([value], np.float32), np.float32(1), FORMATS[fmt]).astype(np.float32)
    assert code == nearest(value, TABLES[fmt])


def test_int4_ties_go_to_the_even_code_and_the_ends_saturate() -> None:
    values = np.array([-100, -8.5, -7.5, -0.5, 0.5, 1.5, 2.5, 6.5, 7.5, 100], np.float32)
    codes = quantize(values, np.float32(1), FORMATS["int4"]).astype(int)
    assert codes.tolist() == [-8, -8, -8, 0, 0, 2, 2, 6, 7, 7]


def test_a_float_that_is_cast_and_not_quantized_overflows_as_its_format_says() -> None:
    beyond = np.array([480.0, 1e9, np.inf], np.float32)
    assert np.isnan(beyond.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).all()  # no infinity
    assert np.isinf(np.array([1e9], np.float32).astype(E5M2).astype(np.float32)).all()
    assert quantize(beyond, np.float32(1), FORMATS["fp8"]).astype(np.float32).tolist() == [448.0] * 3


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_the_mx_scale_is_the_smallest_power_of_two_that_holds_the_block(absmax: float) -> None:
    scale = float(e8m0_scale(np.array([absmax], np.float32)).astype(np.float32)[0])
    assert math.frexp(scale)[0] == 0.5
    assert absmax / scale <= 448 < absmax / (scale / 2)


def test_the_mx_scale_at_its_ends() -> None:
    absmax = np.array([0, 448, np.nextafter(np.float32(448), np.float32(449)), 1e-45, 3.4e38], np.float32)
    assert e8m0_scale(absmax).astype(np.float64).tolist() == [1.0, 1.0, 2.0, 2.0**-127, 2.0**120]
