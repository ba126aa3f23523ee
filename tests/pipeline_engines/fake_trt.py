"""A FAKE TensorRT: it builds nothing and only records what weak typing asks of it.

Names follow TensorRT 10's Python API. It proves which calls are made, never that TensorRT accepts them: that
is what tests/gpu_weak is for.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np


class DataType(Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT64 = 3
    BF16 = 4


class BuilderFlag(Enum):
    FP16 = 0
    INT8 = 1
    BF16 = 2
    OBEY_PRECISION_CONSTRAINTS = 3


class Tensor:
    def __init__(self, dtype: DataType, *, is_output: bool = False) -> None:
        self.dtype = dtype
        self.is_shape_tensor = False
        self.is_network_output = is_output


class Layer:
    def __init__(self, name: str, kind: str, outputs: list[Tensor], node: str = "") -> None:
        self.name = name
        self.type = SimpleNamespace(name=kind)
        self.metadata = f"[ONNX Layer: {node}]" if node else ""
        self.precision: DataType | None = None
        self.output_types: dict[int, DataType] = {}
        self._outputs = outputs

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def get_output(self, slot: int) -> Tensor:
        return self._outputs[slot]

    def set_output_type(self, slot: int, dtype: DataType) -> None:
        self.output_types[slot] = dtype


class Network:
    def __init__(self, layers: list[Layer], inputs: dict[str, DataType]) -> None:
        self._layers = layers
        self._inputs = [SimpleNamespace(name=name, dtype=dtype) for name, dtype in inputs.items()]
        self.num_layers, self.num_inputs = len(layers), len(inputs)

    def get_layer(self, index: int) -> Layer:
        return self._layers[index]

    def get_input(self, index: int) -> Any:
        return self._inputs[index]


class Config:
    def __init__(self) -> None:
        self.flags: set[BuilderFlag] = set()
        self.int8_calibrator: Any = None

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)


class IInt8EntropyCalibrator2:
    def __init__(self) -> None:
        self.base_was_initialised = True


def module(version: str = "10.6.0", flags: type[Enum] = BuilderFlag) -> Any:
    """The fake module."""
    types = {DataType.FLOAT: np.float32, DataType.HALF: np.float16, DataType.INT64: np.int64}
    return SimpleNamespace(
        __version__=version,
        BuilderFlag=flags,
        DataType=DataType,
        IInt8EntropyCalibrator2=IInt8EntropyCalibrator2,
        nptype=types.__getitem__,
    )
