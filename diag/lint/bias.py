"""The rule on biases: an INT8 kernel adds them as INT32 codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from diag.lint.hazard import QDQ, Hazard, hazards, lint_rules
from diag.model.graph import Layer, Model
from diag.typed.brought import Quantizer, dequantized, quantizer_of

INT32_MAX = 2.0**31 - 1
_BIASED = frozenset({"Conv", "ConvTranspose", "Gemm"})


def check_biases(model: Model, quantizers: Sequence[Quantizer]) -> Iterator[Hazard]:
    """Layers whose bias, in units of input step x weight step, leaves or nearly leaves INT32."""
    by_output = {q.output: q for q in quantizers}
    shares = {
        layer.id: share for layer in model.layers if (share := _share(model, by_output, layer)) is not None
    }
    over = sorted((name for name in shares if shares[name] > 1), key=lambda name: -shares[name])
    rules = lint_rules()
    near = [name for name, share in shares.items() if rules.bias_warning_share < share <= 1]
    mend = (
        "Give the smallest weight channels a larger step (bias / (input step x 2^31)), or leave it in float."
    )
    for severity, names in (("error", over), ("warning", near)):
        share = max((shares[name] for name in names), default=0.0)
        yield from hazards(
            (f"bias-range-{severity}", QDQ, "error" if severity == "error" else "warning"),
            names,
            f"{len(names)} biases need {'more than' if severity == 'error' else 'nearly'} INT32: "
            f"{share:.3g} of its range at {names[0] if names else ''}",
            mend,
            int32_share=share,
        )


def _share(model: Model, by_output: Mapping[str, Quantizer], layer: Layer) -> float | None:
    """Largest |bias / (input step x weight step)| over 2^31 - 1; None without bias or quantizers."""
    if layer.op_type not in _BIASED or len(layer.inputs) < 3 or not layer.inputs[2]:
        return None
    operands = [quantizer_of(model, by_output, name) for name in layer.inputs[:2]]
    bias = _bias(model, by_output, layer.inputs[2])
    steps = [q.scale for q in operands if q is not None and q.scale is not None]
    if bias is None or len(steps) < 2 or not bias.size:
        return None
    product = steps[0].max().astype(np.float64) * steps[1].astype(np.float64)
    if product.size not in (1, bias.size):
        return None
    if not (product > 0).all():
        return None  # a scale of zero has its own rule
    return float((np.abs(bias.reshape(-1).astype(np.float64)) / product.reshape(-1)).max() / INT32_MAX)


def _bias(model: Model, by_output: Mapping[str, Quantizer], name: str) -> NDArray[np.generic] | None:
    quantizer = by_output.get(name)
    if quantizer is None or quantizer.kind != "stored":
        return model.constant(name if quantizer is None else quantizer.source)
    codes = model.constant(quantizer.source)
    if codes is None or quantizer.scale is None or quantizer.zero_point is None:
        return None
    return dequantized(codes, quantizer)
