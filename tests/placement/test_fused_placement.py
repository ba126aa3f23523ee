"""`placement: fused`: where quantizers stand, which scales are one, and that nothing else changes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from diag.calibration.minmax import measure_ranges
from diag.engines.build import BuildOptions, build_rtx
from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Session
from diag.kernels.kernel import Tensor
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import from_proto
from diag.model.save import embedded
from diag.plan.resolve import resolve
from diag.plan.schema import Plan, plan_from_mapping
from diag.progress import Silent
from diag.roles import find_roles, norm_parts
from diag.typed.apply import TypedModel, apply_formats, operands_of
from diag.typed.types import complete
from fixtures.graphs import GRAPHS

Array = NDArray[np.float32]
RNG = np.random.default_rng(5)


def weights(**shapes_: tuple[int, ...]) -> dict[str, Array]:
    return {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes_.items()}


def node(op: str, inputs: str, output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=f"/{output}", **attributes)


def model_of(
    nodes: list[NodeProto], shape: list[int], outputs: list[str], constants: Mapping[str, NDArray[Any]]
) -> Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    return from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))


@dataclass
class Applied:
    model: Model
    typed: TypedModel
    feeds: dict[str, Array]

    def pairs(self, proto: ModelProto | None = None) -> dict[str, list[float]]:
        """Scales of the activation quantizers on each tensor."""
        proto = proto or self.typed.for_engines
        scales = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer if not t.external_data}
        found: dict[str, list[float]] = {}
        for n in proto.graph.node:
            if n.op_type == "QuantizeLinear":
                found.setdefault(n.input[0], []).append(float(scales[n.input[1]]))
        return found

    def run(self, proto: ModelProto) -> dict[str, Array]:
        return Session(proto, self.typed.weights).run(self.feeds)


def applied(model: Model, feeds: dict[str, Array], fused: bool = True, **plan: Any) -> Applied:
    placement = "fused" if fused else "inputs"
    values = {"schema": "trtdiag.plan/1", "default": "int8", "placement": placement, **plan}
    made = plan_from_mapping(values)
    return Applied(model, typed_as(model, made, feeds), feeds)


def typed_as(model: Model, plan: Plan, feeds: Mapping[str, Array]) -> TypedModel:
    types = complete(shapes.infer(model), model)
    roles = find_roles(model)
    names = {layer: role.name for layer, role in roles.items()}
    blocks = {layer: role.block for layer, role in roles.items()}
    formats = resolve(plan, model, names, blocks, norm_parts(model), types).formats
    fused = plan.placement == "fused"
    operands = operands_of(model, formats, types, fused)
    needed = list(dict.fromkeys(o.tensor for o in operands if o.weight is None))
    ranges = measure_ranges(model, needed, [feeds], Silent())
    scales = {
        fmt: {name: max(r.absmax, 1e-30) / largest for name, r in ranges.items()}
        for fmt, largest in (("int8", 127), ("fp8", 448))
    }
    return apply_formats(model, formats, base=plan.base, scales=scales, fused=fused)


def residual(end: str = "Relu", channels: int = 8) -> tuple[Model, dict[str, Array]]:
    """conv, relu, [conv, relu, conv, BN] + skip, `end`, conv."""
    nodes = [
        node("Conv", "x w0", "c0", pads=[1] * 4),
        node("Relu", "c0", "skip"),
        node("Conv", "skip w1", "c1", pads=[1] * 4),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2", "c2", pads=[1] * 4),
        node("BatchNormalization", "c2 g b m v", "n2"),
        node("Add", "n2 skip", "sum"),
        node(end, "sum", "end"),
        node("Conv", "end w3", "y", pads=[1] * 4),
    ]
    made: dict[str, NDArray[Any]] = dict(
        weights(w0=(channels, 3, 3, 3), **{f"w{i}": (channels, channels, 3, 3) for i in (1, 2, 3)})
    )
    made |= {"g": np.ones(channels, np.float32), "v": np.ones(channels, np.float32)}
    made |= {"b": np.zeros(channels, np.float32), "m": np.zeros(channels, np.float32)}
    return model_of(nodes, [1, 3, 8, 8], ["y"], made), {"x": RNG.standard_normal((1, 3, 8, 8), np.float32)}


def absmax(model: Model, feeds: Mapping[str, Array], name: str) -> float:
    return measure_ranges(model, [name], [feeds], Silent())[name].absmax


def readers(proto: ModelProto, name: str) -> list[str]:
    return [n.name for n in proto.graph.node if name in n.input]


# Residual Adds.


def test_a_residual_add_between_quantized_layers_reads_its_skip_quantized() -> None:
    model, feeds = residual()
    case = applied(model, feeds)
    proto = case.typed.for_engines
    assert set(case.pairs()) == {"x", "skip", "r1", "end"}  # none between the conv and its Add
    assert all(len(scales) == 1 for scales in case.pairs().values())
    assert [n for n in readers(proto, "skip") if "quantize" not in n] == []  # only its quantizer reads it
    assert case.typed.formats["/sum"] == "int8"
    assert readers(proto, "n2") == ["/sum"]


def test_inputs_leave_the_skip_in_float() -> None:
    model, feeds = residual()
    case = applied(model, feeds, fused=False)
    assert "/sum" in readers(case.typed.for_engines, "skip")
    assert case.typed.for_engines is case.typed.proto
    assert case.typed.formats["/sum"] == "fp32"


def test_the_emulation_of_a_residual_is_what_numpy_says() -> None:
    """The Add's own part: conv output plus the skip as INT8 holds it."""
    model, feeds = residual()
    case = applied(model, feeds)
    proto = ModelProto()
    proto.CopyFrom(case.typed.for_engines)
    for name in ("n2", "skip", "sum"):
        proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    values = Session(proto, case.typed.weights).run(feeds)
    step = np.float32(absmax(model, feeds, "skip") / 127)
    held = np.clip(np.round(values["skip"] / step), -128, 127).astype(np.float32) * step
    np.testing.assert_allclose(values["sum"], values["n2"] + held, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("end", ["Softmax", "Sigmoid"])
def test_an_add_whose_sum_is_not_quantized_stays_float(end: str) -> None:
    """What makes more than a bound of the sum is not fused with it."""
    model, feeds = residual(end)
    case = applied(model, feeds)
    assert "/sum" in readers(case.typed.for_engines, "skip")
    assert case.typed.formats["/sum"] == "fp32"


def test_a_pin_takes_an_add_out() -> None:
    model, feeds = residual()
    case = applied(model, feeds, pins=[{"match": "/sum", "format": "fp32"}])
    assert "/sum" in readers(case.typed.for_engines, "skip")


def test_an_add_in_front_of_a_float_layer_stays_float() -> None:
    model, feeds = residual()
    case = applied(model, feeds, pins=[{"match": "/y", "format": "fp16"}])
    assert case.typed.formats["/sum"] == "fp32"


def test_two_branches_without_a_skip_quantize_the_first() -> None:
    """A projection shortcut: of two convolutions the Add is fused into the last."""
    nodes = [
        node("Conv", "x w0", "short"),
        node("Conv", "x w1", "c1"),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2", "main"),
        node("Add", "main short", "sum"),
        node("Relu", "sum", "end"),
        node("Conv", "end w3", "y"),
    ]
    made = weights(w0=(4, 3, 1, 1), w1=(4, 3, 1, 1), w2=(4, 4, 1, 1), w3=(4, 4, 1, 1))
    model = model_of(nodes, [1, 3, 8, 8], ["y"], made)
    case = applied(model, {"x": RNG.standard_normal((1, 3, 8, 8), np.float32)})
    assert set(case.pairs()) == {"x", "r1", "short", "end"}


def test_without_a_layer_to_fuse_into_neither_input_is_quantized() -> None:
    nodes = [
        node("Relu", "x", "a"),
        node("Neg", "x", "b"),
        node("Add", "a b", "sum"),
        node("MatMul", "sum w", "y"),
    ]
    model = model_of(nodes, [4, 8], ["y"], weights(w=(8, 8)))
    feeds = {"x": RNG.standard_normal((4, 8), np.float32)}
    assert set(applied(model, feeds).pairs()) == {"sum"}
    pin = {"match": "/sum", "format": "int8"}
    assert set(applied(model, feeds, pins=[pin]).pairs()) == {"a", "b", "sum"}  # when it is asked for, both


# What only moves values.


def moving() -> tuple[Model, dict[str, Array]]:
    """relu, pool, transpose, reshape, then a product: the quantizer belongs behind the relu."""
    nodes = [
        node("Relu", "x", "r"),
        node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2], pads=[1] * 4),
        node("Transpose", "p", "t", perm=[0, 2, 3, 1]),
        node("Reshape", "t shape", "flat"),
        node("MatMul", "flat w", "y"),
    ]
    constants: dict[str, NDArray[Any]] = {**weights(w=(3, 5)), "shape": np.array([-1, 3])}
    return model_of(nodes, [1, 3, 8, 8], ["y"], constants), {
        "x": RNG.standard_normal((1, 3, 8, 8), np.float32)
    }


def test_quantizers_pass_through_what_moves_values() -> None:
    model, feeds = moving()
    case = applied(model, feeds)
    assert set(case.pairs(case.typed.proto)) == {"flat"}
    assert set(case.pairs()) == {"r"}
    assert case.pairs()["r"] == [pytest.approx(absmax(model, feeds, "flat") / 127)]
    np.testing.assert_array_equal(case.run(case.typed.for_engines)["y"], case.run(case.typed.proto)["y"])
    order = [n.op_type for n in case.typed.for_engines.graph.node]
    assert order[:3] == ["Relu", "QuantizeLinear", "DequantizeLinear"]


def test_a_float_reader_holds_the_quantizer_back() -> None:
    model, feeds = moving()
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    proto.graph.node.append(node("Exp", "t", "other"))
    proto.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, None))
    case = applied(from_proto(proto), feeds)
    assert set(case.pairs()) == {"t"}
    assert "/other" in readers(case.typed.for_engines, "t")


def test_a_graph_output_holds_the_quantizer_back() -> None:
    model, feeds = moving()
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    proto.graph.output.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, None))
    assert set(applied(from_proto(proto), feeds).pairs()) == {"t"}


def joined(other_reader: bool, times: float = 3) -> tuple[Model, dict[str, Array]]:
    """A Concat of a tensor and of `times` as large ones; another product may read the small one."""
    nodes = [
        node("Relu", "x", "a"),
        node("Mul", "x times", "b"),
        node("Concat", "a b", "c", axis=1),
        node("MatMul", "c w", "y"),
    ]
    constants: dict[str, NDArray[Any]] = {**weights(w=(16, 4), v=(8, 4)), "times": np.float32(times)}
    outputs = ["y"]
    if other_reader:
        nodes.append(node("MatMul", "a v", "z"))
        outputs.append("z")
    return model_of(nodes, [4, 8], outputs, constants), {"x": RNG.standard_normal((4, 8), np.float32)}


def test_inputs_of_a_concat_share_its_scale() -> None:
    model, feeds = joined(other_reader=True)
    case = applied(model, feeds)
    wide = pytest.approx(absmax(model, feeds, "c") / 127)
    assert case.pairs() == {"a": [wide], "b": [wide]}  # one quantizer serves the product and the Concat
    for name in ("y", "z"):
        np.testing.assert_array_equal(
            case.run(case.typed.for_engines)[name], case.run(case.typed.proto)[name]
        )


@pytest.mark.parametrize(("fmt", "quantizers"), [("int8", 2), ("fp8", 1)])
def test_a_range_that_is_too_small_for_the_common_scale_keeps_its_own(fmt: str, quantizers: int) -> None:
    model, feeds = joined(other_reader=True, times=50)
    case = applied(model, feeds, default=fmt)
    largest = {"int8": 127, "fp8": 448}[fmt]
    wide = pytest.approx(absmax(model, feeds, "c") / largest)
    own = pytest.approx(absmax(model, feeds, "a") / largest)
    assert case.pairs()["b"] == [wide]
    assert sorted(case.pairs()["a"]) == ([own, wide] if quantizers == 2 else [wide])
    moved, still = case.run(case.typed.for_engines), case.run(case.typed.proto)
    for name in ("y", "z"):
        np.testing.assert_array_equal(moved[name], still[name])


def test_inputs_placement_gives_each_reader_its_own_scale() -> None:
    model, feeds = joined(other_reader=True)
    found = applied(model, feeds, fused=False).pairs()
    assert found["a"] == [pytest.approx(absmax(model, feeds, "a") / 127)]
    assert found["c"] == [pytest.approx(absmax(model, feeds, "c") / 127)]
    assert found["a"][0] < found["c"][0] / 2


def test_a_concat_that_is_read_in_float_leaves_scales_alone() -> None:
    model, feeds = joined(other_reader=True)
    case = applied(model, feeds, pins=[{"match": "/y", "format": "fp32"}])
    assert case.pairs() == {"a": [pytest.approx(absmax(model, feeds, "a") / 127)]}


def test_shape_paths_carry_no_quantizer() -> None:
    nodes = [
        node("Relu", "x", "r"),
        node("Shape", "r", "s"),
        node("Reshape", "r s", "same"),
        node("MatMul", "same w", "y"),
    ]
    model = model_of(nodes, [4, 8], ["y"], weights(w=(8, 4)))
    case = applied(model, {"x": RNG.standard_normal((4, 8), np.float32)})
    proto = case.typed.for_engines
    assert set(case.pairs()) == {"r"}
    assert "r" in next(n for n in proto.graph.node if n.name == "/s").input


# Whole families.


@pytest.mark.parametrize("base", ["fp32", "fp16"])
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_moving_changes_no_bit(name: str, base: str) -> None:
    fixture = GRAPHS[name]()
    model, feeds = from_proto(fixture.model), fixture.batch(2)
    case = applied(model, feeds, base=base)
    moved = Model("moved", case.typed.for_engines, case.typed.weights, "")
    found = [emulate(m) for m in (moved, case.typed.model)]
    first, second = (Session(e.proto, e.weights).run(feeds) for e in found)
    for output, values in first.items():
        np.testing.assert_array_equal(values, second[output])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_transformers_keep_their_numbers(name: str) -> None:
    """Their sums go into norms, which stay float: only places change, not values."""
    fixture = GRAPHS[name]()
    model, feeds = from_proto(fixture.model), fixture.batch(2)
    inputs, fused = (applied(model, feeds, fused=fused) for fused in (False, True))
    first, second = inputs.run(inputs.typed.for_engines), fused.run(fused.typed.for_engines)
    for output, values in first.items():
        np.testing.assert_array_equal(values, second[output])
    norms_and_softmax = {layer for part in norm_parts(model) for layer in part}
    norms_and_softmax |= {x.id for x in model.layers if x.op_type == "Softmax"}
    values_of = {n.output[0] for n in fused.typed.for_engines.graph.node if n.op_type == "DequantizeLinear"}
    for n in fused.typed.for_engines.graph.node:
        if n.name in norms_and_softmax:
            assert values_of.isdisjoint(n.input)


def kernels_of(case: Applied, folder: Path) -> list[tuple[Tensor, ...]]:
    """What each kernel of TensorRT-RTX's build writes."""
    path = folder / "typed.onnx"
    onnx.save(embedded(case.typed.for_engines, case.typed.weights), path)
    return [kernel.outputs for kernel in build_rtx(path, options=BuildOptions(timeout_s=120)).kernels]


@pytest.mark.rtx
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="the TensorRT-RTX wheel is not installed"
)
def test_tensorrt_rtx_keeps_the_skip_once(tmp_path: Path) -> None:
    """The kernel that ends the block in front writes INT8 alone; before, a float copy for the skip too."""
    model, feeds = residual(channels=64)
    inputs, fused = (kernels_of(applied(model, feeds, fused), tmp_path) for fused in (False, True))
    written = [sum(t.dtype == "fp32" for outputs in found for t in outputs) for found in (inputs, fused)]
    assert written[1] == written[0] - 1
    assert len(fused) <= len(inputs)


@pytest.mark.rtx
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="the TensorRT-RTX wheel is not installed"
)
def test_tensorrt_rtx_keeps_what_a_concat_joins_once(tmp_path: Path) -> None:
    """A cross-stage block: convolutions whose outputs are joined, and read by the next as well."""
    nodes = [
        node("Conv", "x w0", "c0", pads=[1] * 4),
        node("Relu", "c0", "a"),
        node("Conv", "a w1", "c1", pads=[1] * 4),
        node("Relu", "c1", "b"),
        node("Conv", "b w2", "c2", pads=[1] * 4),
        node("Relu", "c2", "d"),
        node("Concat", "a b d", "joined", axis=1),
        node("Conv", "joined w3", "y"),
    ]
    made = weights(w0=(64, 3, 3, 3), w1=(64, 64, 3, 3), w2=(64, 64, 3, 3), w3=(16, 192, 1, 1))
    for weight in made.values():
        weight *= 1.4 / np.sqrt(weight[0].size)  # keeps the ranges alike
    made["w2"] *= 2  # the last decides the common scale
    model = model_of(nodes, [1, 3, 16, 16], ["y"], made)
    feeds = {"x": RNG.standard_normal((1, 3, 16, 16), np.float32)}
    cases = [applied(model, feeds, fused) for fused in (False, True)]
    written = [sum(t.dtype == "fp32" for out in kernels_of(c, tmp_path) for t in out) for c in cases]
    assert written[1] == written[0] - 2  # a and b
