"""Loading: values of every type, stable names, functions inlined, subgraphs as one layer, constants."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_files import FLOAT, branch, floats, linear, model_of, saved
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from diag.errors import ModelError
from diag.model import external
from diag.model.load import INLINE_BYTES, from_proto, is_stub, load_model

COUNT = 3001  # odd, so that packed types end in half a byte; over INLINE_BYTES even with four bits a value

ARRAYS: dict[str, np.ndarray] = {
    "float": floats((COUNT,)),
    "double": floats((COUNT,)).astype(np.float64),
    "fp16": floats((COUNT,)).astype(np.float16),
    "bf16": floats((COUNT,)).astype(ml_dtypes.bfloat16),
    "fp8": floats((COUNT,)).astype(ml_dtypes.float8_e4m3fn),
    "int4": (np.arange(COUNT) % 16 - 8).astype(ml_dtypes.int4),
    "uint4": (np.arange(COUNT) % 16).astype(ml_dtypes.uint4),
    "int8": (np.arange(COUNT) % 256 - 128).astype(np.int8),
    "uint8": (np.arange(COUNT) % 256).astype(np.uint8),
    "int64": np.arange(COUNT) - 7,
    "bool": np.arange(COUNT) % 3 == 0,
    "matrix": floats((7, 11, 13)),
}


def with_initializer(tensor: TensorProto) -> ModelProto:
    tensor.name = "w"
    return model_of([helper.make_node("Identity", ["x"], ["y"], "id")], [tensor])


@pytest.mark.parametrize("name", ARRAYS)
def test_large_values_stay_in_the_file_and_are_those_that_onnx_reads(name: str, tmp_path: Path) -> None:
    path = saved(with_initializer(numpy_helper.from_array(ARRAYS[name], "w")), tmp_path)
    expected = numpy_helper.to_array(onnx.load(path).graph.initializer[0])
    model = load_model(path)
    assert list(model.weights) == ["w"]
    assert is_stub(model.initializers["w"])
    value = model.weights["w"]
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
    assert value.tobytes() == expected.tobytes()
    assert model.constant("w") is value
    if name not in ("int4", "uint4"):
        assert not value.flags.owndata  # mapped, not read
        assert not value.flags.writeable


@pytest.mark.parametrize(
    ("elem_type", "values"),
    [
        (TensorProto.FLOAT, ARRAYS["float"]),
        (TensorProto.DOUBLE, ARRAYS["double"]),
        (TensorProto.FLOAT16, ARRAYS["fp16"]),
        (TensorProto.INT8, ARRAYS["int8"]),
        (TensorProto.INT64, ARRAYS["int64"]),
        (TensorProto.BOOL, ARRAYS["bool"]),
    ],
)
def test_values_in_typed_fields_are_read_too(elem_type: int, values: np.ndarray, tmp_path: Path) -> None:
    tensor = helper.make_tensor("w", elem_type, values.shape, values)
    assert not tensor.HasField("raw_data")
    model = load_model(saved(with_initializer(tensor), tmp_path))
    assert np.array_equal(model.weights["w"], values)
    assert model.weights["w"].dtype == values.dtype


def test_small_values_stay_in_the_graph(tmp_path: Path) -> None:
    edge = np.zeros(INLINE_BYTES // 4, np.float32)
    model = load_model(saved(with_initializer(numpy_helper.from_array(edge)), tmp_path))
    assert not model.weights
    assert np.array_equal(model.constant("w"), edge)  # type: ignore[arg-type]
    model = load_model(saved(with_initializer(numpy_helper.from_array(np.append(edge, edge[:1]))), tmp_path))
    assert list(model.weights) == ["w"]


@pytest.mark.parametrize("shape", [(0,), (3, 0, 4), ()])
def test_empty_and_scalar_values(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = saved(with_initializer(numpy_helper.from_array(np.ones(shape, np.float32))), tmp_path)
    value = load_model(path).constant("w")
    assert value is not None
    assert value.shape == shape


def test_strings_are_left_alone(tmp_path: Path) -> None:
    words = np.array(["wort"] * 2000, dtype=object)
    model = load_model(saved(with_initializer(numpy_helper.from_array(words)), tmp_path))
    assert not model.weights
    assert model.constant("w").tolist() == words.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("bits", ["INT2", "UINT2"])
def test_two_bit_values(bits: str, tmp_path: Path) -> None:
    if not hasattr(TensorProto, bits):
        pytest.skip("this onnx has no two-bit types")
    tensor = TensorProto(name="w", data_type=getattr(TensorProto, bits), dims=[4099 * 2])
    tensor.raw_data = bytes(i % 256 for i in range(2050))  # 8198 values of two bits
    path = saved(with_initializer(tensor), tmp_path)
    expected = numpy_helper.to_array(onnx.load(path).graph.initializer[0])
    assert load_model(path).weights["w"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("opset", range(11, 25))
def test_every_opset_from_11_to_24_loads(opset: int, tmp_path: Path) -> None:
    model = load_model(saved(linear(opset), tmp_path))
    assert model.opset == opset
    assert [layer.id for layer in model.layers] == ["mm", "add"]


@pytest.mark.parametrize("opset", [1, 10, 25, 99])
def test_other_opsets_are_refused(opset: int, tmp_path: Path) -> None:
    path = saved(linear(opset), tmp_path)
    with pytest.raises(
        ModelError, match=rf"uses ONNX opset {opset}; 11 to 24 can be read\. Export"
    ) as caught:
        load_model(path)
    assert caught.value.exit_code == 2


def test_a_model_without_an_opset_is_refused(tmp_path: Path) -> None:
    proto = linear()
    del proto.opset_import[:]
    with pytest.raises(ModelError, match="names no ONNX opset"):
        load_model(saved(proto, tmp_path))


def test_the_default_domain_may_be_spelt_out(tmp_path: Path) -> None:
    proto = linear()
    proto.opset_import[0].domain = "ai.onnx"
    proto.graph.node[0].domain = "ai.onnx"
    model = load_model(saved(proto, tmp_path))
    assert (model.opset, model.layers[0].domain) == (18, "")


def chain(*names: str) -> ModelProto:
    """Relu after Relu, with the given node names."""
    tensors = ["x", *(f"t{i}" for i in range(len(names) - 1)), "y"]
    pairs = zip(names, tensors, tensors[1:], strict=False)
    return model_of([helper.make_node("Relu", [a], [b], name) for name, a, b in pairs])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (["", "", "b"], ["Relu:t0", "Relu:t1", "b"]),
        (["a", "a", "a"], ["a", "a#2", "a#3"]),
        (["a", "a", "a#2"], ["a", "a#3", "a#2"]),  # the user's own name is not taken away
        (["", "Relu:t0"], ["Relu:t0#2", "Relu:t0"]),
    ],
)
def test_node_names_are_unique_stable_and_the_users(
    given: list[str], expected: list[str], tmp_path: Path
) -> None:
    path = saved(chain(*given), tmp_path)
    for model in (load_model(path), load_model(path), from_proto(chain(*given))):
        assert [layer.id for layer in model.layers] == expected
        assert list(model.layer_by_id) == expected


def with_functions(metadata_on: str = "body") -> ModelProto:
    """Two calls of `outer`, which calls `inner`; torch's metadata in the body, or on the second call."""
    inner = helper.make_function(
        "my", "inner", ["p"], ["q"], [helper.make_node("Relu", ["p"], ["q"])], [helper.make_opsetid("", 18)]
    )
    body = [
        helper.make_node("inner", ["p"], ["r"], domain="my"),
        helper.make_node("Neg", ["r"], ["q"], name="neg"),
    ]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    outer = helper.make_function("my", "outer", ["p"], ["q"], body, opsets)
    calls = [
        helper.make_node("outer", ["x"], ["h"], "first", domain="my"),
        helper.make_node("outer", ["h"], ["y"], "second", domain="my"),
    ]
    proto = model_of(calls, domains={"my": 1})
    proto.functions.extend([inner, outer])
    carrier = proto.functions[1].node[1] if metadata_on == "body" else proto.graph.node[1]
    carrier.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'model.act', 'op']")
    return proto


@pytest.mark.parametrize("load", ["file", "memory"])
def test_functions_are_inlined_with_the_metadata_of_their_nodes(load: str, tmp_path: Path) -> None:
    proto = with_functions()
    model = load_model(saved(proto, tmp_path)) if load == "file" else from_proto(proto)
    assert [layer.op_type for layer in model.layers] == ["Relu", "Neg", "Relu", "Neg"]
    assert len(model.layer_by_id) == 4
    assert not model.proto.functions
    assert [layer.source and layer.source.module for layer in model.layers] == [None, "model.act"] * 2


def test_metadata_on_a_call_stays_with_the_nodes_it_becomes(tmp_path: Path) -> None:
    model = load_model(saved(with_functions("call"), tmp_path))
    assert [layer.op_type for layer in model.layers] == ["Relu", "Neg", "Relu", "Neg"]
    found = [layer.source and layer.source.module for layer in model.layers]
    assert found == [None, None, "model.act", "model.act"]  # through both levels, and only of that call
    given = {"x": floats((2, 24))}
    runs = [ReferenceEvaluator(proto).run(None, given) for proto in (with_functions("call"), model.proto)]
    assert np.array_equal(runs[0][0], runs[1][0])


def test_a_function_that_calls_itself_is_refused(tmp_path: Path) -> None:
    proto = with_functions("call")
    proto.functions[0].node[0].CopyFrom(helper.make_node("outer", ["p"], ["q"], domain="my"))
    for call in (proto.functions[0].node[0], proto.functions[1].node[0]):
        call.metadata_props.add(key="k", value="v")
    with pytest.raises(ModelError, match="the model's local functions cannot be inlined"):
        load_model(saved(proto, tmp_path))


def with_if() -> ModelProto:
    nested = helper.make_node(
        "If",
        ["flag"],
        ["n"],
        then_branch=branch("t", helper.make_node("Add", ["far", "inside"], ["t"])),
        else_branch=branch("near"),
    )
    then = branch("n", helper.make_node("Relu", ["near"], ["inside"]), nested)
    other = branch("c", helper.make_node("Mul", ["own", "far"], ["c"]), initializers=[scalar("own")])
    nodes = [
        helper.make_node("Relu", ["x"], ["near"], "a"),
        helper.make_node("Neg", ["x"], ["far"], "b"),
        helper.make_node("If", ["flag"], ["y"], "choice", then_branch=then, else_branch=other),
    ]
    return model_of(nodes, [numpy_helper.from_array(np.array(True), "flag")])


def scalar(name: str) -> TensorProto:
    return numpy_helper.from_array(np.float32(2), name)


def test_an_if_is_one_layer_that_reads_what_its_branches_capture(tmp_path: Path) -> None:
    model = load_model(saved(with_if(), tmp_path))
    layer = model.layer_by_id["choice"]
    assert [la.id for la in model.layers] == ["a", "b", "choice"]
    assert layer.inputs == ("flag",)
    assert layer.captured == ("far", "near", "flag")  # neither "inside", "own" nor outputs of the branch
    assert layer.reads == ("flag", "far", "near", "flag")
    assert [la.id for la in model.consumers["far"]] == ["choice"]
    assert model.producers["far"].id == "b"
    assert {"y", "near", "far"} <= model.value_dependent


def test_a_loop_is_one_layer(tmp_path: Path) -> None:
    infos = [("i", TensorProto.INT64), ("c", TensorProto.BOOL), ("s", FLOAT)]
    body = helper.make_graph(
        [
            helper.make_node("Add", ["s", "step"], ["s2"]),
            helper.make_node("Identity", ["c"], ["c2"]),
        ],
        "body",
        [helper.make_tensor_value_info(n, t, []) for n, t in infos],
        [
            helper.make_tensor_value_info("c2", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s2", FLOAT, []),
        ],
    )
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["step"], "max", keepdims=0),
        helper.make_node("Loop", ["n", "", "start"], ["y"], "loop", body=body),
    ]
    given = [numpy_helper.from_array(np.int64(3), "n"), scalar("start")]
    model = load_model(saved(model_of(nodes, given), tmp_path))
    assert model.layer_by_id["loop"].reads == ("n", "start", "step")


def test_value_dependence_stops_at_shapes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "shape"),
        helper.make_node("ConstantOfShape", ["s"], ["z"], "zeros"),
        helper.make_node("Add", ["x", "z"], ["y"], "add"),
    ]
    model = load_model(saved(model_of(nodes), tmp_path))
    assert model.value_dependent == {"x", "y"}


def test_constants_are_decoded_when_asked_for(tmp_path: Path) -> None:
    attributes = {
        "value": numpy_helper.from_array(floats((2, 3))),
        "value_float": 1.5,
        "value_floats": [1.0, 2.0],
        "value_int": 7,
        "value_ints": [1, 2, 3],
    }
    nodes = [
        helper.make_node("Constant", [], [key], key, **{key: value}) for key, value in attributes.items()
    ]
    nodes.append(helper.make_node("Add", ["x", "value_float"], ["y"], "add"))
    model = load_model(saved(model_of(nodes, [scalar("two")]), tmp_path))
    assert not dict.keys(model.constants)  # nothing yet
    found = {key: model.constant(key) for key in [*attributes, "two"]}
    assert np.array_equal(found["value"], floats((2, 3)))  # type: ignore[arg-type]
    assert [str(found[key].dtype) for key in attributes] == ["float32"] * 3 + ["int64"] * 2  # type: ignore[union-attr]
    assert found["value_ints"].tolist() == [1, 2, 3]  # type: ignore[union-attr]
    assert float(found["two"]) == 2.0  # type: ignore[arg-type]
    assert (model.constant("y"), model.constant("x"), model.constant("no such")) == (None, None, None)
    assert "y" not in model.constants
    assert "two" in model.constants
    with pytest.raises(KeyError):
        model.constants["y"]


def test_inputs_that_have_a_default_are_not_asked_for(tmp_path: Path) -> None:
    proto = linear()
    proto.graph.input.append(helper.make_tensor_value_info("w", FLOAT, [24, 32]))
    model = load_model(saved(proto, tmp_path))
    assert list(model.inputs) == ["x"]
    assert model.inputs["x"].shape == ("N", 24)
    assert model.inputs["x"].is_float
    assert list(model.outputs) == ["y"]
    assert model.outputs["y"].shape is None


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    path = saved(linear(), tmp_path)
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert load_model(path).sha256 == expected
    proto = linear()
    proto.graph.node[0].name = "other"
    assert load_model(saved(proto, tmp_path)).sha256 != expected


def test_a_model_in_memory_is_copied(tmp_path: Path) -> None:
    proto = chain("", "")
    before = proto.SerializeToString()
    model = from_proto(proto)
    assert proto.SerializeToString() == before
    assert model.sha256 == from_proto(chain("", "")).sha256
    assert model.sha256 != from_proto(chain("", "b")).sha256
    weights = from_proto(linear()).weights
    assert np.array_equal(weights["w"], floats((24, 32)))


def test_attributes_are_plain_values(tmp_path: Path) -> None:
    node = helper.make_node("Gemm", ["x", "w"], ["y"], "gemm", transB=1, alpha=0.5)
    proto = model_of([node], [numpy_helper.from_array(floats((32, 24)), "w")])
    layer = load_model(saved(proto, tmp_path)).layers[0]
    assert layer.attributes == {"transB": 1, "alpha": 0.5}


def test_all_tensors_sees_into_branches_and_attributes() -> None:
    proto = with_if()
    sparse = helper.make_sparse_tensor(scalar("v"), numpy_helper.from_array(np.zeros(1, np.int64), "i"), [4])
    proto.graph.sparse_initializer.append(sparse)
    proto.graph.node.append(helper.make_node("Constant", [], ["k"], value=scalar("attribute")))
    assert {t.name for t in external.all_tensors(proto.graph)} == {"flag", "own", "attribute", "v", "i"}
