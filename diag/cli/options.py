"""Options that several commands share, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="FP32 ONNX model.")]
Plan = Annotated[str | None, typer.Option("--plan", metavar="PLAN", help="Precision plan (YAML).")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="A plan without pins: int8, fp8, int4, mxfp8, nvfp4, fp16, bf16, tf32 or fp32.",
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="DATA",
        help="An .npz file or a folder of them, saved inputs (.json), a load_data() script, or random:SEED.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", help="Take the first N batches only.")]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration", metavar="TABLE", help="Table of trtdiag calibrate, or a TensorRT calibration cache."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No summary and no progress.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shapes", metavar="INPUT:MIN/OPT/MAX", help="e.g. x:1x64/8x64/16x64. Repeatable."),
]
Target = Annotated[
    str | None,
    typer.Option("--compute-capability", metavar="SM", help="TensorRT-RTX's target, e.g. SM89, or CURRENT."),
]
Tf32 = Annotated[bool, typer.Option(help="Allow TF32 where the plan says FP32.")]
OptLevel = Annotated[
    int | None, typer.Option("--opt-level", metavar="N", help="Builder optimisation level, 0 to 5.")
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="S", help="Stop after so many seconds.")]
