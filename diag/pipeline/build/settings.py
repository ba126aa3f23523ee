"""What a build is asked for, and which options contradict each other."""

from __future__ import annotations

from dataclasses import dataclass

from diag.errors import UsageError

ENGINES = ("tensorrt", "tensorrt-rtx")


@dataclass(frozen=True)
class BuildSettings:
    """Options of `trtdiag build`, in its terms."""

    model: str
    out: str
    engine: str
    plan: str | None = None
    format: str | None = None
    calibration: str | None = None
    data: str | None = None
    limit: int | None = None
    compute_capability: str | None = None
    shapes: tuple[str, ...] = ()
    tf32: bool = True
    opt_level: int | None = None
    workspace_mb: int | None = None
    version_compatible: bool = False
    refit: bool = False
    timing_cache: str | None = None
    use_timing_cache: bool = True
    timeout_s: float = 1800.0
    weak: bool = False
    cache: str | None = None

    @property
    def planned(self) -> bool:
        """Whether a plan or a format was given; without, the model is built as it is."""
        return self.plan is not None or self.format is not None


def refuse_settings(settings: BuildSettings) -> None:
    """Raise UsageError for options that cannot go together."""
    if settings.engine not in ENGINES:
        raise UsageError(f"there is no engine {settings.engine!r}", f"Choose {' or '.join(ENGINES)}.")
    rtx, planned = settings.engine == "tensorrt-rtx", settings.planned
    conflicts = (
        (rtx and settings.weak, "TensorRT-RTX has no weak typing", "Build without --weak."),
        (
            not rtx and settings.compute_capability is not None,
            "TensorRT builds for the GPU that is here",
            "Leave --compute-capability out, or choose --engine tensorrt-rtx.",
        ),
        (
            rtx and settings.timing_cache is not None,
            "TensorRT-RTX chooses tactics at run time and has no timing cache when it builds",
            "Leave --timing-cache out.",
        ),
        (
            settings.timing_cache is not None and not settings.use_timing_cache,
            "--timing-cache and --no-timing-cache contradict each other",
            "Give one of them.",
        ),
        (settings.weak and not planned, "--weak needs a plan", "Give --plan or --format."),
        (
            settings.cache is not None and not settings.weak,
            "--cache is for weak typing",
            "Give --weak too, or import the scales with trtdiag calibrate.",
        ),
        (
            settings.calibration is not None and (settings.weak or not planned),
            "--calibration goes with a plan, strongly typed",
            "With --weak, scales come from --cache or --data.",
        ),
        (settings.timeout_s <= 0, "a time limit must be positive", "Leave --timeout out for half an hour."),
        (
            settings.workspace_mb is not None and settings.workspace_mb < 1,
            "a workspace must be at least 1 MB",
            "Leave it out for no limit.",
        ),
    )
    for wrong, problem, hint in conflicts:
        if wrong:
            raise UsageError(problem, hint)
