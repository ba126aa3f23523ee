"""Pass: QuantizeLinear/DequantizeLinear before the operands of quantized layers, where TensorRT wants it.

Requires: float formats settled. Ensures: symmetric quantization with zero point 0; one pair for each
activation and scale, however many layers read it; weights stored as codes with a scale for each channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from diag.errors import TableError
from diag.numerics.formats import FORMATS, quantize, symmetric_scale
from diag.typed.fused import Scales
from diag.typed.operands import Operand
from diag.typed.surgeon import NAMESPACE, Surgery

Ratios = Mapping[str, NDArray[np.floating[Any]]]
"""Weight to what the min-max steps of its channels are multiplied by."""


def insert_qdq(
    surgery: Surgery,
    operands: Sequence[Operand],
    formats: Mapping[str, str],
    bases: Mapping[str, str],
    scales: Scales,
    weight_ratios: Ratios,
) -> None:
    """Put a quantizer on each operand.

    `formats` gives the quantized format of each layer, `bases` the float format that it computes in besides
    (the type of the scale, ONNX opset 19), and `weight_ratios` what the min-max steps of a weight's channels
    are multiplied by. Raises TableError when an activation has no scale in its format.
    """
    inserter = _Inserter(surgery, scales, weight_ratios)
    nodes = {node.name: node for node in surgery.graph.nodes}
    before: dict[str, list[Any]] = {}
    for operand in operands:
        node, fmt, base = nodes[operand.layer], formats[operand.layer], bases.get(operand.layer, "fp32")
        replaced = inserter.weight(operand, fmt, base) if operand.weight is not None else None
        if replaced is None:
            replaced = inserter.activation(node.inputs[operand.input], operand.tensor, fmt, base)
        node.inputs[operand.input] = replaced
        before.setdefault(operand.layer, []).extend(inserter.take_pending())
    surgery.put_before(before)


class _Inserter:
    def __init__(
        self,
        surgery: Surgery,
        scales: Scales,
        weight_ratios: Ratios,
    ) -> None:
        self._surgery = surgery
        self._scales = scales
        self._weight_ratios = weight_ratios
        self._done: dict[tuple[str, str, str], Any] = {}
        self._pending: list[Any] = []

    def take_pending(self) -> list[Any]:
        pending, self._pending = self._pending, []
        return pending

    def activation(self, tensor: Any, measured: str, fmt: str, base: str) -> Any:
        key = (tensor.name, fmt, base)
        if key in self._done:
            return self._done[key]
        scale = self._scales.get(fmt, {}).get(measured)
        if scale is None or not np.isfinite(scale) or scale <= 0:
            raise TableError(
                f"the calibration has no usable {fmt} scale for tensor {measured!r} (found: {scale})",
                "Calibrate with data that reach it.",
            )
        label = self._surgery.fresh(f"{tensor.name}/{fmt}")
        parameters = self._parameters(label, np.asarray(scale, np.float32), fmt, base)
        codes = gs.Variable(label)
        name = self._surgery.fresh(f"{NAMESPACE}/quantize/{label}")
        self._pending.append(gs.Node("QuantizeLinear", name, {}, [tensor, *parameters], [codes]))
        self._done[key] = self._dequantized(label, codes, parameters, {})
        return self._done[key]

    def weight(self, operand: Operand, fmt: str, base: str) -> Any:
        key = (operand.tensor, f"{fmt}@{operand.channel_axis}", base)
        if key in self._done:
            return self._done[key]
        assert operand.weight is not None and operand.channel_axis is not None
        values = np.asarray(operand.weight, np.float32)
        scale = weight_scale(
            values, operand.channel_axis, fmt, base, self._weight_ratios.get(operand.tensor, 1.0)
        )
        label = f"{operand.tensor}/{fmt}"
        if operand.channel_axis != values.ndim - 1:
            label += f"@{operand.channel_axis}"
        label = self._surgery.fresh(label)
        codes = self._surgery.constant(
            label, quantize(values, scale, FORMATS[fmt], operand.channel_axis), fmt
        )
        parameters = self._parameters(label, scale, fmt, base)
        self._done[key] = self._dequantized(label, codes, parameters, {"axis": operand.channel_axis})
        return self._done[key]

    def _parameters(self, label: str, scale: NDArray[np.float32], fmt: str, base: str) -> list[Any]:
        """Scale and zero point, the latter zero (it also says which type the codes have)."""
        stored = storable(scale, base).astype(FORMATS[base].dtype)
        zero = np.zeros(scale.shape, FORMATS[fmt].dtype)
        return [
            self._surgery.constant(self._surgery.fresh(f"{label}/scale"), stored, base),
            self._surgery.constant(self._surgery.fresh(f"{label}/zero_point"), zero, fmt),
        ]

    def _dequantized(self, label: str, codes: Any, parameters: list[Any], attrs: dict[str, int]) -> Any:
        result = gs.Variable(self._surgery.fresh(f"{label}/dequantized"))
        name = self._surgery.fresh(f"{NAMESPACE}/dequantize/{label}")
        self._pending.append(gs.Node("DequantizeLinear", name, attrs, [codes, *parameters], [result]))
        return result


def weight_scale(
    values: NDArray[np.float32],
    axis: int,
    fmt: str,
    base: str,
    ratio: NDArray[np.floating[Any]] | float = 1.0,
) -> NDArray[np.float32]:
    """One min-max scale for each channel, times `ratio`, as it is after storing it in the base format."""
    others = tuple(i for i in range(values.ndim) if i != axis)
    return storable(symmetric_scale(np.abs(values).max(axis=others) * ratio, FORMATS[fmt]), base)


def storable(scale: NDArray[np.float32], base: str) -> NDArray[np.float32]:
    """Scales rounded to a float format, and neither 0 nor infinite there (a builder refuses both)."""
    info = ml_dtypes.finfo(FORMATS[base].dtype)  # type: ignore[no-untyped-call]
    bounded = np.clip(scale, np.float32(info.smallest_subnormal), np.float32(info.max))
    return bounded.astype(FORMATS[base].dtype).astype(np.float32)
