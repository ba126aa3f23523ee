"""AMD Quark's auto mixed precision on a model; a script for an interpreter with amd-quark, without trtdiag.

    python search_peer_quark.py MODEL DATA OUT --sqnr-db 20 [--everything]

INT8 (min-max on DATA, symmetric, a scale for each tensor), then Conv, Gemm and MatMul promoted to INT16 one
by one until the SQNR of the first output on DATA reaches the target. INT8 is put where TensorRT has it, in
front of Conv, Gemm and MatMul; `--everything` is Quark's own choice, all operators and their outputs. Writes
the mixed model to OUT and prints one JSON object: seconds, evaluations (each runs all of DATA), candidates,
promoted.
"""

import argparse
import json
import logging
import re
import sys
import time
from pathlib import Path

import numpy as np
from onnxruntime.quantization.calibrate import CalibrationDataReader
from quark.onnx import (
    AutoMixprecisionConfig,
    CalibMethod,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
)
from quark.version import __version__

LAYERS = ["Conv", "ConvTranspose", "Gemm", "MatMul"]


class Batches(CalibrationDataReader):
    """The .npz files of a folder, as Quark reads them."""

    def __init__(self, folder: str) -> None:
        self._files = sorted(Path(folder).glob("*.npz"))
        self.rewind()

    def rewind(self) -> None:
        self._left = iter(self._files)

    def get_next(self) -> dict[str, np.ndarray] | None:
        file = next(self._left, None)
        return None if file is None else dict(np.load(file))


class Sqnr:
    """Negative SQNR in dB of one output over all batches (to Quark less is better); keeps every value."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, reference: list[list[np.ndarray]], candidate: list[list[np.ndarray]]) -> float:
        pairs = [
            (a[0].astype(np.float64), b[0].astype(np.float64))
            for a, b in zip(reference, candidate, strict=True)
        ]
        signal, noise = sum((a**2).sum() for a, _ in pairs), sum(((a - b) ** 2).sum() for a, b in pairs)
        self.values.append(float(10 * np.log10(signal / noise)))
        return -self.values[-1]


class Promoted(logging.Handler):
    """Reads from Quark's log how many nodes it promoted, and of how many."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = (0, 0)

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"promoted (\d+) node\(s\) out of (\d+) candidate", record.getMessage()):
            self.counts = int(found[1]), int(found[2])


def layer(spec: type[Int8Spec]) -> QLayerConfig:
    return QLayerConfig(
        activation=spec(calibration_method=CalibMethod.MinMax),
        weight=spec(calibration_method=CalibMethod.MinMax),  # per channel, promoting fails in 0.13
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "out"):
        parser.add_argument(name)
    parser.add_argument("--sqnr-db", type=float, required=True)
    parser.add_argument("--everything", action="store_true")
    args = parser.parse_args()
    began, sqnr, promoted = time.monotonic(), Sqnr(), Promoted()
    logging.getLogger("quark.onnx.algorithm.mprecision.mixing_executor_screen").addHandler(promoted)
    mixed = AutoMixprecisionConfig(
        layer(Int16Spec),
        LAYERS,
        metric_distance_fn=sqnr,
        metric_threshold=-args.sqnr_db,
        metric_optimize_object="quality",
    )
    as_tensorrt = {
        "OpTypesToQuantize": LAYERS,
        "OpTypesToExcludeOutputQuantization": LAYERS,
    }
    config = QConfig(layer(Int8Spec), algo_config=[mixed], **({} if args.everything else as_tensorrt))
    ModelQuantizer(config).quantize_model(args.model, args.out, Batches(args.data))
    found = {
        "version": __version__,
        "seconds": time.monotonic() - began,
        "evaluations": len(sqnr.values),
        "candidates": promoted.counts[1],
        "promoted": promoted.counts[0],
        "sqnr_db": {"all in INT8": sqnr.values[0], "in the end": sqnr.values[-1]},
    }
    sys.stdout.write(json.dumps(found) + "\n")


main()
