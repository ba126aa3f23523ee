"""What `trtdiag drift` is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DriftSettings:
    """Options of `trtdiag drift`, in its terms."""

    calibration: str
    """A calibration table, or statistics of the calibration data."""
    production: tuple[str, ...]
    """Statistics of production: files, or folders of them."""
    out: str
    model: str | None = None
    data: str | None = None
    """Production data to measure the INT8 error on; needs `model`."""
    reference_data: str | None = None
    """Calibration data to measure it on too."""
    limit: int | None = None
    command: str = "trtdiag drift"
