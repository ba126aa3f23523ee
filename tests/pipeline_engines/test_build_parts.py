"""What a builder is given, and what its kernels become in a report."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from diag.calibration.minmax import measure_ranges
from diag.engines.scale_cache import cache_text
from diag.errors import TableError, UsageError
from diag.feeds import open_feeds
from diag.kernels.audit import AuditFact, audit
from diag.kernels.kernel import Kernel, Tensor
from diag.kernels.nodes import MULTIPLYING_OPS
from diag.pipeline.build.audit_findings import (
    FINDING_KINDS,
    applicable_formats,
    built_counts,
    findings_of,
    request_for_model,
    request_for_plan,
    request_unasked,
    strict_gate,
)
from diag.pipeline.build.settings import BuildSettings
from diag.pipeline.build.sources import Job, write_source
from diag.pipeline.engine.profiles import profiles_for
from diag.pipeline.prepare import new_table, plan_on
from diag.plan.schema import plan_from_mapping
from diag.progress import Silent
from fixtures.graphs import bert, vit


def written(fixture, folder):
    onnx.save(fixture.model, folder / "model.onnx")
    (folder / "data").mkdir()
    for seed, rows in enumerate((2, 2, 1)):
        np.savez(folder / "data" / f"{seed}.npz", **fixture.batch(rows, seed))
    return folder / "model.onnx"


def plan(**more):
    return plan_from_mapping({"schema": "trtdiag.plan/1", **more})


@pytest.fixture
def model(tmp_path):
    return written(bert(), tmp_path)


def job(model, the_plan, tmp_path, **more):
    planned = plan_on(str(model), the_plan)
    feeds = open_feeds(str(model.parent / "data"), planned.model.inputs)
    settings = BuildSettings(str(model), str(tmp_path / "m.engine"), "tensorrt", format="int8", **more)
    profiles = profiles_for(planned.model.inputs, (), feeds)
    return Job(settings, tmp_path / "m.engine", planned.model, planned, feeds, profiles)


def test_weak_typing_takes_the_model_as_it_is_with_flags_and_pins(model, tmp_path):
    the_plan = plan(default="int8", base="fp16", pins=[{"role": "attn_softmax", "format": "fp32"}])
    made = job(model, the_plan, tmp_path, weak=True)
    old = tmp_path / "m.engine.calibration.cache"
    old.write_text("an earlier build's")
    source = write_source(made, tmp_path / "source.onnx", tmp_path, Silent())
    assert source.weak.formats == ("fp16", "int8")
    softmaxes = [layer.id for layer in made.model.layers if layer.op_type == "Softmax"]
    assert softmaxes
    assert all(source.weak.layers[layer] == "fp32" for layer in softmaxes)
    assert not old.exists()
    assert source.weak.cache == str(old)
    assert source.notes == ("1 batches of another shape were left out of the calibration",)
    assert len(list((tmp_path / "batches").glob("*.npz"))) == 2
    kinds = {node.op_type for node in onnx.load(tmp_path / "source.onnx").graph.node}
    assert "QuantizeLinear" not in kinds
    assert source.identity.table_sha256


def test_weak_typing_takes_the_models_own_cache_only(model, tmp_path):
    given = tmp_path / "given.cache"
    made = job(model, plan(default="int8"), tmp_path, weak=True, cache=str(given))
    given.write_text(
        cache_text("10.6.0", "EntropyCalibration2", dict.fromkeys(made.planned.activations, 0.1))
    )
    source = write_source(made, tmp_path / "source.onnx", tmp_path, Silent())
    assert (source.weak.cache, source.weak.batches) == (str(given), "")
    given.write_text(cache_text("10.6.0", "EntropyCalibration2", {"elsewhere": 0.1}))
    with pytest.raises(TableError, match="another model's"):
        write_source(made, tmp_path / "source.onnx", tmp_path, Silent())


def test_weak_typing_refuses_a_model_with_quantizers(model, tmp_path):
    made = job(model, plan(default="int8"), tmp_path)
    write_source(made, tmp_path / "typed.onnx", tmp_path, Silent())
    (tmp_path / "q").mkdir()
    quantized = tmp_path / "q" / "model.onnx"
    (tmp_path / "typed.onnx").rename(quantized)
    (model.parent / "data").rename(tmp_path / "q" / "data")
    with pytest.raises(UsageError, match="its own quantizers"):
        write_source(
            job(quantized, plan(default="int8"), tmp_path, weak=True), tmp_path / "s.onnx", tmp_path, Silent()
        )


@pytest.mark.parametrize("make", [bert, vit])
@pytest.mark.parametrize("fmt", ["fp16", "int8"])
def test_what_inspect_expects_is_what_the_rewrite_does(make, fmt, tmp_path):
    """Inspect has no scales, and still must know which layers get a quantizer."""
    path = written(make(), tmp_path)
    planned = plan_on(str(path), plan(default=fmt, base="fp16" if fmt == "int8" else "fp32"))
    feeds = open_feeds(str(tmp_path / "data"), planned.model.inputs)
    ranges = measure_ranges(planned.model, planned.activations, feeds, Silent())
    typed = planned.apply(new_table(planned.model, feeds, ranges))
    expected, done = applicable_formats(planned), request_for_plan(planned, typed.formats).formats
    assert done
    assert {layer: expected[layer] for layer in done} == dict(done)
    assert {planned.model.layer_by_id[x].op_type for x in done} <= MULTIPLYING_OPS


def test_a_model_as_it_is_asks_for_its_own_types(model):
    planned = plan_on(str(model), plan(default="fp32"))
    asked = request_for_model(planned.model, planned.types)
    assert set(asked.formats.values()) == {"fp32"}
    assert set(request_unasked(planned.model).formats.values()) == {""}
    assert request_unasked(planned.model).formats.keys() == asked.formats.keys()
    assert audit([], request_unasked(planned.model))[0].kind == "folded"


def gemm(node, dtype, name=""):
    tensors = (Tensor("a", (8, 8), dtype), Tensor("w", (8, 8), dtype, constant=True))
    return Kernel(name or f"{node}_myl0", "gemm", (node,), tensors, (Tensor("y", (8, 8), dtype),))


def test_counts_and_findings_of_a_build(model):
    planned = plan_on(str(model), plan(default="fp16"))
    request = request_for_plan(planned, planned.resolved.formats)
    nodes = list(request.formats)
    kernels = [gemm(node, "fp32" if n < 2 else "fp16") for n, node in enumerate(nodes[:-1])]
    counts = built_counts(kernels, request)
    assert counts == {"fp16": {"fp32": 2, "fp16": len(nodes) - 3, "folded": 1}}
    found = findings_of(audit(kernels, request))
    assert [(f.id, f.kind, f.severity, f.layers) for f in found] == [
        ("not-lowered-fp16-fp32", "precision-not-built", "error", nodes[:2]),
        ("folded", "precision-not-built", "note", nodes[-1:]),
    ]
    assert found[0].title.startswith("2 layers were asked in fp16 and were built in fp32: ")
    gate = strict_gate(found)
    assert [(c.name, c.value, c.passed) for c in gate.checks] == [
        ("requests not honoured", 1.0, False),
        ("other errors and warnings", 0.0, True),
    ]


@pytest.mark.parametrize("kind", FINDING_KINDS)
def test_every_fact_becomes_a_finding_with_a_mend(kind):
    facts = [AuditFact(kind, f"text {n}", (f"n{n}",), (f"k{n}",), "int8", "fp16", 1, 0.5) for n in range(2)]
    (finding,) = findings_of(facts)
    assert finding.kind == FINDING_KINDS[kind]
    assert finding.severity == facts[0].severity
    assert finding.layers == ["n0", "n1"]
    assert finding.mend.text
    assert finding.evidence["time_ms"] == 1.0
    assert strict_gate([finding]).passed is (finding.severity == "note")
