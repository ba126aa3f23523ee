"""The best method, against layers computed with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from test_tables import made

from diag.numerics.calibrate import METHODS, int8_error


def test_costs_are_those_of_the_layers_outputs(model, folder, tmp_path):
    data = folder("all", 0, 1, 2)
    table = made(model, data, tmp_path / "t.json", method="best")
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    from diag.model.load import load_model

    loaded = load_model(str(model))
    proto = loaded.proto
    weights = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    evaluator = ReferenceEvaluator(proto)
    found = table.tensors["hidden"]
    for method in METHODS:
        limit = found.methods[method].absmax
        shares: dict[str, list[np.ndarray]] = {"linear": [], "dynamic": []}
        for file in sorted(data.iterdir()):
            values = evaluator.run(None, {"x": np.load(file)["x"]}, intermediate=True)
            hidden, turned = values["hidden"].astype(np.float32), values["turned"].astype(np.float32)
            error = int8_error(hidden, limit).astype(np.float64)
            for layer, other in (("linear", weights["w"]), ("dynamic", turned)):
                signal = ((hidden @ other).astype(np.float64) ** 2).sum(axis=-1)
                noise = ((error @ other) ** 2).sum(axis=-1)
                shares[layer].append(noise[signal > 1e-12] / signal[signal > 1e-12])
        expected = np.mean([np.concatenate(found).mean() for found in shares.values()])
        assert 10 ** (-found.methods[method].output_sqnr_db / 10) == pytest.approx(expected, rel=1e-3)


def test_the_best_is_the_one_with_the_least_cost(model, folder, tmp_path):
    table = made(model, folder("all", *range(12)), tmp_path / "t.json", method="best")
    assert table.method == "best" and len(table.sampled_batches) == 8
    for name in ("logs", "hidden", "turned"):
        found = table.tensors[name]
        costs = {method: cost.output_sqnr_db for method, cost in found.methods.items()}
        assert costs[found.best] == max(costs.values())
        assert table.scales("int8")[name] == pytest.approx(found.methods[found.best].absmax / 127)
    assert table.tensors["zeros"].best == "minmax"
    assert table.tensors["ones"].methods["minmax"].output_sqnr_db > 100


def test_processes_and_bad_batches_change_nothing(model, folder, tmp_path):
    made(model, folder("clean", 1, 2, 4), tmp_path / "clean.json", method="best")
    bad = folder("bad", *range(5), bad={0: np.nan, 3: 0.0})
    made(model, bad, tmp_path / "bad.json", method="best", skip_bad=True, jobs=2)
    from diag.calibration.table import read_table

    clean, mended = read_table(tmp_path / "clean.json"), read_table(tmp_path / "bad.json")
    for name, found in clean.tensors.items():
        assert mended.tensors[name].best == found.best
        assert mended.tensors[name].methods == found.methods
