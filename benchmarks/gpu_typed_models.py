"""Typed models of one FP32 model, each built by TensorRT and run: whose is better than the others?

    python -m benchmarks.gpu_typed_models MODEL --data DIR --typed FOLDER

Needs a GPU and TensorRT. Prints one line of JSON a file: seconds to build, kernels, latency, whether equal
calls agree, elements that are not finite, and the relative L2 of each output to emulation and reference.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diag.engines.build import BuildOptions, build_tensorrt
from diag.engines.runner import Feed, OnnxRuntimeRunner, TensorRtRunner
from diag.errors import TrtdiagError
from diag.feeds import open_feeds
from diag.model.load import load_model
from diag.pipeline.engine.run import output_gaps


def main() -> None:
    """Build and run every model of the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--typed", required=True, type=Path)
    parser.add_argument("--opt-level", type=int, default=1)
    given = parser.parse_args()
    model = load_model(given.model)
    feed = open_feeds(given.data, model.inputs, 1).first()
    reference = OnnxRuntimeRunner(model).run(feed)
    for file in sorted(given.typed.glob("*.onnx")):
        try:
            found = _measure(file, feed, reference, given.opt_level)
        except TrtdiagError as error:
            found = {"problem": str(error)[:400]}
        print(f"{file.stem}: {json.dumps(found)}", flush=True)


def _measure(file: Path, feed: Feed, reference: Mapping[str, Any], opt_level: int) -> dict[str, Any]:
    profiles = {name: (array.shape,) * 3 for name, array in feed.items()}
    cache = file.with_name("timing.cache")
    options = BuildOptions(profiles=profiles, tf32=False, opt_level=opt_level, timing_cache=cache)
    built = build_tensorrt(file, file.with_suffix(".engine"), options=options)
    assert built.engine_path is not None
    with TensorRtRunner(built.engine_path) as runner:
        first, *others = [runner.run(feed) for _ in range(3)]
        latency = runner.latency(feed)
    emulated = OnnxRuntimeRunner.emulation(load_model(str(file))).run(feed)
    return {
        "build_s": round(built.seconds, 1),
        "kernels": len(built.kernels),
        "median_ms": round(latency.median_ms, 4),
        "equal_calls_agree": all(
            np.array_equal(o[n], first[n], equal_nan=True) for o in others for n in first
        ),
        "not_finite": {name: int((~np.isfinite(array)).sum()) for name, array in first.items()},
        "to_emulation": _rounded(output_gaps(emulated, first)),
        "to_reference": _rounded(output_gaps(reference, first)),
        "emulation_to_reference": _rounded(output_gaps(reference, emulated)),
    }


def _rounded(gaps: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{gap:.3g}" for name, gap in gaps.items()}


if __name__ == "__main__":
    main()
