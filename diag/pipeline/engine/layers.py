"""Errors of the tensors between the shipped kernels, where TensorRT lets them be read (10.12 on, RTX)."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

from diag.engines.debug_tensors import observe
from diag.engines.onnxruntime import Session
from diag.engines.reference import with_outputs
from diag.engines.runner import Feed, TensorRtRunner
from diag.engines.tensorrt import load
from diag.model.graph import Model
from diag.numerics.error import ErrorSums
from diag.numerics.metrics import error_metrics
from diag.report.schema import Metrics


def observed_layers(engine: Path, model: Model, feeds: Iterable[Feed]) -> dict[str, Metrics]:
    """Metrics of every tensor that the engine shows under a name of the model's, over all batches.

    Holds the reference's tensors of one batch. Not run by this project: see `diag.engines.debug_tensors`.
    """
    names = [name for layer in model.layers for name in layer.outputs if name in model.value_dependent]
    session = Session(with_outputs(model.proto, names), model.weights)
    sums: dict[str, ErrorSums] = {}
    with TensorRtRunner(engine) as runner:
        trt = load("tensorrt-rtx" if runner.stamp.flavour == "tensorrt-rtx" else "tensorrt")
        torch = importlib.import_module("torch")
        for feed in feeds:
            values = session.run(feed)
            references = {name: value for name, value in values.items() if value.dtype.kind == "f"}
            for name, seen in observe(runner, trt, torch, feed, references).items():
                sums.setdefault(name, ErrorSums()).add(seen)
    return {name: error_metrics(total) for name, total in sums.items()}
