"""Weak typing against a FAKE TensorRT that records calls (fake_trt.py); tests/gpu_weak has the real one."""

from __future__ import annotations

from enum import Enum

import fake_trt
import numpy as np
import pytest
from fake_trt import BuilderFlag, Config, DataType, Layer, Network, Tensor

from diag.engines import weak
from diag.engines.build_worker import request_from
from diag.engines.scale_cache import read_scale_cache
from diag.engines.weak import WeakTyping
from diag.errors import EngineError, TableError

CACHE = "TRT-8601-EntropyCalibration2\nx: 3c010204\ny::z: 3d30a3c6\n"


def network():
    return Network(
        [
            Layer("qk", "MATRIX_MULTIPLY", [Tensor(DataType.FLOAT)], node="attn/MatMul"),
            Layer("softmax", "SOFTMAX", [Tensor(DataType.FLOAT)], node="attn/Softmax"),
            Layer("eps", "CONSTANT", [Tensor(DataType.FLOAT)], node="norm/eps"),
            Layer("shape", "SHAPE", [Tensor(DataType.INT64)], node="attn/Softmax"),
            Layer("head/Add", "ELEMENTWISE", [Tensor(DataType.FLOAT, is_output=True)]),
        ],
        {"x": DataType.FLOAT, "ids": DataType.INT64},
    )


def test_flags_and_pins():
    net, config = network(), Config()
    pins = {"attn/Softmax": "fp32", "attn/MatMul": "int8", "head/Add": "bf16"}
    notes, calibrator = weak.apply(fake_trt.module(), net, config, WeakTyping(("fp16",), pins))
    assert config.flags == {BuilderFlag.FP16, BuilderFlag.OBEY_PRECISION_CONSTRAINTS}
    qk, softmax, _, shape, head = (net.get_layer(i) for i in range(5))
    assert (softmax.precision, softmax.output_types) == (DataType.FLOAT, {0: DataType.FLOAT})
    assert (qk.precision, qk.output_types) == (DataType.INT8, {})  # an INT8 kernel may write floats
    assert (head.precision, head.output_types) == (DataType.BF16, {})  # a network output keeps its type
    assert shape.precision is None
    assert (notes, calibrator, config.int8_calibrator) == ((), None, None)


def test_without_pins_nothing_is_to_be_obeyed():
    config = Config()
    weak.apply(fake_trt.module(), network(), config, WeakTyping(("bf16", "fp16")))
    assert config.flags == {BuilderFlag.FP16, BuilderFlag.BF16}


def test_a_pin_on_a_constant_is_reported():
    notes, _ = weak.apply(fake_trt.module(), network(), Config(), WeakTyping((), {"norm/eps": "fp32"}))
    assert notes == ("1 pinned node(s) have no layer of their own in TensorRT's network, first norm/eps",)


def test_calibration_feeds_every_batch_and_writes_the_cache(tmp_path):
    for number in range(3):
        values = {"ids": np.arange(4) + number, "x": np.full((2, 2), number, np.float64)}
        np.savez(tmp_path / f"{number}.npz", **values)
    fed, config = [], Config()

    def to_device(name, array):
        fed.append((name, array.dtype, array.copy()))
        return 1000 + len(fed)

    told = WeakTyping(("int8",), cache=str(tmp_path / "m.cache"), batches=str(tmp_path))
    notes, calibrator = weak.apply(fake_trt.module(), network(), config, told, to_device)
    assert config.int8_calibrator is calibrator
    assert calibrator.base_was_initialised
    assert calibrator.read_calibration_cache() is None
    assert calibrator.get_batch_size() == 1
    addresses = []
    while (batch := calibrator.get_batch(["x", "ids"])) is not None:
        addresses.append(batch)
    assert addresses == [[1001, 1002], [1003, 1004], [1005, 1006]]
    assert [(name, dtype) for name, dtype, _ in fed[:2]] == [("x", np.float32), ("ids", np.int64)]
    assert fed[4][2].tolist() == [[2, 2], [2, 2]]
    calibrator.write_calibration_cache(memoryview(CACHE.encode()))
    assert (tmp_path / "m.cache").read_text() == CACHE
    assert (calibrator.problem, notes) == ("", ())


def test_a_cache_is_read_with_the_running_versions_header(tmp_path):
    file = tmp_path / "m.cache"
    file.write_text(CACHE)
    told = WeakTyping(("int8",), cache=str(file))
    notes, calibrator = weak.apply(fake_trt.module("10.6.0"), network(), Config(), told)
    assert calibrator.read_calibration_cache().decode() == CACHE.replace("8601", "100600")
    assert calibrator.get_batch(["x"]) is None
    calibrator.write_calibration_cache(b"other")
    assert file.read_text() == CACHE
    assert "2 scales come from the cache" in notes[0]
    assert "written by TensorRT 8.6.1; its header is adapted to 10.6.0" in notes[1]


def test_a_failing_copy_is_kept_and_ends_the_calibration(tmp_path):
    np.savez(tmp_path / "0.npz", x=np.zeros(2), ids=np.zeros(2, int))

    def to_device(name, array):
        raise RuntimeError("out of memory")

    told = WeakTyping(("int8",), cache=str(tmp_path / "c"), batches=str(tmp_path))
    _, calibrator = weak.apply(fake_trt.module(), network(), Config(), told, to_device)
    assert calibrator.get_batch(["x"]) is None
    assert calibrator.problem == "calibration batch 1: out of memory"


def test_int8_without_scales_is_refused(tmp_path):
    with pytest.raises(EngineError, match="needs scales"):
        weak.apply(fake_trt.module(), network(), Config(), WeakTyping(("int8",), cache=str(tmp_path / "c")))


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (
            CACHE.replace("Entropy", "MinMax").replace("Calibration2", "Calibration"),
            EngineError,
            "made by MinMax",
        ),
        ("nonsense", TableError, "does not begin with"),
        (CACHE + "x: 3c", TableError, "line 4"),
    ],
)
def test_a_cache_that_cannot_be_used(tmp_path, text, error, says):
    file = tmp_path / "m.cache"
    file.write_text(text)
    with pytest.raises(error, match=says):
        weak.apply(fake_trt.module(), network(), Config(), WeakTyping(("int8",), cache=str(file)))


def test_tensorrt_11_has_no_weak_typing():
    class Flags11(Enum):
        TF32 = 0

    with pytest.raises(EngineError, match=r"TensorRT 11\.4\.0 has no weak typing") as caught:
        weak.refuse(fake_trt.module("11.4.0", Flags11), (11, 4))
    assert "Build without --weak" in caught.value.hint
    weak.refuse(fake_trt.module(), (10, 6))


def test_a_flag_that_this_version_lacks():
    class Flags(Enum):
        FP16 = 0

    with pytest.raises(EngineError, match="cannot build in bf16 by a flag"):
        weak.apply(fake_trt.module("8.5.0", Flags), network(), Config(), WeakTyping(("bf16",)))


def test_it_crosses_the_process_border():
    told = {"formats": ["fp16", "int8"], "layers": {"a": "fp32"}, "cache": "c", "batches": ""}
    request = request_from(
        {"flavour": "tensorrt", "onnx_path": "m.onnx", "profiles": {}, "flags": [], "weak": told}
    )
    assert request.weak == WeakTyping(("fp16", "int8"), {"a": "fp32"}, "c")


def test_a_cache_reads_back(tmp_path):
    file = tmp_path / "c"
    file.write_text(CACHE)
    cache = read_scale_cache(file)
    assert (cache.version, cache.algorithm) == ("8.6.1", "EntropyCalibration2")
    assert cache.scales == {"x": float(np.float32(1 / 127)), "y::z": pytest.approx(0.0431249)}
