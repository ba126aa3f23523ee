"""Per-layer comparison, FP32 against INT8: `trtdiag compare` beside its peers, on the same batches.

    python -m benchmarks.compare_peers --out docs/measurements/compare.json

Every run is a process of its own: wall time from start to exit, peak resident memory. See README.md here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.measure import Limits, Measured, measured

CHECKOUT = Path(__file__).resolve().parents[1]
PEERS = ("bare", "polygraphy", "polygraphy-kept", "qdq-loss-debug")
TOOLS = (*PEERS, "trtdiag")
TITLES = {
    "bare": "ONNX Runtime alone, both models, all outputs",
    "polygraphy": "Polygraphy, mark all (streaming, its default)",
    "polygraphy-kept": "Polygraphy, mark all (--no-streaming)",
    "qdq-loss-debug": "onnxruntime qdq_loss_debug",
    "trtdiag": "trtdiag compare",
}
_PACKAGES = ("trtdiag", "onnxruntime", "onnx", "numpy", "polygraphy")


@dataclass(frozen=True)
class Run:
    """One measured run of one tool on one model."""

    model: str
    tool: str
    batches: int
    status: str
    wall_s: float
    peak_mb: float
    detail: Mapping[str, object]


_NONE = Run("", "trtdiag", 0, "failed", 0.0, 0.0, {})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Exit 1 when `trtdiag compare` itself did not succeed."""
    args = _arguments(arguments)
    limits = Limits(args.time_limit_s, args.memory_limit_gb)
    runs: list[Run] = []
    for model in args.models:
        paths = _prepared(model)
        for tool in args.tools:
            # The long run comes last and is ours alone: it shows whether memory grows with the batches.
            counts = [args.batches, args.flat] if tool == "trtdiag" and args.flat else [args.batches]
            for batches in counts:
                again = args.repeat if tool in ("bare", "trtdiag") else 1
                tries = [_run(model, tool, batches, paths, limits, args.trtdiag) for _ in range(again)]
                runs.append(min(tries, key=lambda run: (run.status != "ok", run.wall_s)))
                _say(runs[-1])
    print(table(runs), "", *targets(runs), sep="\n")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": _machine(), "runs": [asdict(run) for run in runs]}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(run.tool == "trtdiag" and run.status != "ok" for run in runs))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.compare_peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=("minilm", "smollm2"), default=["minilm", "smollm2"])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--batches", type=int, default=8, help="batches that every tool gets (default: 8)")
    parser.add_argument("--flat", type=int, default=64, help="batches of trtdiag's long run; 0: none")
    parser.add_argument("--repeat", type=int, default=3, help="runs of bare and trtdiag; the fastest counts")
    parser.add_argument("--time-limit-s", type=float, default=1200.0, help="a run is given up after so long")
    parser.add_argument("--memory-limit-gb", type=float, default=16.0, help="address space that a run gets")
    parser.add_argument(
        "--trtdiag",
        default=f"{sys.executable} -m diag.cli.main",
        help="the command that starts trtdiag (default: this interpreter's, from the checkout)",
    )
    parser.add_argument("--out", type=Path, help="JSON file of all runs")
    return parser.parse_args(arguments)


def _prepared(model: str) -> Mapping[str, object]:
    """Paths of the model, its Q/DQ twin and the batches; made in a process of its own when missing."""
    command = [sys.executable, "-m", "benchmarks.peer_work", "prepare", model]
    made = measured(command, Limits(1800, 64), CHECKOUT)
    if made.status != "ok":
        raise SystemExit(f"{model} cannot be prepared: {made.detail.get('reason')}")
    return made.detail


def _run(
    model: str, tool: str, batches: int, paths: Mapping[str, object], limits: Limits, trtdiag: str
) -> Run:
    data = str(paths["data"] if batches <= 8 else paths["many"])
    with tempfile.TemporaryDirectory() as scratch:
        if tool == "trtdiag":
            command = _ours(trtdiag, str(paths["model"]), data, batches, Path(scratch))
        else:
            command = [sys.executable, "-m", "benchmarks.peer_work", tool, "--batches", str(batches)]
            command += ["--model", str(paths["model"]), "--qdq", str(paths["qdq"]), "--data", data]
        result: Measured = measured(command, limits, CHECKOUT)
    return Run(model, tool, batches, result.status, result.wall_s, result.peak_mb, result.detail)


def _ours(trtdiag: str, model: str, data: str, batches: int, out: Path) -> list[str]:
    """The whole job as a user types it: it also calibrates, quantizes and writes both reports."""
    command = [*trtdiag.split(), "compare", model, "--format", "int8", "--data", data]
    return [*command, "--limit", str(batches), "--out", str(out / "out"), "--quiet"]


def table(runs: Sequence[Run]) -> str:
    """The runs as a Markdown table; time and memory also as multiples of trtdiag's on the same batches."""
    lines = [
        "| model | tool | batches | time | x trtdiag | peak memory | x trtdiag |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        ours = _ours_beside(run, runs) or _NONE
        cells = [run.model, TITLES[run.tool], str(run.batches)]
        if run.status in ("ok", "timeout", "memory"):
            more = "" if run.status == "ok" else "> "
            cells += [f"{more}{run.wall_s:.1f} s", _ratio(run.wall_s, ours.wall_s, more)]
            cells += [f"{more}{run.peak_mb:.0f} MB", _ratio(run.peak_mb, ours.peak_mb, more)]
        else:
            cells += ["failed", "", str(run.detail.get("reason", "")).replace("|", "/"), ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ours_beside(run: Run, runs: Sequence[Run]) -> Run | None:
    """trtdiag's run on the same model and as many batches; its long run is set against its short one."""
    own = [r for r in runs if r.tool == "trtdiag" and r.model == run.model and r.status == "ok"]
    if run.tool == "trtdiag":
        return min(own, key=lambda r: r.batches, default=None)
    return next((r for r in own if r.batches == run.batches), None)


def _ratio(value: float, base: float, more: str) -> str:
    return f"{more}{value / base:.2f}" if base else ""


def targets(runs: Sequence[Run]) -> list[str]:
    """What the project asks of itself, each as one line with the measured figure."""
    lines = []
    for ours in (r for r in runs if r.tool == "trtdiag" and r.status == "ok"):
        same = [r for r in runs if (r.model, r.batches) == (ours.model, ours.batches)]
        beside = {r.tool: r for r in same if r.status != "failed"}
        if bare := beside.get("bare"):
            lines.append(_target(ours.model, "time over bare runs", ours.wall_s / bare.wall_s, "<=", 1.5))
        for tool in (t for t in PEERS if t != "bare" and t in beside):
            faster, smaller = beside[tool].wall_s / ours.wall_s, beside[tool].peak_mb / ours.peak_mb
            lines.append(_target(ours.model, f"times faster than {tool}", faster, ">=", 5))
            lines.append(_target(ours.model, f"times less memory than {tool}", smaller, ">=", 5))
        short = _ours_beside(ours, runs) or ours
        if short is not ours:
            what = f"memory at {ours.batches} over {short.batches} batches"
            lines.append(_target(ours.model, what, ours.peak_mb / short.peak_mb, "<=", 1.1))
    return lines


def _target(model: str, what: str, value: float, sign: str, bound: float) -> str:
    met = value <= bound if sign == "<=" else value >= bound
    return f"- {model}: {what} {value:.2f} ({sign} {bound:g}): {'met' if met else 'MISSED'}"


def _say(run: Run) -> None:
    shown = f"{run.wall_s:8.1f} s {run.peak_mb:8.0f} MB  {run.status}"
    print(f"{run.model:8} {run.tool:16} {run.batches:3} {shown}", file=sys.stderr, flush=True)


def _machine() -> dict[str, object]:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory_gb, 1),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
