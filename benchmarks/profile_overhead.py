"""What activation statistics cost: `trtdiag profile` beside bare runs, `--merge`, and `diag.Profiler`.

    python -m benchmarks.profile_overhead --out docs/measurements/profile.json

On MiniLM. Bare runs and counted runs take turns in one process, so that a busy machine slows both; the ratios
are of medians, of wall time and of processor time (which other processes disturb less). Memory and merging
are measured on processes of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.compare_peers import CHECKOUT, _machine, _target
from benchmarks.measure import Limits, Measured, measured

if TYPE_CHECKING:
    from diag.drift.stats import Stats

PARTS = ("speed", "memory", "merge", "profiler")
_LIMITS = Limits(1200, 24)
_TENSORS, _FILES, _DISTINCT = 500, 1000, 12
_TURNS = 7
Found = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print figures and targets, write the JSON. Exit 1 when a target was missed."""
    args = _arguments(arguments)
    if args.work:
        print(json.dumps(WORK[args.work](args)))
        return 0
    found: dict[str, object] = {"machine": _machine()}
    lines: list[str] = []
    for part in args.parts:
        figures = MEASURE[part](args)
        found[part] = figures
        said = _judged(part, figures)
        print("\n".join([f"{part}: {json.dumps(figures)}", *said]), flush=True)
        lines += said
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any("MISSED" in line for line in lines))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.profile_overhead", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", type=Path, help="another MiniLM file than the packaged one")
    parser.add_argument("--data", type=Path, help="folder of its batches")
    parser.add_argument("--batches", type=int, default=16, help="of 8 sentences each, in a turn of `speed`")
    parser.add_argument("--requests", type=int, default=10_000, help="of `memory`")
    parser.add_argument("--calls", type=int, default=300, help="in a turn of `profiler`")
    parser.add_argument("--rate", type=float, default=0.01, help="of `profiler`")
    parser.add_argument("--turns", type=int, default=_TURNS)
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    parser.add_argument("--work", choices=tuple(WORK), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _judged(part: str, figures: Found) -> list[str]:
    targets = {
        "speed": [("profile over bare, wall time", "wall_ratio", "<=", 1.5)],
        "memory": [("memory at all requests over 10", "ratio", "<=", 1.1)],
        "merge": [
            (f"seconds to merge {_FILES} files of {_TENSORS} tensors", "wall_s", "<=", 10.0),
            ("MB of the merged file", "merged_mb", "<=", 2.0),
        ],
        "profiler": [
            ("overhead in processor time, inputs and outputs", "io_cpu_overhead", "<=", 0.05),
            ("overhead in processor time, all tensors", "all_cpu_overhead", "<=", 0.05),
        ],
    }
    return [_target("minilm", what, figures[key], sign, bound) for what, key, sign, bound in targets[part]]


def _this(args: argparse.Namespace, work: str) -> Measured:
    """A part of the work in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.profile_overhead", "--work", work]
    command += ["--batches", str(args.batches), "--calls", str(args.calls), "--rate", str(args.rate)]
    command += ["--turns", str(args.turns), "--requests", str(args.requests)]
    for name in ("model", "data"):
        command += [f"--{name}", str(getattr(args, name))] if getattr(args, name) else []
    return _checked(measured(command, _LIMITS, CHECKOUT))


def _checked(run: Measured) -> Measured:
    if run.status != "ok":
        raise SystemExit(f"a run ended as {run.status}: {run.detail.get('reason')}")
    return run


def _trtdiag(*words: object) -> Measured:
    command = [sys.executable, "-m", "diag.cli.main", *map(str, words), "--json"]
    return _checked(measured(command, _LIMITS, CHECKOUT))


def _paths(args: argparse.Namespace) -> tuple[Path, Path]:
    if args.model and args.data:
        return args.model, args.data
    from fixtures.real import minilm, minilm_data

    return minilm(), minilm_data("en_calib512")


def _table(args: argparse.Namespace, scratch: str) -> Path:
    model, data = _paths(args)
    table = Path(scratch) / "table.json"
    _trtdiag("calibrate", model, "--data", data, "--limit", 8, "--out", table)
    return table


def _ratios(turns: int, works: dict[str, Callable[[], object]]) -> Found:
    """Medians over turns of wall and processor seconds of each work; they take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for work in works.values():
        work()  # warm
    for _ in range(turns):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        f"{name}_{kind}_s": statistics.median(pair[place] for pair in pairs)
        for name, pairs in times.items()
        for place, kind in enumerate(("wall", "cpu"))
    }


def _speed(args: argparse.Namespace) -> Found:
    """Every calibrated tensor, inputs and outputs, counted; beside the same session alone."""
    from diag.calibration.table import read_table
    from diag.drift.profile import profile, scaled_by_table, watched_tensors
    from diag.drift.stats import empty_stats
    from diag.engines.onnxruntime import own_process
    from diag.engines.watch import Watcher
    from diag.feeds import open_feeds
    from diag.model.load import load_model
    from diag.progress import Silent

    own_process()
    with tempfile.TemporaryDirectory() as scratch:
        table = read_table(_table(args, scratch))
    path, data = _paths(args)
    model = load_model(str(path))
    feeds = open_feeds(str(data), model.inputs, args.batches)
    tensors = scaled_by_table(model, watched_tensors(model, table.tensors), table)
    like = empty_stats(model.sha256, None, tensors)
    names = [tensor.name for tensor in tensors]

    def bare() -> None:
        watcher = Watcher(model, names)  # what is counted makes a session too
        for batch in feeds:
            watcher.run(batch)

    found = _ratios(
        args.turns,
        {
            "bare": bare,
            "profile": lambda: profile(model, like, feeds, False, None, Silent()),
        },
    )
    found |= {f"{k}_ratio": found[f"profile_{k}_s"] / found[f"bare_{k}_s"] for k in ("wall", "cpu")}
    elements = sum(array.size for array in Watcher(model, names).run(feeds.first()).values())
    return {**found, "tensors": len(tensors), "elements_a_batch": elements, "batches": args.batches}


def _memory(args: argparse.Namespace) -> Found:
    """Peak memory of `trtdiag profile` on 10 requests and on many, one sentence a batch."""
    with tempfile.TemporaryDirectory() as scratch:
        table = _table(args, scratch)
        runs = {}
        for requests in (10, args.requests):
            data = f"random:0:{_free_dims(args)},batches={requests}"
            words = ("profile", _paths(args)[0], "--data", data, "--calibration", table)
            runs[requests] = _trtdiag(*words, "--out", f"{scratch}/{requests}.stats")
        few, many = runs[10], runs[args.requests]
        size = Path(f"{scratch}/{args.requests}.stats").stat().st_size / 1e6
    return {
        "requests": args.requests,
        "few_mb": few.peak_mb,
        "many_mb": many.peak_mb,
        "ratio": many.peak_mb / few.peak_mb,
        "many_wall_s": many.wall_s,
        "file_mb": size,
    }


def _free_dims(args: argparse.Namespace) -> str:
    """Sizes of the model's free dimensions: one sentence of 16 tokens."""
    from diag.model.load import load_model

    shapes = [info.shape or () for info in load_model(str(_paths(args)[0])).inputs.values()]
    free = list(dict.fromkeys(dim for shape in shapes for dim in shape if isinstance(dim, str)))
    return ",".join(f"{dim}={size}" for dim, size in zip(free, (1, 16), strict=False))


def _merge(args: argparse.Namespace) -> Found:
    """Files that differ: sums of three of a dozen, each of 8 requests of 4,096 normal elements a tensor."""
    from diag.drift.merge import merge
    from diag.drift.stats_file import stats_bytes

    with tempfile.TemporaryDirectory() as scratch:
        parts = [_statistics(seed) for seed in range(_DISTINCT)]
        triples = itertools.cycle(itertools.combinations(range(_DISTINCT), 3))
        paths = [Path(scratch) / f"{number}.stats" for number in range(_FILES)]
        for number, (path, triple) in enumerate(zip(paths, triples, strict=False)):
            path.write_bytes(stats_bytes(_dated(merge([parts[i] for i in triple]), number)))
        run = _trtdiag("profile", "--merge", *paths, "--out", f"{scratch}/merged")
        return {
            "files": len(paths),
            "tensors": _TENSORS,
            "wall_s": run.wall_s,
            "peak_mb": run.peak_mb,
            "one_file_mb": paths[0].stat().st_size / 1e6,
            "merged_mb": (Path(scratch) / "merged").stat().st_size / 1e6,
        }


def _dated(found: Stats, number: int) -> Stats:
    """Statistics of an hour of their own, so that none counts as the same file twice."""
    hour = dataclasses.replace(found.source, begun=3600.0 * number, ended=3600.0 * number + 3599)
    return dataclasses.replace(found, source=hour)


def _statistics(seed: int) -> Stats:
    from diag.drift.accumulate import count_batch, requests_of
    from diag.drift.stats import Tensor, empty_stats

    random = np.random.default_rng(seed)
    tensors = tuple(Tensor(f"/layer.{i}/output", "activation", 5.0, "table") for i in range(_TENSORS))
    x = random.normal(size=(8, 4096)).astype(np.float32)
    values = {tensor.name: x * np.float32(random.uniform(0.3, 2)) for tensor in tensors}
    return count_batch(empty_stats("0" * 64, "1" * 64, tensors), values, requests_of({"x": x}, str(seed)))


def _profiler(args: argparse.Namespace) -> Found:
    """Calls of one sentence: the session alone, with its inputs and outputs observed, with all tensors."""
    import onnxruntime as ort

    import diag

    path, data = _paths(args)
    with tempfile.TemporaryDirectory() as scratch:
        table = _table(args, scratch)
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        with np.load(next(iter(sorted(data.glob("*.npz"))))) as batch:
            feed = {name: batch[name][:1] for name in batch.files}

        def calls(run: Callable[..., object]) -> Callable[[], None]:
            def work() -> None:
                for _ in range(args.calls):
                    run(None, feed)

            return work

        watching = {
            kind: diag.Profiler(
                f"{scratch}/{kind}", model=path, calibration=table, tensors=kind, rate=args.rate
            )
            for kind in ("io", "all")
        }
        works = {"bare": calls(session.run)}
        works |= {kind: calls(watch.wrap(session).run) for kind, watch in watching.items()}
        found = _ratios(args.turns, works)
        for watch in watching.values():
            watch.close()
    for kind in watching:
        for clock in ("wall", "cpu"):
            found[f"{kind}_{clock}_overhead"] = found[f"{kind}_{clock}_s"] / found[f"bare_{clock}_s"] - 1
    return {**found, "calls": args.calls, "rate": args.rate}


WORK: dict[str, Callable[[argparse.Namespace], Found]] = {"speed": _speed, "profiler": _profiler}
"""What needs a process of its own, because it settles how ONNX Runtime is used in it."""

MEASURE: dict[str, Callable[[argparse.Namespace], Found]] = {
    "speed": lambda args: dict(_this(args, "speed").detail),  # type: ignore[arg-type]
    "memory": _memory,
    "merge": _merge,
    "profiler": lambda args: dict(_this(args, "profiler").detail),  # type: ignore[arg-type]
}


if __name__ == "__main__":
    sys.exit(main())
