"""MXFP8 and NVFP4 quantization of an activation in FP32 arithmetic that ONNX Runtime has on a CPU.

TensorRT finds the scale of each block while it runs; ONNX has no operator for that, and ONNX Runtime no
kernel for E2M1 or E8M0. What is exact in FP32: a scale that is a power of two, by Veltkamp's split to one
bit, and E2M1 by rounding to multiples of 0.5, 1 or 2. E4M3 is a pair of Casts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from diag.numerics.blocks import E2M1, E4M3

_ONE_BIT = 2**23 + 1
_SMALLEST_NORMAL = 2.0**-126
_AXES_AS_INPUT_OPSET = 18
"""From this opset on ReduceMax takes its axes as an input."""

Constants = Callable[[Any], str]
"""Makes a constant of some values, and gives its name."""


@dataclass
class BlockQuantizer:
    """Emits the nodes from `source` (FP32, blocks along its last axis) to `target`, its quantized values."""

    source: str
    target: str
    rank: int
    size: int
    opset: int
    constant: Constants
    nodes: list[NodeProto] = field(default_factory=list)

    def mxfp8(self) -> list[NodeProto]:
        """E4M3 elements, and for each block the smallest power of two that brings it within 448.

        Differs from the format only for blocks whose largest magnitude is under 448 * 2^-126 or over 2^112.
        """
        blocks, absmax = self._blocks()
        least = self._node(
            "Max", self._node("Div", absmax, self._number(E4M3.max)), self._number(_SMALLEST_NORMAL)
        )
        power = self._power_of_two(least)
        scale = self._node("Where", self._node("Less", power, least), self._node("Add", power, power), power)
        codes = self._e4m3(self._node("Div", blocks, scale))
        return self._joined(self._node("Mul", codes, scale))

    def nvfp4(self, tensor_scale: str) -> list[NodeProto]:
        """E2M1 elements, for each block an E4M3 scale, and `tensor_scale` for all; zeros where that is 0."""
        blocks, absmax = self._blocks()
        wanted = self._node("Div", self._node("Div", absmax, self._number(E2M1.max)), tensor_scale)
        scale = self._node("Mul", self._e4m3(self._node("Min", wanted, self._number(E4M3.max))), tensor_scale)
        none = self._node("Equal", scale, self._number(0))
        divisor = self._node("Where", none, self._number(np.inf), scale)
        codes = self._e2m1(self._node("Div", blocks, divisor))
        return self._joined(self._node("Mul", codes, scale))

    def _blocks(self) -> tuple[str, str]:
        """The source as (..., blocks, elements), and the largest magnitude of each block."""
        shape = self.constant(np.array([*[0] * (self.rank - 1), -1, self.size], np.int64))
        blocks = self._node("Reshape", self.source, shape)
        magnitudes = self._node("Abs", blocks)
        if self.opset >= _AXES_AS_INPUT_OPSET:
            return blocks, self._node("ReduceMax", magnitudes, self.constant(np.array([-1], np.int64)))
        return blocks, self._node("ReduceMax", magnitudes, axes=[-1])

    def _joined(self, blocks: str) -> list[NodeProto]:
        shape = self.constant(np.array([*[0] * (self.rank - 1), -1], np.int64))
        self.nodes.append(
            helper.make_node("Reshape", [blocks, shape], [self.target], f"{self.target}/joined")
        )
        return self.nodes

    def _power_of_two(self, value: str) -> str:
        """The power of two nearest to a positive value."""
        wide = self._node("Mul", value, self._number(_ONE_BIT))
        return self._node("Sub", wide, self._node("Sub", wide, value))

    def _e4m3(self, value: str) -> str:
        narrow = self._node("Cast", value, to=TensorProto.FLOAT8E4M3FN)
        return self._node("Cast", narrow, to=TensorProto.FLOAT)

    def _e2m1(self, value: str) -> str:
        """Multiples of 0.5 below 2, of 1 below 4, of 2 up to 6: ties to even are those of E2M1."""
        size = self._node("Abs", value)
        large = self._node(
            "Where", self._node("Less", size, self._number(4)), self._number(1), self._number(2)
        )
        step = self._node("Where", self._node("Less", size, self._number(2)), self._number(0.5), large)
        rounded = self._node("Mul", self._node("Round", self._node("Div", value, step)), step)
        return self._node("Max", self._node("Min", rounded, self._number(E2M1.max)), self._number(-E2M1.max))

    def _number(self, value: float) -> str:
        return self.constant(np.asarray(value, np.float32))

    def _node(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        output = f"{self.target}/{op_type}:{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], output, **attributes))
        return output
