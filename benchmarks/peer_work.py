"""What each peer does, as a process of its own: `python -m benchmarks.peer_work WORK ...`.

`prepare MODEL` makes models and data (not timed) and prints where they are. Every other work runs the FP32
model and its INT8 Q/DQ model on the same batches and prints what it did as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

Feed = dict[str, np.ndarray]

CPU = ["CPUExecutionProvider"]


def feeds(folder: Path, count: int) -> Iterator[Feed]:
    """The first batches of a folder of .npz, one in memory at a time."""
    for file in sorted(folder.glob("*.npz"))[:count]:
        with np.load(file, allow_pickle=False) as archive:
            yield {name: archive[name] for name in archive.files}


class Reader:
    """The batches as ONNX Runtime's quantization tools ask for them."""

    def __init__(self, batches: Iterator[Feed]) -> None:
        self._batches = batches

    def get_next(self) -> Feed | None:
        return next(self._batches, None)

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Feed:
        return next(self._batches)


# Preparation


def prepare(name: str) -> dict[str, str]:
    """Paths of the FP32 model, its Q/DQ model and two folders of batches (8 or more, 64)."""
    from fixtures.real import minilm, minilm_data, smollm2, smollm2_data
    from fixtures.real.cache import made_file

    if name == "minilm":
        model, data, many = minilm(), minilm_data("en_calib"), minilm_data("en_calib512")
    else:
        model, data, many = smollm2(), smollm2_data("en_calib"), smollm2_data("en_calib64")
    qdq = made_file(f"bench/{name}-qdq.onnx", lambda file: quantize(model, data, file))
    return {"model": str(model), "qdq": str(qdq), "data": str(data), "many": str(many)}


def quantize(model: Path, data: Path, target: Path) -> None:
    """INT8 Q/DQ before both inputs of every MatMul and nowhere else: symmetric, per channel, min-max.

    Made by ONNX Runtime itself, the way TensorRT wants it, so that no tool has to read another's dialect.
    """
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        ready = Path(scratch) / "ready.onnx"
        # Shapes only: its optimisations rename and fold nodes, and the peers compare by name.
        quant_pre_process(str(model), str(ready), skip_optimization=True, skip_symbolic_shape=True)
        quantize_static(
            str(ready),
            str(target),
            Reader(feeds(data, 8)),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=["MatMul"],
            calibrate_method=CalibrationMethod.MinMax,
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "OpTypesToExcludeOutputQuantization": ["MatMul"],
            },
        )


# The peers


def float_tensors(model: onnx.ModelProto) -> list[str]:
    """Names of every float32 tensor that a node of the graph writes."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    known = {v.name: v.type.tensor_type.elem_type for v in (*inferred.value_info, *inferred.output)}
    written = [name for node in model.graph.node for name in node.output if name]
    return [name for name in written if known.get(name) == onnx.TensorProto.FLOAT]


def bare(args: argparse.Namespace) -> dict[str, object]:
    """ONNX Runtime alone: both models, every float tensor an output, nothing kept or compared."""
    names = float_tensors(onnx.load(args.model))
    session_s = run_s = 0.0
    for path in (args.model, args.qdq):
        begin = time.perf_counter()
        session = _all_outputs(path, names)
        session_s += time.perf_counter() - begin
        for feed in feeds(args.data, args.batches):
            begin = time.perf_counter()
            session.run(names, feed)
            run_s += time.perf_counter() - begin
        del session
    return {"tensors": len(names), "load_s": round(session_s, 3), "run_s": round(run_s, 3)}


def _all_outputs(path: Path, names: list[str]) -> ort.InferenceSession:
    model = onnx.load(path)
    present = {value.name for value in model.graph.output}
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        for name in names
        if name not in present
    )
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:  # from a file: no second copy in memory
        onnx.save(model, file.name)
        del model
        return ort.InferenceSession(file.name, providers=CPU)


def polygraphy(args: argparse.Namespace, *, streaming: bool) -> dict[str, object]:
    """`polygraphy run fp32.onnx qdq.onnx --onnxrt --onnx-outputs mark all`, through its Python API."""
    from polygraphy import constants
    from polygraphy.backend.onnx import BytesFromOnnx, ModifyOutputs, OnnxFromPath
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.comparator import Comparator
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL  # in its favour: it need not print a line per tensor
    runners = [
        OnnxrtRunner(
            SessionFromOnnx(BytesFromOnnx(ModifyOutputs(OnnxFromPath(str(path)), constants.MARK_ALL))),
            name=name,
        )
        for name, path in (("fp32", args.model), ("int8", args.qdq))
    ]
    batches = list(feeds(args.data, args.batches))
    if streaming:
        results = Comparator.run(runners, data_loader=batches, streaming=True)
    else:
        results = Comparator.run(runners, data_loader=batches)
    accuracy = Comparator.compare_accuracy(results)
    (compared,) = accuracy[0].values()  # one pair of runners: a list with one entry for each batch
    return {"tensors": len(compared[0])}


def qdq_loss_debug(args: argparse.Namespace) -> dict[str, object]:
    """ONNX Runtime's own comparison of a float model with its Q/DQ model: SQNR per quantized tensor."""
    from onnxruntime.quantization import qdq_loss_debug as tool

    kept: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for path in (args.model, args.qdq):
            marked = Path(scratch) / f"{len(kept)}.onnx"
            tool.modify_model_output_intermediate_tensors(str(path), str(marked))
            kept.append(tool.collect_activations(str(marked), Reader(feeds(args.data, args.batches))))
    matching = tool.create_activation_matching(kept[1], kept[0])
    matching = {name: match for name, match in matching.items() if "float" in match}
    return {"tensors": len(tool.compute_activation_error(matching))}


WORK: dict[str, Callable[[argparse.Namespace], dict[str, object]]] = {
    "bare": bare,
    "polygraphy": lambda args: polygraphy(args, streaming=True),
    "polygraphy-kept": lambda args: polygraphy(args, streaming=False),
    "qdq-loss-debug": qdq_loss_debug,
}


def main() -> None:
    """Do the work named first and print its result as one line of JSON."""
    parser = argparse.ArgumentParser()
    work = parser.add_subparsers(dest="work", required=True)
    work.add_parser("prepare").add_argument("name", choices=("minilm", "smollm2"))
    for name in WORK:
        peer = work.add_parser(name)
        for option in ("--model", "--qdq", "--data"):
            peer.add_argument(option, type=Path, required=True)
        peer.add_argument("--batches", type=int, required=True)
    args = parser.parse_args()
    begin = time.perf_counter()
    result = prepare(args.name) if args.work == "prepare" else WORK[args.work](args)
    print(
        json.dumps(
            result | {} if args.work == "prepare" else result | {"work_s": time.perf_counter() - begin}
        )
    )


if __name__ == "__main__":
    main()
