"""What each step of compensation brings to a text model in INT8, alone and after the steps before it.

    python -m benchmarks.compensation_table MODEL --calibration-data DIR --data DIR [--alone] [--pins]

Calibrates (min-max) on the first folder. Of the second, the first half of the batches judges the steps; the
other half, which no step ever saw, gives the figures: cosine and SQNR of one output, and with `--pins` the
number of pins that `trtdiag pin` needs for `--target` on it. Prints Markdown. Nothing is random: the table is
the same each time.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diag.compare.record import Record
from diag.compensation.run import STEPS, STEPS_IN_WORDS, Compensated
from diag.engines.emulation import emulate
from diag.engines.onnxruntime import Array, Session, own_process
from diag.engines.reference import with_outputs
from diag.feeds import open_feeds
from diag.gate.threshold import parse_threshold
from diag.model.graph import Model
from diag.pipeline.calibrate.compensate import CompensateSettings, CompensationJob, begin
from diag.pipeline.search.job import pin_layers
from diag.pipeline.search.settings import SearchSettings
from diag.progress import Silent


@dataclass(frozen=True)
class Row:
    """One model's figures."""

    cosine: float
    sqnr_db: float
    pins: str

    def __str__(self) -> str:
        return f"{self.cosine:.4f} | {self.sqnr_db:.2f} | {self.pins}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print, line by line."""
    args = _arguments(arguments)
    own_process()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        judging, unseen = _halves(args.data, folder, args.batches)
        job = begin(_settings(args, judging, folder), Silent())
        measure = Measure(job, args, unseen, folder)
        _print("after all steps before it", None)
        _print("nothing", measure.row(job.run([], Silent())))
        whole = job.run(args.steps, Silent())
        for step, found in whole.stages.items():
            _print(_label(step, found), measure.row(found))
        if args.alone:
            _print("\nalone", None)
            for step in args.steps:
                found = job.run([step], Silent())
                _print(_label(step, found), measure.row(found))
        difference = whole.difference
        print(
            f"\nIn FP32 the outputs differ by {difference.max_abs:.1e} (relative L2 {difference.rel_l2:.1e})."
        )
    return 0


def _print(label: str, row: Row | None) -> None:
    """A line of the table; without figures, its head."""
    if row is None:
        print(f"{label} | cosine | SQNR dB | pins\n---|---|---|---", flush=True)
    else:
        print(f"{label} | {row}", flush=True)


def _label(step: str, found: Compensated) -> str:
    kept = ", ".join(c.group for c in found.credits if c.kept and c.step == step)
    return f"{STEPS_IN_WORDS[step]}: {kept or 'nothing'} kept"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.compensation_table")
    parser.add_argument("model")
    parser.add_argument("--calibration-data", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", default="sentence_embedding")
    parser.add_argument("--target", default="cosine>=0.99")
    parser.add_argument("--pins", action="store_true", help="search pins for every line (minutes)")
    parser.add_argument("--alone", action="store_true", help="each step without the others too")
    parser.add_argument("--batches", type=int, default=12, help="batches of --data, half of them unseen")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS))
    return parser.parse_args(arguments)


def _halves(data: str, folder: Path, batches: int) -> tuple[str, str]:
    """Two folders of batches: those that judge, and those that nothing sees before the end."""
    files = sorted(Path(data).glob("*.npz"))[:batches]
    for name, part in (("judging", files[: len(files) // 2]), ("unseen", files[len(files) // 2 :])):
        (folder / name).mkdir()
        for file in part:
            shutil.copy(file, folder / name)
    return str(folder / "judging"), str(folder / "unseen")


def _settings(args: argparse.Namespace, judging: str, folder: Path) -> CompensateSettings:
    table, model = str(folder / "t.json"), str(folder / "m.onnx")
    return CompensateSettings(args.model, args.calibration_data, table, model, holdout=judging)


class Measure:
    """Figures on the unseen batches; equal models are measured once."""

    def __init__(self, job: CompensationJob, args: argparse.Namespace, unseen: str, folder: Path) -> None:
        self._job, self._args, self._unseen, self._folder = job, args, unseen, folder
        self._batches = list(open_feeds(unseen, job.planned.model.inputs))
        self._reference = self._run(job.planned.model)
        self._known: dict[tuple[tuple[str, str], ...], Row] = {}

    def row(self, found: Compensated) -> Row:
        """The figures of what came out of some steps."""
        kept = tuple((c.step, c.group) for c in found.credits if c.kept)
        if kept not in self._known:
            self._known[kept] = self._measured(found)
        return self._known[kept]

    def _measured(self, found: Compensated) -> Row:
        typed = self._job.lowering.typed(found.draft)
        emulation = emulate(typed.model)
        record = Record()
        for number, output in enumerate(self._run(Model("", emulation.proto, emulation.weights, ""))):
            record.update(number, self._reference[number], output)
        metrics = record.metrics()
        return Row(metrics["cosine"], metrics["sqnr_db"], self._pins(found) if self._args.pins else "-")

    def _run(self, model: Model) -> list[Array]:
        output = self._args.output
        session = Session(with_outputs(model.proto, [output]), model.weights)
        return [session.run(batch)[output] for batch in self._batches]

    def _pins(self, found: Compensated) -> str:
        out, model, table = (self._folder / name for name in ("pins", "m.onnx", "t.json"))
        shutil.rmtree(out, ignore_errors=True)
        self._job.write(found, model, table)
        asked = SearchSettings(
            model=str(model),
            data=self._unseen,
            out=str(out),
            target=(parse_threshold(f"{self._args.output}:{self._args.target}"),),
            format="int8",
            calibration=str(table),
        )
        pinned = pin_layers(asked, Silent())
        return str(len(pinned.search.pins)) if pinned.met else "none is enough"


if __name__ == "__main__":
    raise SystemExit(main())
