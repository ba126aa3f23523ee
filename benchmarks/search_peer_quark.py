"""AMD Quark's auto mixed precision on a model; a script for an interpreter with amd-quark, without trtdiag.

    python search_peer_quark.py MODEL DATA OUT --target top1>=0.99 [--everything]

INT8 (min-max on DATA, symmetric, a scale for each tensor), then Conv, Gemm and MatMul promoted to INT16 one
by one until the target holds for the first output on DATA: top1, kl or sqnr_db as trtdiag defines them for
class probabilities. INT8 is put on the inputs and outputs of Conv, Gemm and MatMul (without outputs promoting
fails in 0.13); `--everything` is Quark's own choice, all operators. Writes the mixed model to OUT and prints
one JSON object: seconds, evaluations (each runs all of DATA), candidates, promoted, the metric at both ends.
"""

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Callable
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


Pairs = list[tuple[np.ndarray, np.ndarray]]


def top1(pairs: Pairs) -> float:
    """Share of rows whose largest element is the reference's."""
    return float(np.concatenate([(a.argmax(-1) == b.argmax(-1)).ravel() for a, b in pairs]).mean())


def kl(pairs: Pairs) -> float:
    """Mean Kullback-Leibler divergence of a row, in nats."""
    tiny = 2.0**-149
    rows = [
        (a * (np.log(np.maximum(a, tiny)) - np.log(np.maximum(b, tiny)))).sum(-1).ravel() for a, b in pairs
    ]
    return float(np.concatenate(rows).mean())


def sqnr_db(pairs: Pairs) -> float:
    """Energy of the reference over energy of the error, all batches together."""
    signal, noise = sum((a**2).sum() for a, _ in pairs), sum(((a - b) ** 2).sum() for a, b in pairs)
    return float(10 * np.log10(signal / noise))


def to_minimise(measure: Callable[[Pairs], float], sign: int, values: list[float]) -> Callable[..., float]:
    """What Quark minimises: `sign` times a metric of the first output. A function: Quark copies objects."""

    def distance(reference: list[list[np.ndarray]], candidate: list[list[np.ndarray]]) -> float:
        outputs = zip(reference, candidate, strict=True)
        values.append(measure([(a[0].astype(np.float64), b[0].astype(np.float64)) for a, b in outputs]))
        return sign * values[-1]

    return distance


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
    parser.add_argument("--target", required=True)
    parser.add_argument("--everything", action="store_true")
    args = parser.parse_args()
    name, direction, bound = re.fullmatch(r"(\w+)([<>])=([\d.]+)", args.target).groups()
    sign, values = (1 if direction == "<" else -1), []
    began, promoted = time.monotonic(), Promoted()
    logging.getLogger("quark.onnx.algorithm.mprecision.mixing_executor_screen").addHandler(promoted)
    mixed = AutoMixprecisionConfig(
        layer(Int16Spec),
        LAYERS,
        metric_distance_fn=to_minimise({"top1": top1, "kl": kl, "sqnr_db": sqnr_db}[name], sign, values),
        metric_threshold=sign * float(bound),
        metric_optimize_object="quality",
        data_size=len(list(Path(args.data).glob("*.npz"))),  # its default, said to be all, measures one batch
    )
    layers = {} if args.everything else {"OpTypesToQuantize": LAYERS}
    config = QConfig(layer(Int8Spec), algo_config=[mixed], AddQDQPairToWeight=True, **layers)
    ModelQuantizer(config).quantize_model(args.model, args.out, Batches(args.data))
    found = {
        "version": __version__,
        "seconds": time.monotonic() - began,
        "evaluations": len(values),
        "candidates": promoted.counts[1],
        "promoted": promoted.counts[0],
        name: {"all in INT8": values[0], "in the end": values[-1]},
    }
    sys.stdout.write(json.dumps(found) + "\n")


main()
