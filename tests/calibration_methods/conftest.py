"""A small model with a convolution, a dead branch and a constant one, and batches for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """log(x) -> Conv -> Relu -> MatMul, beside MatMuls of zeros and of ones; input x (n, 3, 8, 8)."""
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(_model(), path)
    return path


def _model(seed: int = 0) -> onnx.ModelProto:
    random = np.random.default_rng(seed)
    weights = {
        "kernel": random.normal(size=(4, 3, 3, 3)),
        "w": random.normal(size=(8, 5)),
        "nought": np.zeros(1),
        "one": np.ones(1),
        "bias": random.normal(size=4),
    }
    nodes = [
        helper.make_node("Log", ["x"], ["logs"], name="log"),
        helper.make_node("Conv", ["logs", "kernel", "bias"], ["convolved"], name="conv", pads=[1] * 4),
        helper.make_node("Relu", ["convolved"], ["hidden"], name="relu"),
        helper.make_node("MatMul", ["hidden", "w"], ["y"], name="linear"),
        helper.make_node("Mul", ["hidden", "nought"], ["zeros"], name="erase"),
        helper.make_node("MatMul", ["zeros", "w"], ["y0"], name="of_zeros"),
        helper.make_node("Add", ["zeros", "one"], ["ones"], name="fill"),
        helper.make_node("MatMul", ["ones", "w"], ["y1"], name="of_ones"),
        helper.make_node("Transpose", ["hidden"], ["turned"], name="turn", perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["hidden", "turned"], ["y2"], name="dynamic"),
    ]
    floats = TensorProto.FLOAT
    outputs = [helper.make_tensor_value_info(name, floats, None) for name in ("y", "y0", "y1", "y2")]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", floats, ["n", 3, 8, 8])],
        outputs,
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def batch(seed: int, samples: int = 4) -> np.ndarray:
    """Positive numbers over a range that differs from batch to batch."""
    random = np.random.default_rng(seed)
    logs = random.standard_t(3, size=(samples, 3, 8, 8)) * (1 + seed % 3)
    return np.exp(np.clip(logs, -60, 60)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes batches of the given seeds into a folder; `bad` maps seeds to a value put into their batch."""

    def write(name: str, *seeds: int, bad: dict[int, float] | None = None, samples: int = 4) -> Path:
        target = tmp_path / name
        target.mkdir()
        for seed in seeds:
            values = batch(seed, samples)
            if bad and seed in bad:
                values[1, 2, 3, 4] = bad[seed]
            np.savez(target / f"{seed:03d}.npz", x=values)
        return target

    return write
