"""Shape inference: dimensions bound from the data, and computed values that make shapes concrete."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_files import FLOAT, floats, linear, model_of, saved_outside
from onnx import ModelProto, TensorProto, helper, numpy_helper

from diag.errors import ModelError
from diag.model.graph import TensorInfo
from diag.model.load import from_proto, load_model
from diag.model.shapes import bind, infer


def test_symbols_stay_until_the_data_bind_them() -> None:
    model = from_proto(linear())
    assert infer(model)["m"] == TensorInfo(FLOAT, ("N", 32))
    dims = bind(model, {"x": (5, 24)})
    assert dims == {"N": 5}
    known = infer(model, dims)
    assert {known[name].shape for name in ("m", "y")} == {(5, 32)}
    assert known["w"] == TensorInfo(FLOAT, (24, 32))  # a stub, and yet known
    assert known["x"].shape == (5, 24)


def test_binding_takes_each_symbol_once_and_only_from_what_is_there() -> None:
    node = helper.make_node("Add", ["a", "b"], ["y"])
    model = from_proto(model_of([node], inputs={"a": ["N", "M", 3], "b": ["N", 1, 3]}))
    assert bind(model, {"a": (2, 7, 3), "b": (2, 1, 3)}) == {"N": 2, "M": 7}
    assert bind(model, {"b": (4, 1, 3)}) == {"N": 4}
    assert bind(model, {}) == {}


def reshaped() -> ModelProto:
    """x (N, 24) to (N, 4, 6) by shape arithmetic, as exporters write it."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "shape"),
        helper.make_node("Gather", ["s", "zero"], ["n"], "gather"),
        helper.make_node("Concat", ["n", "rest"], ["target"], "concat", axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"], "reshape"),
    ]
    given = [
        numpy_helper.from_array(np.array([0]), "zero"),
        numpy_helper.from_array(np.array([4, 6]), "rest"),
    ]
    return model_of(nodes, given)


def test_shape_arithmetic_is_propagated() -> None:
    model = from_proto(reshaped())
    assert infer(model, {"N": 3})["y"].shape == (3, 4, 6)
    assert infer(model)["y"].shape == ("N", 4, 6)


def test_shape_arithmetic_is_propagated_with_small_external_values(tmp_path: Path) -> None:
    model = load_model(saved_outside(reshaped(), tmp_path))
    assert infer(model, {"N": 3})["y"].shape == (3, 4, 6)


def computed() -> ModelProto:
    """A shape that depends on an input's values: no inference can know it."""
    proto = model_of(
        [
            helper.make_node("Add", ["size", "one"], ["target"], "add"),
            helper.make_node("Expand", ["x", "target"], ["y"], "expand"),
            helper.make_node("Relu", ["y"], ["z"], "relu"),
        ],
        [numpy_helper.from_array(np.array([1, 0, 0]), "one")],
        outputs=("z",),
        inputs={"x": [1, 24]},
    )
    proto.graph.input.append(helper.make_tensor_value_info("size", TensorProto.INT64, [3]))
    return proto


def test_values_make_the_shapes_behind_them_concrete() -> None:
    model = from_proto(computed())
    unknown = infer(model, {})["z"].shape or ()
    assert [isinstance(dim, int) for dim in unknown] == [
        False,
        False,
        True,
    ]  # 24 is known: 24 against 1 or 24
    known = infer(model, {}, {"target": np.array([3, 5, 24])})
    assert known["z"].shape == (3, 5, 24)
    assert known["target"] == TensorInfo(TensorProto.INT64, (3,))
    assert len(model.proto.graph.node) == 3  # the model itself is as it was


def test_a_node_keeps_its_place_while_one_of_its_outputs_is_unknown() -> None:
    nodes = [
        helper.make_node("Split", ["size"], ["a", "b"], "split", axis=0, num_outputs=2),
        helper.make_node("Expand", ["x", "a"], ["y"], "expand"),
    ]
    proto = model_of(nodes, inputs={"x": [1]})
    proto.graph.input.append(helper.make_tensor_value_info("size", TensorProto.INT64, [2]))
    model = from_proto(proto)
    assert infer(model, {}, {"a": np.array([9])})["y"].shape != (9,)
    assert infer(model, {}, {"a": np.array([9]), "b": np.array([1])})["y"].shape == (9,)


def test_symbols_that_an_exporter_invented_do_not_win_over_numbers() -> None:
    proto = linear()
    proto.graph.ClearField("output")
    proto.graph.output.append(helper.make_tensor_value_info("y", FLOAT, ["Addy_dim_0", 32]))
    proto.graph.value_info.append(helper.make_tensor_value_info("m", FLOAT, ["MatMulm_dim_0", 32]))
    known = infer(from_proto(proto), {"N": 5})
    assert (known["m"].shape, known["y"].shape) == ((5, 32), (5, 32))


def test_shapes_that_contradict_each_other_are_unknown() -> None:
    proto = linear()
    proto.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", FLOAT, ["N", 25]))
    assert "m" not in infer(from_proto(proto))


def test_a_graph_that_inference_cannot_read_is_refused_in_one_sentence() -> None:
    proto = linear()
    proto.graph.node[0].domain = "nowhere"
    with pytest.raises(ModelError) as caught:
        infer(from_proto(proto))
    assert str(caught.value).startswith("the model's types and shapes cannot be inferred: ")
    assert "mm" in str(caught.value)  # the node is named
    assert "\n" not in str(caught.value)


def test_what_is_unknown_is_absent_or_has_no_shape() -> None:
    nodes = [
        helper.make_node("Mystery", ["x"], ["h"], "mystery", domain="acme"),
        helper.make_node("Relu", ["h"], ["y"], "relu"),
    ]
    known = infer(from_proto(model_of(nodes, domains={"acme": 1})), {"N": 2})
    assert "h" not in known
    assert known["y"].shape is None
    assert known["y"].is_float


@pytest.mark.parametrize("name", ["FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"])
def test_float_types(name: str) -> None:
    assert TensorInfo(getattr(TensorProto, name), ()).is_float
    assert not TensorInfo(TensorProto.INT64, ()).is_float
    assert not TensorInfo(0, None).is_float


def test_sequences_have_no_shape() -> None:
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["q"], "make"),
        helper.make_node("ConcatFromSequence", ["q"], ["y"], "join", axis=0),
    ]
    known = infer(from_proto(model_of(nodes, inputs={"x": [2, 3]})), {})
    assert known["q"] == TensorInfo(0, None)
    assert floats((2, 3)).ndim == len(known["y"].shape or ())
