"""`trtdiag pin` beside ModelOpt's AutoCast (FP16) and AMD Quark's auto mixed precision (INT8).

    python -m benchmarks.search_peers --autocast PYTHON --smollm2 MODEL --calibration BATCHES --data BATCHES
    python -m benchmarks.search_peers --quark PYTHON --recogniser MODEL

PYTHON is an interpreter with the peer in it. Every tool is a process of its own: wall time from start to
exit, peak resident memory. One judge runs all models on batches that no tool has seen. See README.md here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measure import Limits, Measured, measured
from benchmarks.search_judge import Judge, in_fp16, is_square, kept_high
from diag.compare.record import Array
from diag.engines.onnxruntime import own_process
from diag.gate.threshold import parse_threshold
from fixtures.real.ocr import read_lines
from fixtures.real.ocr_varied import varied_data

CHECKOUT = Path(__file__).resolve().parents[1]
QUARK_SCRIPT = Path(__file__).with_name("search_peer_quark.py")
US, AUTOCAST = "trtdiag pin", "ModelOpt AutoCast"
QUARK = {"Quark, Conv and MatMul in INT8": [], "Quark, every operator in INT8": ["--everything"]}
"""Names of its runs, and the options of each."""
TOP1 = 0.99
"""Target of the FP16 task: share of tokens whose likeliest next token is the reference's."""


@dataclass(frozen=True)
class Row:
    """One tool's result, as cells of the table."""

    tool: str
    kept: str
    quality: str
    run: Measured
    work: str = "-"


Checks = list[tuple[str, bool]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table for each peer and the targets; exit 1 when a target is missed."""
    args = _arguments(arguments)
    own_process()
    passed = True
    for task in [task for task, peer in ((autocast, args.autocast), (quark, args.quark)) if peer]:
        with tempfile.TemporaryDirectory() as folder:
            rows, checks = task(args, Path(folder))
        print(_table(rows), "", sep="\n", flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            found = json.dumps([asdict(row) for row in rows], indent=1)
            (args.out / f"{task.__name__}.json").write_text(found + "\n", encoding="utf-8")
        for text, met in checks:
            print(f"{'ok  ' if met else 'MISS'} {text}")
            passed = passed and met
    return int(not passed)


def autocast(args: argparse.Namespace, folder: Path) -> tuple[list[Row], Checks]:
    """SmolLM2 in FP16: which nodes each tool leaves in FP32, and what that is worth on other batches."""
    chosen = _copies(sorted(args.data.glob("*.npz"))[: args.limit], folder / "chosen")
    held = _copies(sorted(args.calibration.glob("*.npz"))[-args.held_out :], folder / "held")
    runs = {
        US: _pin(args, args.smollm2, "fp16", chosen, f"top1>={TOP1}", folder / "pin"),
        AUTOCAST: _autocast(args, folder, folder / "peer.onnx"),
    }
    models = {US: folder / "pin" / "typed.onnx", AUTOCAST: folder / "peer.onnx"}
    judge, planned = Judge(args.smollm2, held, "logits"), in_fp16(args.smollm2)
    overflowing = judge.overflowing(planned)
    high = {tool: kept_high(planned, model) for tool, model in models.items()}
    found = {tool: judge.metrics(judge.emulated(model)) for tool, model in models.items()}
    rows = []
    for tool, run in runs.items():
        norms = [layer for layer in high[tool] if is_square(planned, layer)]
        caught = f"{len(overflowing & set(norms))} of the {len(overflowing)} that overflow"
        kept = f"{len(high[tool])} nodes in FP32; {len(norms)} norms, {caught}"
        hidden = judge.metrics(judge.run(models[tool]))["top1"]
        quality = f"{_quality(found[tool])}; in ONNX Runtime's own FP16 top-1 {hidden:.4f}"
        rows.append(Row(tool, kept, quality, run, _work(run)))
    missed, top1 = overflowing - set(high[US]), found[US]["top1"]
    ours, theirs = len(high[US]), len(high[AUTOCAST])
    return rows, [
        (f"norms whose squares overflow left in FP16: {len(missed)} (target 0)", not missed),
        (f"top-1 on batches held out: {top1:.4f} (target {TOP1})", top1 >= TOP1),
        (f"nodes in FP32: {ours}, {AUTOCAST} {theirs}", ours < theirs),
        _faster(runs[US], runs[AUTOCAST], AUTOCAST),
    ]


def _autocast(args: argparse.Namespace, folder: Path, out: Path) -> Measured:
    batches = _copies(sorted(args.calibration.glob("*.npz"))[: args.autocast_batches], folder / "seen")
    command = [args.autocast, "-m", "modelopt.onnx.autocast", "--onnx_path", str(args.smollm2)]
    command += ["--output_path", str(out), "--calibration_data", str(batches), "--keep_io_types"]
    return _ran(measured(command, _limits(args), CHECKOUT), AUTOCAST)


def quark(args: argparse.Namespace, folder: Path) -> tuple[list[Row], Checks]:
    """A recogniser of text lines in INT8: how many Conv and MatMul each tool gives more bits."""
    search, held = varied_data("search"), varied_data("held_out")
    runs = {
        US: _pin(args, args.recogniser, "int8", search, args.target, folder / "pin", "--holdout", str(held))
    }
    models = {US: folder / "pin" / "typed.onnx"}
    for tool, option in QUARK.items():
        models[tool] = folder / f"{len(models)}.onnx"
        command = [args.quark, str(QUARK_SCRIPT), str(args.recogniser), str(search), str(models[tool])]
        command += ["--target", args.target, *option]
        runs[tool] = _ran(measured(command, _limits(args), CHECKOUT), tool)
    judge = Judge(args.recogniser, varied_data("judge"), "classes")
    read, found, same, rows = _read(args, judge.references), {}, {}, []
    for tool, run in runs.items():
        outputs = (judge.emulated if tool == US else judge.run)(models[tool])
        found[tool] = judge.metrics(outputs)
        same[tool] = sum(a == b for a, b in zip(read, _read(args, outputs), strict=True))
        quality = f"{_quality(found[tool])}; {same[tool]} of {len(read)} texts as in FP32"
        rows.append(Row(tool, _kept(run), quality, run, _work(run)))
    return rows, _int8_checks(args, runs, found, same)


def _int8_checks(
    args: argparse.Namespace,
    runs: dict[str, Measured],
    found: dict[str, dict[str, float]],
    same: dict[str, int],
) -> Checks:
    target, pins = parse_threshold(args.target), _pins(runs[US])
    reached = found[US][target.metric]
    checks = [(f"{target.metric} on lines held out: {reached:.4g} ({target})", target.holds(reached))]
    for tool in QUARK:
        theirs = int(str(runs[tool].detail["promoted"]))
        checks.append((f"layers with more bits: {pins}, {tool} {theirs}", pins < theirs))
        checks.append((f"texts as in FP32: {same[US]}, {tool} {same[tool]}", same[US] >= same[tool]))
        checks.append(_faster(runs[US], runs[tool], tool))
    return checks


def _pin(
    args: argparse.Namespace, model: Path, fmt: str, data: Path, target: str, out: Path, *more: str
) -> Measured:
    command = [sys.executable, "-m", "diag.cli.main", "pin", str(model), "--format", fmt, "--data", str(data)]
    command += ["--target", target, "--out", str(out), "--budget", args.budget, "--json", *more]
    run = measured(command, _limits(args), CHECKOUT)
    # Exit code 1 says that the target is missed: a result, too.
    return run if "pins" in run.detail and (out / "typed.onnx").is_file() else _ran(run, US)


def _ran(run: Measured, tool: str) -> Measured:
    """The run. Ends the benchmark when the tool failed."""
    if run.status != "ok":
        raise SystemExit(f"{tool}: {run.status} after {run.wall_s:.0f} s: {run.detail.get('reason')}")
    return run


def _copies(files: Sequence[Path], folder: Path) -> Path:
    folder.mkdir()
    for file in files:
        shutil.copy(file, folder)
    return folder


def _limits(args: argparse.Namespace) -> Limits:
    return Limits(args.time_limit_s, args.memory_limit_gb)


def _read(args: argparse.Namespace, outputs: list[Array]) -> list[str]:
    return [text for array in outputs for text in read_lines(args.recogniser, array)]


def _pins(run: Measured) -> int:
    pins = run.detail["pins"]
    return len(pins) if isinstance(pins, list) else 0


def _kept(run: Measured) -> str:
    """What the INT8 task's tools gave more bits."""
    if "pins" in run.detail:
        return f"{_pins(run)} pins in {run.detail['format']}"
    return f"{run.detail['promoted']} of {run.detail['candidates']} promoted to INT16"


def _work(run: Measured) -> str:
    """What the tool ran, in its own units."""
    if "pins" in run.detail:
        passes = float(str(run.detail["forward_equivalents"]))
        return f"{run.detail['trials']} trials, {passes:.0f} forward passes"
    if "evaluations" in run.detail:
        return f"{run.detail['evaluations']} sessions over all batches"
    return "one pass, all tensors kept"


def _quality(metrics: dict[str, float]) -> str:
    return f"top-1 {metrics['top1']:.4f}, KL {metrics['kl']:.2g}, {metrics['sqnr_db']:.1f} dB"


def _faster(ours: Measured, theirs: Measured, tool: str) -> tuple[str, bool]:
    return f"seconds: {ours.wall_s:.0f}, {tool} {theirs.wall_s:.0f}", ours.wall_s < theirs.wall_s


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| tool | kept higher | on batches held out | time | peak memory | work |",
        "|---|---|---|---:|---:|---|",
    ]
    for row in rows:
        measures = f"{row.run.wall_s:.0f} s | {row.run.peak_mb:.0f} MB"
        lines.append(f"| {row.tool} | {row.kept} | {row.quality} | {measures} | {row.work} |")
    return "\n".join(lines)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.search_peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--autocast", metavar="PYTHON", help="interpreter with nvidia-modelopt and its ONNX parts"
    )
    parser.add_argument("--smollm2", type=Path, metavar="MODEL")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="BATCHES",
        help="folder of .npz: first AutoCast's, last the judge's",
    )
    parser.add_argument("--data", type=Path, metavar="BATCHES", help="folder of .npz for pin")
    parser.add_argument(
        "--autocast-batches", type=int, default=1, help="AutoCast keeps every tensor of each in memory"
    )
    parser.add_argument("--limit", type=int, default=12, help="batches that pin gets")
    parser.add_argument("--held-out", type=int, default=8, help="batches of the judge, behind pin's")
    parser.add_argument("--quark", metavar="PYTHON", help="interpreter with amd-quark, torch and onnxruntime")
    parser.add_argument("--recogniser", type=Path, metavar="MODEL", help="PP-OCRv4's, in opset 13 or later")
    parser.add_argument("--target", default="top1>=0.99", help="of the recogniser: top1, kl or sqnr_db")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="JSON files of all runs, a file for each peer"
    )
    parser.add_argument("--budget", default="5m", help="of pin's search")
    parser.add_argument("--time-limit-s", type=float, default=1200.0, help="a run is given up after so long")
    parser.add_argument("--memory-limit-gb", type=float, default=24.0, help="address space that a run gets")
    args = parser.parse_args(arguments)
    if not (args.autocast or args.quark):
        parser.error("name --autocast or --quark")
    if args.autocast and not (args.smollm2 and args.calibration and args.data):
        parser.error("--autocast needs --smollm2, --calibration and --data")
    if args.quark and not args.recogniser:
        parser.error("--quark needs --recogniser")
    return args


if __name__ == "__main__":
    sys.exit(main())
