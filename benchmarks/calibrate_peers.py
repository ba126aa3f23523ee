"""Calibration for INT8: every method of `trtdiag calibrate` at once beside ONNX Runtime, on the same batches.

    python -m benchmarks.calibrate_peers --out docs/measurements/calibrate.json

Every run is a process of its own: wall time from start to exit, peak resident memory. ONNX Runtime's
`quantize_static` needs one run for each method (its defaults: entropy with 128 bins, percentile 99.999 with
2,048) and also writes the quantized model; trtdiag measures min-max, four percentiles, entropy with 2,048
bins and MSE, with the stability of each, and writes its table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.compare_peers import CHECKOUT, Run, _machine, _target
from benchmarks.measure import Limits, measured
from benchmarks.peer_work import Reader, feeds

PEERS = ("Entropy", "Percentile")
OURS = ("trtdiag", "trtdiag-best")
MODEL = "minilm"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print table and targets, write the JSON. Exit 1 when trtdiag itself did not succeed."""
    args = _arguments(arguments)
    if args.work:
        print(json.dumps(_work(args)))
        return 0
    runs = [
        _run(tool, batches, args)
        for batches in args.batches
        for tool in (*OURS, *PEERS)
        if tool in args.tools
    ]
    print(table(runs), "", *targets(runs), sep="\n")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": _machine(), "runs": [asdict(run) for run in runs]}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(run.tool in OURS and run.status != "ok" for run in runs))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.calibrate_peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tools", nargs="+", choices=(*OURS, *PEERS), default=[*OURS, *PEERS])
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64], help="of 8 sentences each")
    parser.add_argument("--time-limit-s", type=float, default=1200.0, help="a run is given up after so long")
    parser.add_argument("--memory-limit-gb", type=float, default=24.0, help="address space that a run gets")
    parser.add_argument("--jobs", type=int, default=1, help="processes that trtdiag uses")
    parser.add_argument("--out", type=Path, help="JSON file of all runs")
    parser.add_argument("--work", choices=("prepare", *PEERS), help=argparse.SUPPRESS)
    for hidden in ("--model", "--data"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _run(tool: str, batches: int, args: argparse.Namespace) -> Run:
    limits = Limits(args.time_limit_s, args.memory_limit_gb)
    this = [sys.executable, "-m", "benchmarks.calibrate_peers"]
    paths = measured([*this, "--work", "prepare"], Limits(1800, 64), CHECKOUT).detail
    with tempfile.TemporaryDirectory() as scratch:
        if tool in OURS:
            command = [sys.executable, "-m", "diag.cli.main", "calibrate", str(paths["model"])]
            command += ["--data", str(paths["data"]), "--limit", str(batches), "--out", f"{scratch}/t.json"]
            command += ["--method", "best" if tool == "trtdiag-best" else "all", "--json"]
            command += ["--jobs", str(args.jobs)]
        else:
            command = [*this, "--work", tool, "--batches", str(batches)]
            command += ["--model", str(paths["ready"]), "--data", str(paths["data"])]
        result = measured(command, limits, CHECKOUT)
    detail = {key: result.detail[key] for key in ("tensors", "reason") if key in result.detail}
    run = Run(MODEL, tool, batches, result.status, result.wall_s, result.peak_mb, detail)
    shown = f"{run.wall_s:8.1f} s {run.peak_mb:8.0f} MB  {run.status}"
    print(f"{run.tool:14} {run.batches:3} {shown}", file=sys.stderr, flush=True)
    return run


def _work(args: argparse.Namespace) -> dict[str, object]:
    return _prepare() if args.work == "prepare" else _quantize(args)


def _prepare() -> dict[str, object]:
    """Paths of the model, of what ONNX Runtime's preprocessing makes of it, and of 64 batches."""
    from fixtures.real import minilm, minilm_data
    from fixtures.real.cache import made_file

    model = minilm()
    ready = made_file(f"bench/{MODEL}-ready.onnx", lambda file: _preprocess(model, file))
    return {"model": str(model), "ready": str(ready), "data": str(minilm_data("en_calib512"))}


def _preprocess(model: Path, target: Path) -> None:
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(str(model), str(target), skip_optimization=True, skip_symbolic_shape=True)


def _quantize(args: argparse.Namespace) -> dict[str, object]:
    """INT8 Q/DQ before the inputs of every MatMul, with one of ONNX Runtime's calibration methods."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "qdq.onnx"
        quantize_static(
            str(args.model),
            str(target),
            Reader(feeds(args.data, args.batches[0])),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=["MatMul"],
            calibrate_method=CalibrationMethod[args.work],
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "CalibTensorRangeSymmetric": True,
                "OpTypesToExcludeOutputQuantization": ["MatMul"],
            },
        )
        nodes = onnx.load(target).graph.node
    quantizers = sum(node.op_type == "QuantizeLinear" for node in nodes)
    return {"tensors": quantizers, "work_s": time.perf_counter() - begin}


def table(runs: Sequence[Run]) -> str:
    """The runs as a Markdown table."""
    titles = {
        "trtdiag": "trtdiag calibrate, all methods",
        "trtdiag-best": "trtdiag calibrate --method best",
        "Entropy": "quantize_static, Entropy",
        "Percentile": "quantize_static, Percentile",
    }
    lines = ["| tool | batches | time | peak memory |", "|---|---:|---:|---:|"]
    for run in runs:
        more = "" if run.status == "ok" else f"{run.status} at "
        lines.append(
            f"| {titles[run.tool]} | {run.batches} | {more}{run.wall_s:.1f} s | {run.peak_mb:.0f} MB |"
        )
    return "\n".join(lines)


def targets(runs: Sequence[Run]) -> list[str]:
    """What the project asks of itself: speed over both peer runs together, memory that stays flat."""
    lines = []
    usable = {(run.tool, run.batches): run for run in runs if run.status != "failed"}
    for batches in dict.fromkeys(run.batches for run in runs):
        ours = usable.get((OURS[0], batches))
        peers = [usable[name, batches] for name in PEERS if (name, batches) in usable]
        if ours is not None and len(peers) == len(PEERS):
            faster = sum(peer.wall_s for peer in peers) / ours.wall_s
            what = f"times faster than Entropy plus Percentile, {batches} batches"
            lines.append(_target(MODEL, what, faster, ">=", 5))
            smaller = max(peer.peak_mb for peer in peers) / ours.peak_mb
            lines.append(f"- {MODEL}: times less memory, {batches} batches {smaller:.2f}")
    own = [run for run in runs if run.tool == OURS[0] and run.status == "ok"]
    if len(own) > 1:
        short, long = min(own, key=lambda r: r.batches), max(own, key=lambda r: r.batches)
        what = f"memory at {long.batches} over {short.batches} batches"
        lines.append(_target(MODEL, what, long.peak_mb / short.peak_mb, "<=", 1.1))
    return lines


if __name__ == "__main__":
    sys.exit(main())
