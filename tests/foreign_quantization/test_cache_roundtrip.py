"""TensorRT calibration caches through the reader, through a table, and back: the same bytes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from diag.engines.scale_cache import cache_text, parse_scale_cache, read_scale_cache

REAL_CACHE = Path(__file__).resolve().parents[1] / "cli_engines" / "samples" / "minilm_entropy2.cache"


def test_the_real_cache_byte_for_byte():
    cache = read_scale_cache(REAL_CACHE)
    assert len(cache.scales) == 431
    assert cache_text(cache.version, cache.algorithm, cache.scales).encode() == REAL_CACHE.read_bytes()


float32 = st.floats(width=32, allow_nan=False)
names = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1)


@given(st.dictionaries(names, float32, min_size=1), st.sampled_from(["10.6.0", "8.6.1", "8.5.3", "10.12.1"]))
def test_any_cache_comes_back(scales, version):
    text = cache_text(version, "EntropyCalibration2", scales)
    cache = parse_scale_cache(text, "it")
    assert (cache.version, cache.algorithm) == (version, "EntropyCalibration2")
    assert list(cache.scales.items()) == list(scales.items())
    assert cache_text(cache.version, cache.algorithm, cache.scales) == text


def chain_of(tensors):
    """A model that writes the tensors one after the other: MatMul, then Relu after Relu."""
    chain = [helper.make_node("MatMul", ["x", "w"], [tensors[0]], "multiply")]
    for number, (before, after) in enumerate(itertools.pairwise(tensors)):
        chain.append(helper.make_node("Relu", [before], [after], f"relu{number}"))
    chain.append(helper.make_node("MatMul", [tensors[-1], "w"], ["y"], "again"))
    graph = helper.make_graph(
        chain,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.eye(2, dtype=np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_the_real_cache_through_a_table(trtdiag, tmp_path):
    tensors = [name for name in read_scale_cache(REAL_CACHE).scales if name.endswith("_output_0")]
    onnx.save(chain_of(tensors), tmp_path / "m.onnx")
    table, back = tmp_path / "table.json", tmp_path / "back.cache"
    assert trtdiag("calibrate", tmp_path / "m.onnx", "--import", REAL_CACHE, "--out", table).code == 0
    ended = trtdiag("calibrate", table, "--export", "--out", back, "--json")
    assert ended.json == {"cache": str(back), "entries": 431, "method": "imported"}
    assert back.read_bytes() == REAL_CACHE.read_bytes()


def measured(trtdiag, model, data, out, *more):
    assert trtdiag("calibrate", model, "--data", data, "--out", out, *more).code == 0
    return out


def test_a_measured_table_as_a_cache(trtdiag, model, data, tmp_path):
    table = measured(trtdiag, model, data, tmp_path / "t.json")
    out = tmp_path / "new.cache"
    words = ("calibrate", table, "--export", "--tensorrt-version", "10.6.0", "--out", out)
    assert trtdiag(*words).code == 0
    cache = read_scale_cache(out)
    assert (cache.version, cache.algorithm) == ("10.6.0", "MinMaxCalibration")
    assert cache.scales["x"] == np.float32(2 / 127)
    assert list(cache.scales) == ["x", "p"]
    assert trtdiag(*words, "--method", "entropy").code == 0
    assert read_scale_cache(out).algorithm == "EntropyCalibration2"


def test_a_cache_of_every_tensor(trtdiag, model, data, tmp_path):
    table = measured(trtdiag, model, data, tmp_path / "t.json", "--all-tensors")
    trtdiag("calibrate", table, "--export", "--tensorrt-version", "10.6.0", "--out", tmp_path / "c")
    assert list(read_scale_cache(tmp_path / "c").scales) == ["x", "h", "p", "y"]
    assert all(0 < scale < math.inf for scale in read_scale_cache(tmp_path / "c").scales.values())
