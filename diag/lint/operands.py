"""Rules on quantized operands: steps that are too coarse for most values of a weight or an activation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from diag.lint.hazard import Hazard, hazards, lint_rules
from diag.lint.lowered import Extremes
from diag.numerics.formats import FORMATS, dequantize, quantize, symmetric_scale
from diag.typed.operands import Operand


def check_weights(operands: Sequence[Operand], formats: Mapping[str, str]) -> Iterator[Hazard]:
    """Layers whose weight, by output channel and min-max, is below the rules' SQNR in its format."""
    bad = {}
    for operand in operands:
        sqnr = weight_sqnr_db(operand, formats[operand.layer]) if operand.weight is not None else None
        if sqnr is not None and sqnr < lint_rules().operand_sqnr_db:
            bad[operand.layer] = sqnr
    names = sorted(bad, key=bad.__getitem__)
    first = f"{names[0]} ({bad[names[0]]:.1f} dB)" if names else ""
    yield from hazards(
        ("weight-steps", "shared-range", "warning"),
        names,
        f"{len(names)} weights are too coarse by output channel, first {first}: a few elements are far "
        "larger than the rest",
        "Keep these layers in a float format, or move the large elements into the layer before (smoothing).",
        **({"worst_sqnr_db": bad[names[0]]} if names else {}),
    )


def check_activations(
    operands: Sequence[Operand], formats: Mapping[str, str], measured: Mapping[str, Extremes]
) -> Iterator[Hazard]:
    """INT8 activations whose min-max range leaves them an SQNR below the rules'.

    With evenly spread rounding errors it is 20 log10(rms / step) + 10 log10(12), step = absmax / 127.
    """
    bad: dict[str, tuple[float, str]] = {}
    for operand in operands:
        seen = measured.get(operand.tensor) if operand.weight is None else None
        if seen is None or not seen.rms or formats[operand.layer] != "int8":
            continue
        sqnr = 20 * math.log10(seen.rms * FORMATS["int8"].max / seen.absmax) + 10 * math.log10(12)
        if sqnr < lint_rules().operand_sqnr_db:
            bad[operand.layer] = min((sqnr, operand.tensor), bad.get(operand.layer, (sqnr, operand.tensor)))
    names = sorted(bad, key=bad.__getitem__)
    first = f"{bad[names[0]][1]}, read by {names[0]} ({bad[names[0]][0]:.1f} dB)" if names else ""
    yield from hazards(
        ("activation-steps", "shared-range", "warning"),
        names,
        f"{len(names)} layers read activations that a min-max range leaves too few steps, first {first}",
        "Calibrate with --method best or --compensate, or keep these layers in a float format.",
        **({"worst_sqnr_db": bad[names[0]][0]} if names else {}),
    )


def weight_sqnr_db(operand: Operand, fmt: str) -> float | None:
    """SQNR of the weight itself in dB; None when it is zero or exact."""
    assert operand.weight is not None and operand.channel_axis is not None
    values = np.asarray(operand.weight, np.float32)
    axes = tuple(i for i in range(values.ndim) if i != operand.channel_axis)
    scale = symmetric_scale(np.abs(values).max(axis=axes), FORMATS[fmt])
    codes = quantize(values, scale, FORMATS[fmt], operand.channel_axis)
    error = values - dequantize(codes, scale, operand.channel_axis)
    noise = float(np.square(error, dtype=np.float64).sum())
    signal = float(np.square(values, dtype=np.float64).sum())
    return 10 * float(np.log10(signal / noise)) if noise and signal else None
