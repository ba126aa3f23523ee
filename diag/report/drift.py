"""The part of the contract that `trtdiag drift` writes: production against calibration.

Widths and distances are in quantization steps of the calibrated scale: its range ends at 127.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from diag.report.parts import STRICT, Number

Level = Literal["ok", "warn", "fail"]
"""`fail` is drift, `warn` is worth a look; see rules/drift.yaml."""


class Part(BaseModel):
    """Base of all parts."""

    model_config = STRICT


class DriftFigure(Part):
    """A judged figure of one tensor, and what it is held against."""

    value: Number
    calibration: Number | None = None
    """What the calibration data show of it under the same range; null where it compares the two."""
    null: Number | None = None
    """What one half of the calibration data shows against the other; null without halves."""
    level: Level


class DriftTensor(Part):
    tensor: str
    layer: str = ""
    """The node that makes it; empty when it is not known, the tensor's own name for a graph input."""
    level: Level
    figures: dict[str, DriftFigure]
    """`sqnr_loss_db` (the primary one), `saturation`, `overflow`, `under_use`, `wasserstein_steps`."""
    calibration_sqnr_db: Number
    """Of the tensor itself in INT8 under the calibrated range, on the calibration data."""
    production_sqnr_db: Number
    saturation_interval: tuple[Number, Number]
    """95 % interval of the saturated share over requests."""
    clipped_energy_ratio: Number
    """Energy that the range cuts off over the energy of production."""
    absmax_ratio: Number
    """Largest |x| of production over calibration's."""
    psi: Number
    """Population stability index over bins of codes; report only."""
    psi_null: Number | None = None
    """The PSI of one half of the calibration data against the other."""
    jensen_shannon_bits: Number
    """Report only, as PSI."""
    jensen_shannon_null_bits: Number | None = None
    dead_codes: Number
    """Share of the codes that calibration used and production does not."""
    alive_channels: list[int] = []
    """Channels that calibration rounds to zero throughout and production does not."""
    nonfinite: int = 0
    """NaN and infinities in production; they are in no other figure."""
    calibration_shares: list[Number] = []
    """Share of the elements in each bin of `Drift.histogram_edges`."""
    production_shares: list[Number] = []


class DriftRequest(Part):
    """One of the requests that the calibrated ranges harm most."""

    request: str
    """Its name: the file of the data and its place in it."""
    slice: str = ""
    tensor: str
    """The drifting tensor that it harms most."""
    noise_ratio: Number
    """INT8 error over energy of the request, in this tensor; infinite where it is not finite."""


class DriftSlice(Part):
    """One slice of the production data, judged on its own."""

    name: str
    requests: int
    level: Level
    cause: str | None = None
    judged: bool = True
    """False when there are too few requests to say."""
    drifting: int = 0
    """Tensors that drift."""
    worst_sqnr_loss_db: Number
    worst_saturation: Number
    requests_needed: int | None = None
    """Requests of this slice with which calibration would know the drifted ranges; null when more than were
    seen, or when nothing drifts."""


class DriftDay(Part):
    """One stretch of time, judged on its own."""

    date: str
    requests: int
    level: Level
    judged: bool = True
    cause: str | None = None
    drifting: int = 0
    worst_sqnr_loss_db: Number
    worst_saturation: Number


class DriftCost(Part):
    """A layer's INT8 error on calibration data and on production, beside the drift of what it reads."""

    layer: str
    tensor: str
    level: Level
    """Of the drift of the tensors that the layer reads."""
    calibration_sqnr_db: Number | None = None
    """Accumulated error of the quantized model at this layer; null without reference data."""
    production_sqnr_db: Number


class DriftAdvice(Part):
    """One thing to do, with what it is predicted to gain."""

    action: Literal["fix-preprocessing", "recalibrate", "change-method", "pin", "nothing"]
    text: str
    tensors: list[str] = []
    requests: list[str] = []
    """Requests to calibrate on, in the order in which they add the most."""
    gain_db: Number | None = None
    """Predicted gain in SQNR of the worst of these tensors, from histograms; null when it cannot be told."""
    command: str = ""


class Drift(Part):
    level: Level
    calibration: str
    """What was calibrated on, in words."""
    production: str
    calibration_requests: int
    production_requests: int
    focus: str = ""
    """The part of production that verdict, tensors and advice speak of: empty for all of it, else the slice
    that drifts, or the dates since drift began."""
    cause: str | None = None
    """The first tensor in graph order that drifts."""
    consequences: list[str] = []
    histogram_edges: list[Number] = []
    """Edges of the histograms' bins, magnitudes in steps; the last bin is open."""
    tensors: list[DriftTensor] = []
    """In graph order."""
    slices: list[DriftSlice] = []
    worst_requests: list[DriftRequest] = []
    timeline: list[DriftDay] = []
    began: str | None = None
    """First date from which drift lasts to the end."""
    costs: list[DriftCost] = []
    costs_agree: bool | None = None
    """Whether the layers that lose the most are among those whose inputs drift; null when not measured."""
    costs_sentence: str = ""
    advice: list[DriftAdvice] = []
