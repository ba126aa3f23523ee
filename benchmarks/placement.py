"""`placement: inputs` beside `placement: fused`: error, and what TensorRT-RTX compiles, on one model.

    python -m benchmarks.placement MODEL --data DATA [--limit 2] [--base fp16] [--pin role=residual_add:int8]

prints a line for each placement: error of the emulation against FP32, kernels, those that read or write INT8,
those that only move or convert, and the megabytes that kernels write, by type, at the shapes of the first
batch. Ranges are min-max of `--calibration-data` (else of the same data). No GPU is needed.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx import ModelProto

from benchmarks.int8_fp16_variants import emulated, outputs, relative_l2
from diag.engines.build import BuildOptions, build_rtx
from diag.feeds import open_feeds
from diag.kernels.kernel import WIDTH_BITS, Kernel
from diag.model.save import save_model
from diag.pipeline.prepare import calibrate, plan_on
from diag.plan.schema import Plan, plan_from_mapping
from diag.progress import Silent

PLACEMENTS = ("inputs", "fused")


def plan_of(placement: str, base: str, pins: Sequence[str]) -> Plan:
    """The INT8 plan; a pin is written KEY=VALUE:FORMAT, for example role=residual_add:int8."""
    made = []
    for pin in pins:
        target, _, fmt = pin.rpartition(":")
        key, _, value = target.partition("=")
        made.append({key: value, "format": fmt})
    values = {"schema": "trtdiag.plan/1", "default": "int8", "base": base, "pins": made}
    return plan_from_mapping({**values, "placement": placement})


def fixed(proto: ModelProto, shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """The model for these input shapes only, so that kernels show theirs."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    for value in copy.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            dim.dim_value = size
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    return copy


def kernel_facts(kernels: Sequence[Kernel]) -> dict[str, str]:
    """Counts of kernels, and what they write."""
    written: Counter[str] = Counter()
    for kernel in kernels:
        for tensor in kernel.outputs:
            written[tensor.dtype] += math.prod(tensor.dims) * WIDTH_BITS.get(tensor.dtype, 0) // 8
    return {
        "kernels": str(len(kernels)),
        "INT8 kernels": str(sum("int8" in kernel.dtypes for kernel in kernels)),
        "reformats": str(sum(kernel.is_reformat for kernel in kernels)),
        "MB written": ", ".join(f"{t} {n / 1e6:.2f}" for t, n in sorted(written.items()) if n) or "-",
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.placement", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--calibration-data")
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--base", default="fp32")
    parser.add_argument("--pin", action="append", default=[])
    given = parser.parse_args()
    for placement in PLACEMENTS:
        planned = plan_on(given.model, plan_of(placement, given.base, given.pin))
        feeds = open_feeds(given.data, planned.model.inputs, given.limit)
        ranges = open_feeds(given.calibration_data or given.data, planned.model.inputs)
        typed = planned.apply(calibrate(planned, ranges, None, Silent())[0])
        reference = outputs(planned.model, feeds)
        got = emulated(typed, feeds)
        errors = [f"{n} {-20 * math.log10(relative_l2(reference, got, n)):.2f} dB" for n in reference[0]]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "typed.onnx"
            save_model(fixed(typed.for_engines, feeds.shapes()), typed.weights, path)
            facts = kernel_facts(build_rtx(path, options=BuildOptions(timeout_s=300)).kernels)
        print(placement, *errors, *(f"{key} {value}" for key, value in facts.items()), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
