"""Errors of the tensors between kernels, in the engine that ships: debug tensors, reduced on the GPU.

TensorRT 10.12 or later and TensorRT-RTX, built with `marks="unfused"`: the fusion stays as it is, and what
lies between kernels can be listened to. This project's GPU machine has TensorRT 10.6, whose debug marks crash
the builder: there the listener was run on tensors of every format, but no engine has called it yet. What a
kernel fused away is never reported; nothing promises that the rest is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from diag.engines.on_device import DeviceMeters
from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, TensorRtRunner
from diag.numerics.error import ErrorSums
from diag.numerics.measured import TensorKind

_TYPES = {  # TensorRT's name: how CUDA's array interface spells it, and torch's type where that differs
    "FLOAT": ("<f4", ""), "HALF": ("<f2", ""), "BF16": ("<i2", "bfloat16"), "FP8": ("|u1", "float8_e4m3fn"),
}  # fmt: skip


def can_observe(flavour: str, version: str) -> bool:
    """Whether tensors between the shipped kernels can be read."""
    parts = tuple(int(p) for p in version.split(".")[:2] if p.isdigit())
    return flavour == "tensorrt-rtx" or parts >= (10, 12)


def observe(
    runner: TensorRtRunner, trt: Any, torch: Any, feed: Feed, references: Mapping[str, Array]
) -> dict[str, ErrorSums]:
    """Run one batch of an engine with unfused debug tensors; error sums of those that `references` names.

    A tensor whose number of elements is not the reference's (another layout) is left out.
    """
    listener = make_listener(trt, torch, references)
    runner.context.set_debug_listener(listener)
    runner.context.unfused_tensors_debug_state = True
    runner.run(feed)
    runner.context.unfused_tensors_debug_state = False
    return dict(listener.found)


class _Address:
    """A device address as CUDA's array interface, which torch reads without a copy."""

    def __init__(self, address: int, shape: tuple[int, ...], spelling: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": spelling,
            "version": 3,
        }


def make_listener(trt: Any, torch: Any, references: Mapping[str, Array]) -> Any:
    """TensorRT's debug listener: takes the error sums of every float tensor that `references` names."""

    class Listener(trt.IDebugListener):  # type: ignore[misc]  # the base class is known only at run time
        def __init__(self) -> None:
            trt.IDebugListener.__init__(self)  # pybind11 wants the base called by name
            self.found: dict[str, ErrorSums] = {}

        def process_debug_tensor(
            self, addr: int, location: Any, type_: Any, shape: Any, name: str, stream: int
        ) -> bool:
            """Called while the engine runs; the address is valid in here only."""
            reference = references.get(name)
            known = _TYPES.get(type_.name)
            size = int(np.prod(tuple(shape)))
            if reference is None or known is None or size != reference.size or location.name != "DEVICE":
                return True
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                values = torch.as_tensor(_Address(addr, tuple(shape), known[0]), device="cuda")
                if known[1]:
                    values = values.view(getattr(torch, known[1]))
                meters = DeviceMeters(torch, [(values.reshape(reference.shape), TensorKind())])
                meters.bring([reference])
                meters.start()
                torch.cuda.current_stream().synchronize()
                self.found[name] = meters.results()[0].sums
            return True

    return Listener()
