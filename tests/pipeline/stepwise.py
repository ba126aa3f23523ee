"""A comparison by brute force: node by node, every value kept, metrics written down as their definitions say.

Shares nothing with the product but ONNX Runtime's kernels, one node at a time and in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

Array = NDArray[Any]
Values = dict[str, Array]

VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose", "Dropout")
CONTRACTIONS = ("MatMul", "Gemm", "Conv")
HALVES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


class Stepwise:
    """Reference, accumulated and local values of every tensor of every batch, in one format."""

    def __init__(self, model: ModelProto, fmt: str, batches: Sequence[Mapping[str, Array]]) -> None:
        self.model = model
        self.fmt = fmt
        self.constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        self.sessions: dict[str, ort.InferenceSession] = {}
        self.dependent = _value_dependent(model, self.constants)
        self.reference = [
            self._run(dict(batch), lambda node, values: self._node(node, values)) for batch in batches
        ]
        self.absmax: dict[str, float] = {}
        for values in self.reference:
            for name, value in values.items():
                if value.dtype == np.float32 and value.size:
                    self.absmax[name] = max(self.absmax.get(name, 0.0), float(np.abs(value).max()))
        self.accumulated = [self._run(dict(batch), self.lowered) for batch in batches]
        self.local = [
            {
                name: self.lowered(node, values)[i]
                for node in model.graph.node
                for i, name in enumerate(node.output)
            }
            for values in self.reference
        ]

    def _run(self, values: Values, step: Callable[[NodeProto, Values], list[Array]]) -> Values:
        for node in self.model.graph.node:
            values.update(zip(node.output, step(node, values), strict=True))
        return values

    def lowered(self, node: NodeProto, values: Values) -> list[Array]:
        """The node's outputs as the format gives them, from inputs that may be in FP32."""
        if self.dependent.isdisjoint(node.output):  # arithmetic on shapes stays as it is
            return self._node(node, values)
        given = {name: self._received(node, name, values) for name in node.input if name}
        outputs = self._node(node, given)
        return [self._rounded(y) for y in outputs] if self.fmt in HALVES else outputs

    def _received(self, node: NodeProto, name: str, values: Values) -> Array:
        value = self.constants[name] if name in self.constants else values[name]
        if self.fmt in HALVES:
            return self._rounded(value, clamp=name in self.constants)
        if node.op_type not in CONTRACTIONS or name not in node.input[:2]:
            return value
        if name in self.constants:  # one scale for each output channel
            others = (1, 2, 3) if node.op_type == "Conv" else 1 if _transposed(node) else 0
            return quantized(value, np.abs(value).max(axis=others, keepdims=True), -127)
        return quantized(value, np.float32(self.absmax[name]), -128)

    def _rounded(self, value: Array, clamp: bool = False) -> Array:
        if value.dtype != np.float32:
            return value
        half = HALVES[self.fmt]
        with np.errstate(over="ignore"):
            if clamp:
                top = np.float32(ml_dtypes.finfo(half).max)
                value = np.clip(value, -top, top)
            return np.asarray(np.asarray(value).astype(half).astype(np.float32))

    def _node(self, node: NodeProto, values: Values) -> list[Array]:
        fed = {n: values[n] if n in values else self.constants[n] for n in node.input if n}
        if node.name not in self.sessions:
            self.sessions[node.name] = self._session(node, fed)
        session = self.sessions[node.name]
        wanted = {i.name for i in session.get_inputs()}
        return session.run(list(node.output), {n: v for n, v in fed.items() if n in wanted})

    def _session(self, node: NodeProto, fed: Values) -> ort.InferenceSession:
        fixed = [n for n in fed if n in self.constants and fed[n].dtype != np.float32]
        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), [None] * v.ndim)
            for n, v in fed.items()
            if n not in fixed
        ]
        outputs = [helper.make_empty_tensor_value_info(n) for n in node.output]
        weights = [numpy_helper.from_array(fed[n], n) for n in fixed]
        graph = helper.make_graph([node], "one", inputs, outputs, weights)
        model = helper.make_model(
            graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _value_dependent(model: ModelProto, constants: Mapping[str, Array]) -> set[str]:
    """Tensors that more than the shapes of the inputs decide."""
    found = {v.name for v in model.graph.input} - constants.keys()
    for node in model.graph.node:
        if node.op_type not in ("Shape", "Size") and not found.isdisjoint(node.input):
            found.update(node.output)
    return found


def _transposed(node: NodeProto) -> bool:
    return any(a.name == "transB" and a.i for a in node.attribute)


def quantized(value: Array, absmax: Array, lowest: int) -> Array:
    """Through symmetric INT8 and back, ties to even."""
    scale = (absmax / 127).astype(np.float32)
    scale = np.where(scale == 0, np.float32(1), scale)
    return (np.clip(np.rint(value / scale), lowest, 127) * scale).astype(np.float32)


def metrics(reference: Sequence[Array], candidate: Sequence[Array]) -> dict[str, float]:
    """Definitions in float64, over the batches together; everything must be finite."""
    ref = np.concatenate([r.astype(np.float64).reshape(-1) for r in reference])
    err = np.concatenate([c.astype(np.float64).reshape(-1) for c in candidate]) - ref
    cand = ref + err
    signal, noise = float(ref @ ref), float(err @ err)
    per_batch = [
        decibel(
            float(np.square(r.astype(np.float64)).sum()), float(np.square(c.astype(np.float64) - r).sum())
        )
        for r, c in zip(reference, candidate, strict=True)
    ]
    return {
        "sqnr_db": decibel(signal, noise),
        "rel_l2": math.sqrt(noise / signal) if signal else (math.inf if noise else 0.0),
        "cosine": float(ref @ cand) / math.sqrt(signal * float(cand @ cand)) if noise and signal else 1.0,
        "max_abs": float(np.abs(err).max(initial=0.0)),
        "mean_error": float(err.mean()),
        "worst_batch_sqnr_db": min(per_batch),
        "elements": float(ref.size),
        "reference_absmax": float(np.abs(ref).max(initial=0.0)),
    }


def decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
