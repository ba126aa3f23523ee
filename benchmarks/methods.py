"""Every calibration method of one table, by what it does to a model's outputs in INT8.

    trtdiag calibrate MODEL --data CALIBRATION --method best --out TABLE
    python -m benchmarks.methods MODEL --calibration TABLE --data HELD_OUT [--limit N]

prints for each method the SQNR and cosine of each output, emulated, against FP32 over all batches: what
`trtdiag compare` says of the outputs with a plan of that method.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from benchmarks.int8_fp16_variants import emulated, outputs, relative_l2
from diag.engines.onnxruntime import Array
from diag.feeds import open_feeds
from diag.pipeline.prepare import plan_on, read_scales
from diag.plan.schema import plan_for_format, plan_from_mapping

METHODS = ("minmax", "percentile", "entropy", "mse", "best")


def cosine(reference: list[dict[str, Array]], got: list[dict[str, Array]], name: str) -> float:
    """Of all elements of an output over all batches."""
    a, b = (np.concatenate([x[name].ravel().astype(np.float64) for x in found]) for found in (reference, got))
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.methods", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    planned = plan_on(given.model, plan_for_format("int8"))
    feeds = open_feeds(given.data, planned.model.inputs, given.limit)
    reference = outputs(planned.model, feeds)
    for method in METHODS:
        plan = {"schema": "trtdiag.plan/1", "default": "int8", "quantizer": {"method": method}}
        chosen = planned.with_plan(plan_from_mapping(plan))
        got = emulated(chosen.apply(read_scales(chosen, given.calibration)), feeds)
        figures = [
            f"{name} {-20 * math.log10(relative_l2(reference, got, name)):.1f} dB, "
            f"cosine {cosine(reference, got, name):.4f}"
            for name in reference[0]
        ]
        print(method, *figures, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
