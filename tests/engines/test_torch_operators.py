"""Every operator of diag.engines.torch_ops against ONNX Runtime, where attributes and shapes matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from diag.engines.onnxruntime import Session
from diag.engines.torch_ops import OPERATORS
from diag.model.load import from_proto

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


X, ROWS, IMAGE = _normal(2, 3, 4), _normal(3, 5), _normal(2, 4, 7, 7)
POSITIVE = np.abs(X) + np.float32(0.1)

Case = tuple[str, list[Any], dict[str, Any], int]
"""Operator, inputs (None: absent), attributes, opset."""

ANY = ["Abs", "Cos", "Erf", "Exp", "Neg", "Relu", "Sigmoid", "Sin", "Tanh", "Identity", "Softsign"]
BENT = ["HardSwish", "Mish", "Softplus", "HardSigmoid", "LeakyRelu", "Elu", "Dropout"]
PLAIN: list[Case] = [(op, [X], {}, 17) for op in ANY]
PLAIN += [(op, [3 * X], {}, 18) for op in BENT]
PLAIN += [(op, [POSITIVE], {}, 17) for op in ["Log", "Sqrt", "Reciprocal"]]
PLAIN += [(op, [X, _normal(3, 1)], {}, 17) for op in ["Add", "Sub", "Mul", "Div"]]
PLAIN += [(op, [X, _normal(4), _normal(3, 1)], {}, 17) for op in ["Sum", "Max", "Min"]]
PLAIN += [("Pow", [POSITIVE, np.float32(1.7)], {}, 17), ("Where", [X > 0, X, _normal(4)], {}, 17)]

REDUCE = ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare"]
REDUCED: list[Case] = [(op, [X, _ints(0, -1)], {"keepdims": 0}, 18) for op in REDUCE]
REDUCED += [(op, [X], {}, 18) for op in REDUCE]
REDUCED += [("ReduceMean", [X], {"axes": [1], "keepdims": 1}, 17)]
REDUCED += [("ReduceSum", [X, None], {"noop_with_empty_axes": 1}, 18)]

MATRICES: list[Case] = [
    ("MatMul", [X, _normal(2, 4, 5)], {}, 17),
    ("MatMul", [X, _normal(4)], {}, 17),
    ("Gemm", [ROWS, _normal(5, 2), _normal(2)], {"alpha": 0.5, "beta": 2.0}, 17),
    ("Gemm", [ROWS.T.copy(), _normal(2, 5)], {"transA": 1, "transB": 1}, 17),
    (
        "Conv",
        [IMAGE, _normal(6, 2, 3, 3), _normal(6)],
        {"group": 2, "pads": [0, 1, 2, 1], "strides": [2, 1]},
        17,
    ),
    ("Conv", [IMAGE, _normal(6, 4, 3, 3)], {"dilations": [2, 2]}, 17),
    ("Conv", [X, _normal(5, 3, 2)], {}, 17),
    (
        "ConvTranspose",
        [IMAGE, _normal(4, 3, 4, 4), _normal(3)],
        {"strides": [2, 2], "pads": [1, 1, 1, 1]},
        17,
    ),
]

NORMS: list[Case] = [
    ("Softmax", [X], {"axis": 1}, 17),
    ("Softmax", [X], {}, 17),
    ("LogSoftmax", [X], {"axis": -1}, 17),
    ("LayerNormalization", [X, _normal(4), _normal(4)], {"epsilon": 0.1}, 17),
    ("LayerNormalization", [X, _normal(3, 4)], {"axis": 1}, 17),
    ("RMSNormalization", [X, _normal(4)], {"epsilon": 0.1}, 23),
    (
        "BatchNormalization",
        [IMAGE, _normal(4), _normal(4), _normal(4), np.abs(_normal(4))],
        {"epsilon": 0.1},
        17,
    ),
]

SHAPED: list[Case] = [
    ("Reshape", [X, _ints(0, -1)], {}, 17),
    ("Flatten", [X], {"axis": 2}, 17),
    ("Transpose", [X], {}, 17),
    ("Transpose", [X], {"perm": [1, 2, 0]}, 17),
    ("Squeeze", [X[:, :1], _ints(1)], {}, 17),
    ("Squeeze", [X[:, :1]], {}, 17),
    ("Unsqueeze", [X, _ints(0, -1)], {}, 17),
    ("Expand", [X[:, :1], _ints(5, 1, 3, 1)], {}, 17),
    ("Split", [X, _ints(1, 3)], {"axis": -1}, 17),
    ("Split", [X], {"axis": 2}, 17),
    ("Slice", [X, _ints(3, 0), _ints(-10, 2), _ints(2, 1), _ints(-2, 1)], {}, 17),
    ("Slice", [X, _ints(1), _ints(2)], {}, 17),
    ("Gather", [X, np.array([[0, -1], [2, 1]])], {"axis": 1}, 17),
    ("Concat", [X, _normal(2, 1, 4)], {"axis": 1}, 17),
    ("Tile", [X, _ints(1, 2, 3)], {}, 17),
    ("Cast", [X], {"to": TensorProto.DOUBLE}, 17),
    ("Clip", [X, np.float32(-0.5), np.float32(0.5)], {}, 17),
    ("Clip", [X, None, np.float32(0.5)], {}, 17),
    ("Pad", [X, _ints(0, 1, 2, 0, 0, 1), np.float32(3)], {}, 17),
    ("Gelu", [X], {}, 20),
    ("Gelu", [X], {"approximate": "tanh"}, 20),
]

IMAGES: list[Case] = [
    ("MaxPool", [IMAGE], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, 17),
    ("GlobalAveragePool", [IMAGE], {}, 17),
    ("Resize", [IMAGE, None, None, _ints(2, 4, 9, 12)], {"mode": "linear"}, 17),
    ("Resize", [IMAGE, None, None, _ints(2, 4, 9, 12)], {"mode": "cubic"}, 17),
    ("Resize", [IMAGE, None, np.float32([1, 1, 2, 2])], {"mode": "nearest", "nearest_mode": "floor",
     "coordinate_transformation_mode": "asymmetric"}, 17),
    ("Resize", [IMAGE, None, None, _ints(2, 4, 9, 12)],
     {"mode": "linear", "coordinate_transformation_mode": "align_corners"}, 17),
]  # fmt: skip

CASES = PLAIN + REDUCED + MATRICES + NORMS + SHAPED + IMAGES


def test_every_operator_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(OPERATORS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_an_operator_computes_what_onnx_runtime_computes(case: Case) -> None:
    op, inputs, attributes, opset = case
    names = ["" if value is None else f"i{n}" for n, value in enumerate(inputs)]
    outputs = ["o0", "o1"] if op == "Split" else ["o0"]
    node = helper.make_node(op, names, outputs, name="layer", **attributes)
    feed = {name: np.asarray(v) for name, v in zip(names, inputs, strict=True) if name}
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in feed.items()
    ]
    graph = helper.make_graph([node], "g", given, [helper.make_empty_tensor_value_info(n) for n in outputs])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    expected = Session(proto, {}).run(feed)
    layer = from_proto(proto).layers[0]
    tensors = [torch.from_numpy(np.array(feed[name])) if name else None for name in names]
    made = OPERATORS[op](layer, *tensors)
    parts = made if isinstance(made, tuple) else (made,)
    for name, part in zip(outputs, parts, strict=True):
        assert tuple(part.shape) == expected[name].shape
        np.testing.assert_allclose(part.numpy(), expected[name], rtol=2e-5, atol=2e-6)
