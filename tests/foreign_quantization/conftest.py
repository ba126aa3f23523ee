"""A small model with data, and caches for it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """x (n x 4) -> MatMul `first` with w -> h -> Softmax `soft` -> p -> MatMul `second` with v -> y."""
    random = np.random.default_rng(5)
    weights = {"w": random.normal(size=(4, 6)), "v": random.normal(size=(6, 3))}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        helper.make_node("Softmax", ["h"], ["p"], "soft"),
        helper.make_node("MatMul", ["p", "v"], ["y"], "second"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three batches of numbers in -2..2; the largest magnitude is 2."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        values = np.random.default_rng(number).uniform(-2, 2, size=(8, 4)).astype(np.float32)
        values[0, 0] = -2
        np.savez(folder / f"{number}.npz", x=values)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Callable[..., Path]:
    """Writes a cache: pairs of name and scale (a number, or its eight hexadecimal digits)."""

    def write(*entries: tuple[str, float | str], algorithm: str = "MinMaxCalibration") -> Path:
        texts = [(name, s if isinstance(s, str) else struct.pack("!f", s).hex()) for name, s in entries]
        path = tmp_path / "given.cache"
        lines = [f"TRT-8601-{algorithm}", *(f"{name}: {text}" for name, text in texts)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write
