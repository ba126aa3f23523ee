"""The table of metrics: name, unit, which way is better, and what the number means.

Gate, report, terminal and documentation read this table, so that a metric means one thing everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "zero", "none"]
"""`zero`: signed, judged by its magnitude. `none`: informative, neither good nor bad."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `unit` is empty for plain ratios."""

    name: str
    unit: str
    better: Better
    meaning: str


_ROWS = (
    Metric(
        "sqnr_db",
        "dB",
        "higher",
        "Signal-to-quantization-noise ratio: energy of the reference over energy of the error.",
    ),
    Metric("rel_l2", "", "lower", "Relative L2 error: norm of the error over norm of the reference."),
    Metric(
        "cosine",
        "",
        "higher",
        "Cosine of the angle between reference and candidate; blind to a common factor.",
    ),
    Metric("max_abs", "", "lower", "Largest absolute error of any element."),
    Metric("mean_error", "", "zero", "Mean of candidate minus reference: the bias that averaging keeps."),
    Metric(
        "channel_min_sqnr_db",
        "dB",
        "higher",
        "SQNR of the worst channel; shows dead channels that the whole-tensor number hides.",
    ),
    Metric(
        "nonfinite",
        "elements",
        "lower",
        "Elements that are NaN or infinite in the candidate where the reference is finite.",
    ),
    Metric(
        "zero_collapsed_rows",
        "rows",
        "lower",
        "Rows (last axis) that are not zero in the reference and all zero in the candidate.",
    ),
    Metric(
        "kl",
        "nats",
        "lower",
        "Mean Kullback-Leibler divergence of the candidate's softmax distribution from the reference's.",
    ),
    Metric("top1", "share", "higher", "Share of rows whose largest element is the reference's."),
    Metric(
        "flips",
        "rows",
        "lower",
        "Rows with another largest element although the reference's margin exceeds the noise.",
    ),
    Metric("worst_batch_sqnr_db", "dB", "higher", "SQNR of the worst single batch."),
    Metric("elements", "elements", "none", "Elements compared, over all batches."),
    Metric("reference_rms", "", "none", "Root mean square of the reference."),
    Metric("reference_absmax", "", "none", "Largest magnitude in the reference."),
)

METRICS: dict[str, Metric] = {row.name: row for row in _ROWS}

_DRIFT_ROWS = (
    Metric("drifting_tensors", "tensors", "lower", "Tensors whose production differs from calibration."),
    Metric("sqnr_loss_db", "dB", "lower", "SQNR that the calibrated range loses on production."),
    Metric("saturation", "share", "lower", "Share of production's values beyond the calibrated range."),
    Metric("overflow", "", "lower", "p99.99 of production's |x| over the calibrated range."),
    Metric("under_use", "", "lower", "The calibrated range over p99.99 of production's |x|."),
    Metric("wasserstein_steps", "steps", "lower", "Wasserstein-1 distance, in quantization steps."),
)

DRIFT_METRICS: dict[str, Metric] = {row.name: row for row in _DRIFT_ROWS}
"""Figures of `trtdiag drift`, which speak of tensors instead of outputs."""
