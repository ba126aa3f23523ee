"""Pass: weights in blocks (INT4, MXFP8, NVFP4), as TensorRT's ONNX parser reads them.

Requires: float formats settled; opset 21 for INT4, 19 for MXFP8, 23 for NVFP4.
Ensures: INT4 weights behind one DequantizeLinear with `block_size`, in ONNX alone. MXFP8 and NVFP4 quantize
the activation too, with a scale that the engine finds while it runs: ONNX has no operator for it, so these
layers carry TensorRT's own (domain `trt`). NVFP4's two scales are two DequantizeLinear in a row, in FP32,
since FP16 has no room for their product; a Cast brings the result to the layer's float format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx import TensorProto

from diag.errors import TableError
from diag.numerics.blocks import (
    E4M3,
    block_absmax,
    mxfp8_blocks,
    nvfp4_blocks,
    quantize_blocks,
)
from diag.numerics.formats import FORMATS, symmetric_scale
from diag.typed.blocks import WEIGHT, BlockLayer, BlockTuning
from diag.typed.passes.insert_qdq import storable
from diag.typed.surgeon import ELEM_TYPE, NAMESPACE, Surgery

TRT_DOMAIN = "trt"
"""Domain under which TensorRT's parser has operators that ONNX lacks."""


def insert_blocks(
    surgery: Surgery,
    layers: Sequence[BlockLayer],
    bases: Mapping[str, str],
    scales: Mapping[str, float],
    tuning: BlockTuning,
) -> None:
    """Store each layer's weights in blocks.

    `bases` gives the float format that a layer computes in, `scales` for NVFP4 the step of each activation by
    tensor name: largest magnitude over 6, and `tuning` what a search found for INT4. Raises TableError when a
    step is missing, or when the search was made for other blocks.
    """
    inserter = _Inserter(surgery, bases, scales, tuning)
    nodes = {node.name: node for node in surgery.graph.nodes}
    before: dict[str, list[Any]] = {}
    for layer in layers:
        node = nodes[layer.layer]
        node.inputs[WEIGHT] = inserter.weight(layer)
        if layer.dynamic:
            node.inputs[0] = inserter.activation(node.inputs[0], layer)
        elif layer.source in tuning.factors:
            node.inputs[0] = inserter.divided(node.inputs[0], layer)
        before[layer.layer] = inserter.take_pending()
    surgery.put_before(before)


class _Inserter:
    def __init__(
        self,
        surgery: Surgery,
        bases: Mapping[str, str],
        scales: Mapping[str, float],
        tuning: BlockTuning,
    ) -> None:
        self._surgery = surgery
        self._tuning = tuning
        self._bases = bases
        self._scales = scales
        self._done: dict[tuple[str, str, int, str], Any] = {}
        self._pending: list[Any] = []

    def take_pending(self) -> list[Any]:
        pending, self._pending = self._pending, []
        return pending

    def weight(self, layer: BlockLayer) -> Any:
        base = self._bases.get(layer.layer, "fp32")
        searched = layer.source in self._tuning.factors or layer.layer in self._tuning.ratios
        key = (layer.layer if searched else layer.tensor, layer.format, layer.axis, base)
        if key not in self._done:
            make = {"int4": self._int4, "mxfp8": self._mxfp8, "nvfp4": self._nvfp4}[layer.format]
            label = self._surgery.fresh(f"{layer.tensor}/{layer.format}")
            self._done[key] = make(layer, np.asarray(layer.weight, np.float32), label, base)
        return self._done[key]

    def activation(self, tensor: Any, layer: BlockLayer) -> Any:
        base = self._bases.get(layer.layer, "fp32")
        key = (tensor.name, layer.format, 0, base)
        if key not in self._done:
            label = self._surgery.fresh(f"{tensor.name}/{layer.format}")
            if layer.rank:
                tensor = self._with_extent(tensor, layer, label)
            make = self._dynamic_mxfp8 if layer.format == "mxfp8" else self._dynamic_nvfp4
            self._done[key] = make(tensor, layer, label, base)
        return self._done[key]

    def _with_extent(self, tensor: Any, layer: BlockLayer, label: str) -> Any:
        """The same tensor, behind a Reshape that says how long its last axis is."""
        result = gs.Variable(self._surgery.fresh(f"{label}/extent"))
        shape = np.array([*[0] * (layer.rank - 1), layer.weight.shape[layer.axis]], np.int64)
        self._add("Reshape", f"extent/{label}", {}, [tensor, self._beside(label, "shape", shape)], [result])
        return result

    def _int4(self, layer: BlockLayer, values: NDArray[np.float32], label: str, base: str) -> Any:
        factors, ratios = self._tuning.factors.get(layer.source), self._tuning.ratios.get(layer.layer)
        if factors is not None:
            values = values * np.expand_dims(factors, 1 - layer.axis)
        scales = storable(self._steps(layer, values, ratios), base)
        codes = quantize_blocks(values, scales, "int4", layer.axis)
        stored = self._beside(label, "scale", scales.astype(FORMATS[base].dtype))
        inputs = [self._surgery.constant(label, codes), stored]
        return self._dequantized(label, inputs, layer.axis, layer.size, base)

    def _steps(
        self, layer: BlockLayer, values: NDArray[np.float32], ratios: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        absmax = block_absmax(values, layer.axis, layer.size)
        if ratios is None:
            return symmetric_scale(absmax, FORMATS["int4"])
        turned = ratios if layer.axis == 0 else ratios.T
        if turned.shape != absmax.shape:
            raise TableError(
                f"the table's steps of layer {layer.layer!r} are for other blocks than the plan's",
                "Calibrate again with this plan.",
            )
        return symmetric_scale(absmax * turned, FORMATS["int4"])

    def divided(self, tensor: Any, layer: BlockLayer) -> Any:
        """The tensor with its channels divided by the factors that the weights are multiplied by."""
        base = self._bases.get(layer.layer, "fp32")
        key = (tensor.name, "divided", 0, base)
        if key not in self._done:
            label = self._surgery.fresh(f"{tensor.name}/divided")
            inverse = (1 / self._tuning.factors[layer.source]).astype(FORMATS[base].dtype)
            inputs = [tensor, self._beside(label, "inverse", inverse)]
            self._done[key] = gs.Variable(label)
            self._add("Mul", f"divide/{label}", {}, inputs, [self._done[key]])
        return self._done[key]

    def _mxfp8(self, layer: BlockLayer, values: NDArray[np.float32], label: str, base: str) -> Any:
        blocks = mxfp8_blocks(values, layer.axis)
        # TensorRT's parser takes E8M0 as UINT8: the exponent's eight bits.
        scales = self._beside(label, "scale", blocks.scales.view(np.uint8))
        inputs = [self._surgery.constant(label, blocks.codes), scales]
        return self._mx_dequantized(label, inputs, layer.axis, layer.size, base)

    def _nvfp4(self, layer: BlockLayer, values: NDArray[np.float32], label: str, base: str) -> Any:
        blocks = nvfp4_blocks(values, layer.axis)
        tensor_scale = self._beside(label, "tensor_scale", np.asarray(blocks.tensor_scale, np.float32))
        scales = self._beside(label, "scale", blocks.scales)
        codes = self._surgery.constant(label, blocks.codes)
        return self._two_scales(label, codes, scales, tensor_scale, (layer.axis, layer.size), base)

    def _dynamic_mxfp8(self, tensor: Any, layer: BlockLayer, label: str, base: str) -> Any:
        outputs = self._codes_and_scales(label, TensorProto.FLOAT8E4M3FN, TensorProto.UINT8)
        attributes = {"axis": -1, "block_size": layer.size, "output_dtype": ELEM_TYPE["fp8"]}
        self._add("TRT_MXFP8DynamicQuantize", f"quantize/{label}", attributes, [tensor], outputs, TRT_DOMAIN)
        return self._mx_dequantized(label, outputs, -1, layer.size, base)

    def _dynamic_nvfp4(self, tensor: Any, layer: BlockLayer, label: str, base: str) -> Any:
        step = self._scales.get(layer.source)
        if step is None or not np.isfinite(step) or step <= 0:
            raise TableError(
                f"the calibration has no usable scale for tensor {layer.source!r} (found: {step})",
                "Calibrate with data that reach it.",
            )
        tensor_scale = self._beside(label, "tensor_scale", np.asarray(step / E4M3.max, np.float32))
        outputs = self._codes_and_scales(label, TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN)
        attributes = {"axis": -1, "block_size": layer.size, "scale_type": ELEM_TYPE["fp8"]}
        inputs = [tensor, tensor_scale]
        self._add("TRT_FP4DynamicQuantize", f"quantize/{label}", attributes, inputs, outputs, TRT_DOMAIN)
        return self._two_scales(label, outputs[0], outputs[1], tensor_scale, (-1, layer.size), base)

    def _codes_and_scales(self, label: str, codes: int, scales: int) -> list[Any]:
        """Outputs of a quantizer that finds its scales itself, of these element types."""
        return [gs.Variable(label, codes), gs.Variable(self._surgery.fresh(f"{label}/scale"), scales)]

    def _two_scales(
        self, label: str, codes: Any, scales: Any, tensor_scale: Any, cut: tuple[int, int], base: str
    ) -> Any:
        product = gs.Variable(self._surgery.fresh(f"{label}/scale/dequantized"), np.float32)
        self._add("DequantizeLinear", f"dequantize/{label}/scale", {}, [scales, tensor_scale], [product])
        wide = self._dequantized(label, [codes, product], *cut, "fp32")
        if base == "fp32":
            return wide
        narrow = gs.Variable(self._surgery.fresh(f"{label}/{base}"))
        self._add("Cast", f"cast/{label}/{base}", {"to": ELEM_TYPE[base]}, [wide], [narrow])
        return narrow

    def _dequantized(self, label: str, inputs: list[Any], axis: int, size: int, base: str) -> Any:
        result = self._result(label, base)
        self._add(
            "DequantizeLinear", f"dequantize/{label}", {"axis": axis, "block_size": size}, inputs, [result]
        )
        return result

    def _mx_dequantized(self, label: str, inputs: list[Any], axis: int, size: int, base: str) -> Any:
        result = self._result(label, base)
        attributes = {"axis": axis, "block_size": size, "output_dtype": ELEM_TYPE[base]}
        self._add(
            "TRT_MXFP8DequantizeLinear", f"dequantize/{label}", attributes, inputs, [result], TRT_DOMAIN
        )
        return result

    def _result(self, label: str, base: str) -> Any:
        """A tensor whose type the graph says, since ONNX's inference stops at TensorRT's operators."""
        return gs.Variable(self._surgery.fresh(f"{label}/dequantized"), ELEM_TYPE[base])

    def _beside(self, label: str, what: str, values: NDArray[np.generic]) -> Any:
        return self._surgery.constant(self._surgery.fresh(f"{label}/{what}"), values)

    def _add(
        self,
        op_type: str,
        name: str,
        attributes: dict[str, int],
        inputs: list[Any],
        outputs: list[Any],
        domain: str | None = None,
    ) -> None:
        full = self._surgery.fresh(f"{NAMESPACE}/{name}")
        self._pending.append(gs.Node(op_type, full, attributes, inputs, outputs, domain=domain))
