"""Small models, quantized by ONNX Runtime or by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

SHAPES = {"cnn": (3, 8, 8), "mlp": (4, 16)}
FLOAT = TensorProto.FLOAT


def build(
    path: Path, nodes: list[onnx.NodeProto], constants: dict[str, Any], x: list[int], opset: int = 19
) -> Path:
    """A model from x to y; constants are arrays."""
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", FLOAT, x)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), path)
    return path


def cnn(path: Path) -> Path:
    """Conv, Relu, Conv, residual Add, Relu, ConvTranspose, pooling, Gemm."""
    random = np.random.default_rng(0)
    shapes = {
        "k1": (8, 3, 3, 3), "b1": (8,), "k2": (8, 8, 3, 3), "b2": (8,),
        "kt": (8, 4, 2, 2), "fc": (4, 10), "fb": (10,),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "k1", "b1"], ["c1"], "conv1", pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "k2", "b2"], ["c2"], "conv2", pads=[1] * 4),
        helper.make_node("Add", ["c2", "r1"], ["s"], "add"),
        helper.make_node("Relu", ["s"], ["r2"], "relu2"),
        helper.make_node("ConvTranspose", ["r2", "kt"], ["t"], "convt", strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["t"], ["g"], "gap"),
        helper.make_node("Flatten", ["g"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "fc", "fb"], ["y"], "gemm"),
    ]
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return build(path, nodes, weights, ["n", 3, 8, 8], 17)  # type: ignore[list-item]


def mlp(path: Path) -> Path:
    """MatMuls with biases, a residual Add, a norm and an attention."""
    random = np.random.default_rng(1)
    shapes = {"w1": (16, 32), "b1": (32,), "w2": (32, 16), "b2": (16,)}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["m1"], "m1"),
        helper.make_node("Add", ["m1", "b1"], ["a1"], "a1"),
        helper.make_node("Relu", ["a1"], ["r1"], "r1"),
        helper.make_node("MatMul", ["r1", "w2"], ["m2"], "m2"),
        helper.make_node("Add", ["m2", "b2"], ["a2"], "a2"),
        helper.make_node("Add", ["a2", "x"], ["s"], "res"),
        helper.make_node("LayerNormalization", ["s", "g", "bb"], ["l"], "ln"),
        helper.make_node("Transpose", ["l"], ["lt"], "tr", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["l", "lt"], ["qk"], "qk"),
        helper.make_node("Softmax", ["qk"], ["p"], "sm"),
        helper.make_node("MatMul", ["p", "l"], ["y"], "pv"),
    ]
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {"g": np.ones(16, np.float32), "bb": np.zeros(16, np.float32)}
    return build(path, nodes, weights, ["n", 4, 16], 17)  # type: ignore[list-item]


MAKERS = {"cnn": cnn, "mlp": mlp}


def batch(kind: str, seed: int, samples: int = 4) -> np.ndarray:
    """Normal numbers in the shape of a model's input."""
    return np.random.default_rng(seed).normal(size=(samples, *SHAPES[kind])).astype(np.float32)


def quantized_by_ort(folder: Path, kind: str, *, per_channel: bool, symmetric: bool) -> tuple[Path, Path]:
    """The float model, and what ONNX Runtime's static quantizer makes of it (INT8, or UINT8 activations)."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Batches(CalibrationDataReader):
        def __init__(self) -> None:
            self._batches = iter([{"x": batch(kind, seed)} for seed in range(4)])

        def get_next(self) -> Any:
            return next(self._batches, None)

    fp32, out = MAKERS[kind](folder / f"{kind}.onnx"), folder / f"{kind}.qdq.onnx"
    quantize_static(
        str(fp32),
        str(out),
        Batches(),
        quant_format=QuantFormat.QDQ,
        per_channel=per_channel,
        activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": symmetric},
    )
    return fp32, out


def run_plainly(path: Path, x: np.ndarray) -> np.ndarray:
    """The output by ONNX Runtime, nothing optimised."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": x})[0]
    return result
