"""`trtdiag build`: an engine from a model and a plan, and what is really in it."""

from __future__ import annotations

from typing import Annotated

import typer

from diag.cli import options
from diag.cli.console import Output, with_bar
from diag.pipeline.build.job import Built, build
from diag.pipeline.build.settings import BuildSettings

NAME = "build"
HELP = "Build an engine from a model and a plan, and check that it holds the types that were asked for."
EXAMPLE = (
    "Example: trtdiag build model.onnx --format int8 --data batches/ --engine tensorrt-rtx --out model.engine"
)

Engine = Annotated[str, typer.Option("--engine", metavar="ENGINE", help="tensorrt or tensorrt-rtx.")]
Out = Annotated[str, typer.Option("--out", metavar="ENGINE", help="File for the engine.")]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="DATA", help="Batches to calibrate with and to take the shapes from."),
]
Workspace = Annotated[
    int | None, typer.Option("--workspace-mb", metavar="N", help="Limit of the builder's workspace.")
]
VersionCompatible = Annotated[
    bool, typer.Option("--version-compatible", help="Loadable by later TensorRT versions.")
]
Refit = Annotated[bool, typer.Option("--refit", help="Weights can be replaced later.")]
TimingCache = Annotated[
    str | None,
    typer.Option(
        "--timing-cache", metavar="FILE", help="TensorRT only; timing.cache beside the engine by default."
    ),
]
NoTimingCache = Annotated[
    bool, typer.Option("--no-timing-cache", help="Time every tactic anew (the noise floor of rebuilding).")
]
Weak = Annotated[
    bool,
    typer.Option("--weak", help="Weak typing (TensorRT 10 and older): flags, pins obeyed, a calibrator."),
]
Cache = Annotated[
    str | None,
    typer.Option("--cache", metavar="FILE", help="With --weak: calibration cache, read or written."),
]


def run(
    model: options.Model,
    engine: Engine,
    out: Out,
    plan: options.Plan = None,
    format_: options.Format = None,
    calibration: options.Calibration = None,
    data: Data = None,
    limit: options.Limit = None,
    shapes: options.Shapes = None,
    compute_capability: options.Target = None,
    tf32: options.Tf32 = True,
    opt_level: options.OptLevel = None,
    workspace_mb: Workspace = None,
    version_compatible: VersionCompatible = False,
    refit: Refit = False,
    timing_cache: TimingCache = None,
    no_timing_cache: NoTimingCache = False,
    timeout: options.Timeout = 1800.0,
    weak: Weak = False,
    cache: Cache = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    settings = BuildSettings(
        model=model,
        out=out,
        engine=engine,
        plan=plan,
        format=format_,
        calibration=calibration,
        data=data,
        limit=limit,
        compute_capability=compute_capability,
        shapes=tuple(shapes or ()),
        tf32=tf32,
        opt_level=opt_level,
        workspace_mb=workspace_mb,
        version_compatible=version_compatible,
        refit=refit,
        timing_cache=timing_cache,
        use_timing_cache=not no_timing_cache,
        timeout_s=timeout,
        weak=weak,
        cache=cache,
    )
    built = with_bar(quiet or as_json, lambda progress: build(settings, progress))
    Output(as_json, quiet).result(built.as_dict(), lambda: _text(built))
    return 0


def _text(built: Built) -> str:
    result, settings = built.result, built.settings
    typing = "weakly" if settings.weak else "strongly"
    target = f" for {built.target}" if built.target else ""
    lines = [
        f"{settings.out}: {settings.engine} {result.version}{target}, {typing} typed, "
        f"TF32 {'on' if settings.tf32 else 'off'}, {result.engine_bytes / 1e6:.1f} MB",
        f"{len(result.kernels)} kernels, built in {result.seconds:.1f} s, {result.wall_seconds:.1f} s in all",
    ]
    for asked, found in sorted(built.built.items()):
        said = ", ".join(f"{number} {name}" for name, number in sorted(found.items()))
        lines.append(f"{sum(found.values())} layers asked in {asked}: built {said}")
    lines += [f"{fact.severity}: {fact.text}" for fact in built.facts]
    lines += [f"note: {note}" for note in built.notes]
    return "\n".join([*lines, "Files: " + "  ".join(built.files.values())])
