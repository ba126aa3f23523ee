"""`trtdiag compare`: the main job."""

from __future__ import annotations

from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Output, command_line, exit_code, stdout_console, with_bar
from diag.gate.threshold import parse_threshold
from diag.pipeline.compare.dry_run import dry_run
from diag.pipeline.compare.job import compare
from diag.pipeline.settings import CompareSettings, EngineSettings
from diag.progress import Silent
from diag.render.text import summary

NAME = "compare"
HELP = "Compare a model under a precision plan with its FP32 reference, layer by layer."
EXAMPLE = (
    'Example: trtdiag compare model.onnx --format int8 --data batches/ --fail-under "sqnr_db>=30" --out out'
)


Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for report.json and report.html.")]
Engine = Annotated[
    str,
    typer.Option("--engine", metavar="ENGINE", help="emulate, tensorrt, tensorrt-rtx, or a FILE.engine."),
]
NoiseFloor = Annotated[
    bool, typer.Option("--noise-floor", help="Build once more: what two builds differ by.")
]
Observer = Annotated[
    bool, typer.Option("--observer", help="Build once more with every tensor marked: what marks change.")
]
FusionOff = Annotated[
    bool, typer.Option("--fusion-off", help="Build twice more with less fusion: is it the cause?")
]
FailUnder = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-under", metavar="CHECK", help='Exit 1 unless it holds, e.g. "sqnr_db>=30". Repeatable.'
    ),
]
SliceMb = Annotated[
    int, typer.Option("--slice-mb", min=1, help="Activations held at a time; larger graphs run in slices.")
]
Resume = Annotated[bool, typer.Option(help="Go on where an interrupted run of the same command stopped.")]
SaveTyped = Annotated[bool, typer.Option("--save-typed", help="Write the typed model to DIR/typed.onnx.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and estimate time and memory only.")
]


def run(
    model: options.Model,
    data: options.Data,
    out: Out,
    plan: options.Plan = None,
    format_: options.Format = None,
    calibration: options.Calibration = None,
    engine: Engine = "emulate",
    shapes: options.Shapes = None,
    compute_capability: options.Target = None,
    tf32: options.Tf32 = True,
    opt_level: options.OptLevel = None,
    timeout: options.Timeout = 1800.0,
    noise_floor: NoiseFloor = False,
    observer: Observer = False,
    fusion_off: FusionOff = False,
    limit: options.Limit = None,
    fail_under: FailUnder = None,
    slice_mb: SliceMb = 32,
    resume: Resume = True,
    save_typed: SaveTyped = False,
    dry: DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    settings = CompareSettings(
        model=model,
        data=data,
        out=out,
        plan=plan,
        format=format_,
        calibration=calibration,
        engine=EngineSettings(
            engine=engine,
            shapes=tuple(shapes or ()),
            tf32=tf32,
            opt_level=opt_level,
            compute_capability=compute_capability,
            timeout_s=timeout,
            noise_floor=noise_floor,
            observer=observer,
            fusion_off=fusion_off,
        ),
        limit=limit,
        fail_under=tuple(parse_threshold(text) for text in fail_under or ()),
        slice_mb=slice_mb,
        resume=resume,
        save_typed=save_typed,
        command=command_line(),
    )
    output = Output(as_json, quiet)
    if dry:
        estimate = dry_run(settings, Silent())
        output.result(estimate.as_dict(), estimate.as_text)
        return 0
    report = with_bar(quiet or as_json, lambda progress: compare(settings, progress))
    files = [f"{out}/report.html", f"{out}/report.json"]
    output.result(report.model_dump(by_alias=True), lambda: summary(report, stdout_console().width, files))
    return exit_code(report)
