"""`trtdiag pin --confirm tensorrt` on a GPU: how many builds until a set of pins holds on the engine.

    python -m benchmarks.gpu_pins --models DIR --data DIR --out DIR

Three cases side by side, each a process of its own on its share of the cores; builds take turns at the GPU.
After four minutes (`--minutes`) what is not done is stopped; what it built until then is in the results all
the same: `gpu_pins.json` and `gpu_pins.md`. `--cpu-rehearsal` puts ONNX Runtime in TensorRT's place, with the
known defect of merged projections in INT8 over FP16 planted in it. See README.md here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite import CHECKOUT, Found, data_folder, machine_facts, plain, prepare


@dataclass(frozen=True)
class Case:
    """A plan of one model, and what it must reach."""

    model: str
    base: str
    target: str
    calibration: int
    """Batches."""
    batches: int
    """Batches that choose and those that prove."""
    weight: int = 1
    """Its share of the cores."""


CASES = {
    "minilm-int8": Case("minilm", "fp32", "sentence_embedding:cosine>=0.99", 8, 9),
    "minilm-int8-over-fp16": Case("minilm", "fp16", "sentence_embedding:cosine>=0.985", 8, 9),
    "vit-int8": Case("vit", "fp32", "sqnr_db>=30", 6, 7, weight=2),
}
"""The emulation of the second reaches its target; TensorRT 10.6 merges Q, K and V there, and misses it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; exit 1 when one failed, missed its target or took more builds than the limit."""
    args = _arguments(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.child:
        return _child(args)
    deadline = time.monotonic() + args.minutes * 60
    machine, models = machine_facts(args), _models(args)
    children = {n: _start(n, models[CASES[n].model], args, deadline) for n in args.only}
    while any(child.poll() is None for child in children.values()) and time.monotonic() < deadline:
        time.sleep(1)
    for child in children.values():
        if child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    found = {"machine": machine, "cases": {name: _collected(args.out, name) for name in children}}
    _write(args.out, found)
    print(markdown(found))
    return int(not all(_is_good(case) for case in found["cases"].values()))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_pins", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=Path, required=True, help="folder of MODEL.onnx, or of packages")
    parser.add_argument("--data", type=Path, required=True, help="folder with MODEL/calib and MODEL/eval")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON, the table and logs")
    parser.add_argument("--work", type=Path, help="folder for models and engines (default: OUT/work)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--target", help="another target for the cases that are run")
    parser.add_argument("--minutes", type=float, default=4.0, help="time limit of the whole (default: 4)")
    parser.add_argument(
        "--batches", type=int, help="batches to search on (default: 9 for MiniLM, 7 for the ViT)"
    )
    parser.add_argument("--budget", type=float, default=75.0, help="seconds of each search before the builds")
    parser.add_argument("--opt-level", type=int, default=1, help="TensorRT's optimisation level (default: 1)")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="ONNX Runtime in TensorRT's place")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--onnx", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.work = args.work or args.out / "work"
    return args


def _models(args: argparse.Namespace) -> dict[str, Path | Exception]:
    """Each model's file, or why there is none."""
    found: dict[str, Path | Exception] = {}
    for name in {CASES[case].model for case in args.only}:
        paths: list[Path] = []
        try:
            prepare(name, args, paths)
            found[name] = paths[0]
        except (OSError, subprocess.SubprocessError) as error:
            found[name] = error
    return found


def _cores(name: str, cases: Sequence[str], cores: Sequence[int]) -> Sequence[int]:
    """Those of one case: by weight, none shared where there are enough."""
    before = sum(CASES[case].weight for case in cases[: cases.index(name)])
    total = sum(CASES[case].weight for case in cases)
    begin, end = (len(cores) * at // total for at in (before, before + CASES[name].weight))
    return cores[begin:end] or cores


def _start(
    name: str, model: Path | Exception, args: argparse.Namespace, deadline: float
) -> subprocess.Popen[bytes]:
    """The process of one case."""
    (args.out / f"{name}.json").unlink(missing_ok=True)  # an older run's
    command = [sys.executable, "-m", "benchmarks.gpu_pins", "--child", name, "--onnx", str(model)]
    for option in ("models", "data", "out", "work"):
        command += [f"--{option}", str(getattr(args, option).resolve())]
    command += [
        "--opt-level",
        str(args.opt_level),
        "--budget",
        str(args.budget),
        "--seconds",
        str(deadline - time.monotonic() - 5),
    ]
    for option in ("target", "batches"):
        command += [f"--{option}", str(getattr(args, option))] if getattr(args, option) else []
    command += ["--cpu-rehearsal"] if args.cpu_rehearsal else []
    own = _cores(name, args.only, sorted(os.sched_getaffinity(0)))
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(args.models.resolve()))))
    with (args.out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONPATH": paths, "GPU_PINS_CORES": ",".join(map(str, own))},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _collected(out: Path, name: str) -> Found:
    file = out / f"{name}.json"
    if not file.is_file():
        return {"status": "failed", "reason": f"the process told nothing; see {name}.log"}
    found: Found = json.loads(file.read_text(encoding="utf-8"))
    if found["status"] == "running":
        found |= {"status": "stopped", "reason": "the time was up"}
    return found


def _write(out: Path, found: Found) -> None:
    texts = {"gpu_pins.json": json.dumps(found, indent=1) + "\n", "gpu_pins.md": markdown(found)}
    for name, text in texts.items():
        partial = out / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(out / name)


def _is_good(case: Found) -> bool:
    return bool(case["status"] == "done" and case["met"] and case["builds"] <= case["limit"])


@dataclass
class _Diary:
    """Progress that is kept in the case's file: what was built is known even if the case is killed."""

    file: Path
    began: float
    found: Found = field(default_factory=lambda: {"status": "running", "notes": [], "stages": []})

    def start(self, stage: str, total: int | None) -> None:
        self.found["stages"].append(f"{time.monotonic() - self.began:.1f} s: {stage}")
        self.keep()

    def advance(self, steps: int = 1) -> None:
        """Only stages are kept."""

    def note(self, text: str) -> None:
        self.found["notes"].append(f"{time.monotonic() - self.began:.1f} s: {text}")
        self.keep()

    def keep(self, **more: Any) -> None:
        self.found |= more
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(plain(self.found)), encoding="utf-8")
        partial.replace(self.file)


def _child(args: argparse.Namespace) -> int:
    cores = {int(core) for core in os.environ["GPU_PINS_CORES"].split(",")}
    os.sched_setaffinity(0, cores)
    os.cpu_count = lambda: len(cores)  # ONNX Runtime is given as many threads as this says
    diary = _Diary(args.out / f"{args.child}.json", time.monotonic())
    diary.keep()
    try:
        if not args.onnx.is_file():
            raise FileNotFoundError(f"no model: {args.onnx}")
        diary.keep(**_pin(args, diary), status="done")
    except Exception as error:  # the others go on
        traceback.print_exc()
        diary.keep(status="failed", reason=f"{type(error).__name__}: {error}"[:600])
    diary.keep(seconds=time.monotonic() - diary.began)
    return int(diary.found["status"] != "done")


def _pin(args: argparse.Namespace, diary: _Diary) -> Found:
    """What `trtdiag pin --confirm tensorrt` does, with another optimisation level and a time limit."""
    from diag.calibration.table import write_table
    from diag.feeds import open_feeds
    from diag.gate.threshold import parse_threshold
    from diag.pipeline.prepare import calibrate, plan_on
    from diag.pipeline.search.job import pin_layers
    from diag.pipeline.search.settings import SearchSettings
    from diag.plan.schema import plan_for_format, write_plan

    case = CASES[args.child]
    work = args.work / args.child
    work.mkdir(parents=True, exist_ok=True)
    plan = plan_for_format("int8").model_copy(update={"base": case.base})
    write_plan(plan, work / "asked.yaml")
    planned = plan_on(str(args.onnx), plan)
    data = args.data / case.model
    calibration = open_feeds(str(data_folder(data, "calib")), planned.model.inputs, case.calibration)
    table, _ = calibrate(planned, calibration, None, diary)
    assert table is not None
    write_table(table, work / "table.json")
    settings = SearchSettings(
        str(args.onnx),
        str(data_folder(data, "eval", "en")),
        str(work),
        (parse_threshold(args.target or case.target),),
        plan=str(work / "asked.yaml"),
        calibration=str(work / "table.json"),
        limit=args.batches or case.batches,
        budget_s=args.budget,
        confirm="tensorrt",
    )
    began = time.monotonic()
    builds = _builds(args)
    result = pin_layers(settings, diary, builds)
    told = _told(result, builds.seconds, time.monotonic() - began)
    return {"target": args.target or case.target, **told}


def _builds(args: argparse.Namespace) -> Any:
    from benchmarks.gpu_pins_builds import Rehearsed, TakingTurns
    from diag.pipeline.settings import EngineSettings

    if args.cpu_rehearsal:
        return Rehearsed(merges=CASES[args.child].base == "fp16")
    settings = EngineSettings("tensorrt", opt_level=args.opt_level, timeout_s=max(args.seconds, 1.0))
    return TakingTurns(settings, args.work / "gpu.lock")


def _told(result: Any, build_s: Sequence[float], seconds: float) -> Found:
    """What the table and the JSON say of a case."""
    on_builds = result.builds.as_dict() if result.builds else {}
    engine = {o.name: o.engine for o in result.report.outputs} if result.report else {}
    return {
        "met": result.met,
        "on_engine": result.on_engine,
        "verdict": result.verdict,
        "proof": result.proof,
        "pins": result.search.pins,
        "format": result.format,
        "forward_passes": result.forward_equivalents,
        "search_s": seconds,
        "build_and_run_s": list(build_s),
        "engine": engine,
        **{name: on_builds.get(name) for name in ("outcome", "builds", "limit", "groups", "minimal")},
        "emulated_pins": on_builds.get("emulated_pins"),
        "trials": on_builds.get("trials"),
    }


_HEAD = (
    "| case | target | pins, emulated | first build | pins in the end | the engine with them | builds "
    "| log2(groups) + pins + 2 | proven | seconds |",
    "|---|---|---:|---|---:|---|---:|---:|---|---:|",
)


def markdown(found: Mapping[str, Any]) -> str:
    """One row for each case, and under it every build."""
    machine = found["machine"]
    lines = ["# Pins on builds", ""]
    if machine["rehearsal"]:
        lines += ["Rehearsal without TensorRT: nothing here was measured on a GPU.", ""]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines += [f"{machine['date']}; {'; '.join(machine['gpus']) or 'no GPU'}; {versions}.", "", *_HEAD]
    lines += [_row(name, case) for name, case in found["cases"].items()]
    for name, case in found["cases"].items():
        lines += ["", f"## {name}", "", *_rest(case)]
    return "\n".join(lines) + "\n"


def _row(name: str, case: Mapping[str, Any]) -> str:
    if case["status"] != "done":
        return f"| {name} | `{CASES[name].target}` | {case['status']}: {case.get('reason', '')} |" + " |" * 7
    trials = case["trials"] or [{"values": "not run"}]
    proven = "1-minimal on builds" if case["minimal"] and case["outcome"] == "repaired" else case["outcome"]
    cells = [
        name,
        f"`{case['target']}`",
        len(case["emulated_pins"] or []),
        trials[0]["values"],
        len(case["pins"]),
        _last(case, trials),
        case["builds"],
        case["limit"],
        proven,
        f"{case['search_s']:.0f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _last(case: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> str:
    """What the set in the end gave."""
    return next((t["values"] for t in trials if t["met"] and set(t["pins"]) == set(case["pins"])), "misses")


def _rest(case: Mapping[str, Any]) -> Iterator[str]:
    if case["status"] == "done":
        yield f"- {case['verdict']}"
        yield f"- {case['proof']}"
        yield f"- pins: {', '.join(case['pins']) or 'none'}"
        seconds = ", ".join(f"{s:.1f}" for s in case["build_and_run_s"])
        yield f"- seconds to build and run each: {seconds}"
    for note in case.get("notes", []):
        yield f"- {note}"


if __name__ == "__main__":
    sys.exit(main())
