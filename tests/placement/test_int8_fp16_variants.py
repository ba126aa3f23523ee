"""The GPU experiment's models: each a right model, and the same numbers said in another way."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from benchmarks.int8_fp16_hypotheses import FP16_NORMAL, hypotheses, products
from benchmarks.int8_fp16_variants import INT8_FP16, emulated, relative_l2, variants
from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Array, Session
from diag.feeds import open_feeds
from diag.model.save import embedded
from diag.pipeline.calibrate.tables import calibrate_model
from diag.pipeline.prepare import Planned, plan_on, read_scales
from diag.progress import Silent
from diag.typed.apply import TypedModel
from fixtures.graphs import Dims, bert


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Planned, str, str]:
    folder = tmp_path_factory.mktemp("variants")
    fixture = bert(Dims(hidden=32, heads=2, ffn=64, blocks=1, seq_len=16, batch=2, seq=8))
    onnx.save(fixture.model, folder / "model.onnx")
    np.savez(folder / "batch.npz", **fixture.batch(2))
    data, table = str(folder / "batch.npz"), str(folder / "table.json")
    calibrate_model(str(folder / "model.onnx"), data, table, None, Silent())
    return plan_on(str(folder / "model.onnx"), INT8_FP16), table, data


@pytest.fixture(scope="module")
def made(case: tuple[Planned, str, str]) -> dict[str, TypedModel]:
    return dict(variants(case[0], case[1]))


def reference(planned: Planned, data: str) -> list[dict[str, Array]]:
    session = Session(planned.model.proto, planned.model.weights)
    return [session.run(feed) for feed in open_feeds(data, planned.model.inputs)]


def test_each_is_right_and_runs(case: tuple[Planned, str, str], made: dict[str, TypedModel]) -> None:
    planned, _, data = case
    feeds = open_feeds(data, planned.model.inputs)
    exact = reference(planned, data)
    errors = {}
    for name, typed in made.items():
        whole = embedded(typed.proto, typed.weights)
        onnx.checker.check_model(whole, full_check=True)
        plain = [Session(typed.proto, typed.weights).run(feed) for feed in feeds]
        for got in (plain, emulated(typed, feeds)):
            errors[name] = max(relative_l2(exact, got, output) for output in exact[0])
            assert errors[name] < 0.1, name
    assert errors["large-scales"] == errors["today"]  # powers of two round nothing
    assert errors["attention-only"] < errors["today"]


def types_of_scales(typed: TypedModel) -> set[int]:
    stored = {t.name: t.data_type for t in typed.proto.graph.initializer}
    return {stored[n.input[1]] for n in typed.proto.graph.node if n.op_type == "DequantizeLinear"}


def products_write(typed: TypedModel) -> set[int]:
    whole = onnx.shape_inference.infer_shapes(embedded(typed.proto, typed.weights), strict_mode=True)
    known = {v.name: v.type.tensor_type.elem_type for v in (*whole.graph.value_info, *whole.graph.output)}
    return {known[n.output[0]] for n in whole.graph.node if n.op_type == "MatMul"}


def test_each_differs_in_what_it_says(made: dict[str, TypedModel]) -> None:
    half, single = {TensorProto.FLOAT16}, {TensorProto.FLOAT}
    assert (types_of_scales(made["today"]), products_write(made["today"])) == (half, half)
    assert (types_of_scales(made["fp32-scales"]), products_write(made["fp32-scales"])) == (single, half)
    assert (types_of_scales(made["fp32-products"]), products_write(made["fp32-products"])) == (single, single)


def test_large_scales_leaves_no_subnormal_product(made: dict[str, TypedModel]) -> None:
    typed = made["large-scales"]
    constants = typed.model.constants
    producer = {name: node for node in typed.proto.graph.node for name in node.output}
    for node in (n for n in typed.proto.graph.node if n.op_type == "MatMul"):
        scales = [constants[producer[name].input[1]].astype(np.float64) for name in node.input]
        assert (scales[0] * scales[1]).min() >= FP16_NORMAL


def test_a_flushed_product_costs_what_it_carried(case: tuple[Planned, str, str]) -> None:
    """With every scale product subnormal, flushing loses everything; with none, nothing."""
    planned, table, data = case
    typed = planned.apply(read_scales(planned, table))
    loaded = read_scales(planned, table)
    assert loaded is not None
    exact = products(planned, loaded.scales("int8"))
    feeds = open_feeds(data, planned.model.inputs)

    def outputs(name: str, given: dict[str, np.ndarray]) -> list[dict[str, Array]]:
        found = hypotheses(given)[name](emulate(typed.model))
        session = Session(found.proto, found.weights)
        return [session.run(feed) for feed in feeds]

    plain = outputs("emulated", dict(exact))
    large = {layer: np.full_like(p, 1.0) for layer, p in exact.items()}
    small = {layer: np.full_like(p, 2.0**-15) for layer, p in exact.items()}
    name = next(iter(plain[0]))
    assert relative_l2(plain, outputs("flushed", large), name) == 0
    assert relative_l2(plain, outputs("saturated", large), name) == 0
    assert relative_l2(plain, outputs("rounded", small), name) == 0  # exact in FP16, though subnormal
    assert relative_l2(plain, outputs("flushed", small), name) > 0.1
