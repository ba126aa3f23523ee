"""Error sums by definition, in float64 and without blocks."""

from __future__ import annotations

import numpy as np

MASK = 1e30


def sums_by_hand(reference: np.ndarray, candidate: np.ndarray, axis: int | None) -> dict[str, object]:
    """What `diag.numerics.error.measure` must find, slowly."""
    ref, cand = reference.astype(np.float64), candidate.astype(np.float64)
    masked = np.isfinite(ref) & (np.abs(ref) >= MASK)
    agreed = masked & np.isinf(cand) & (np.sign(ref) == np.sign(cand))
    broken = np.isfinite(ref) & ~np.isfinite(cand) & ~agreed
    usable = np.isfinite(ref) & np.isfinite(cand) & ~masked
    clean = np.where(usable, ref, 0)
    error = np.where(usable, cand, 0) - clean
    others = tuple(a for a in range(ref.ndim) if a != axis) if axis is not None else None
    return {
        "reference_square": np.atleast_1d((clean**2).sum(axis=others)),
        "error_square": np.atleast_1d((error**2).sum(axis=others)),
        "cross": (clean * error).sum(),
        "error_sum": error.sum(),
        "error_l1": np.abs(error).sum(),
        "elements": ref.size,
        "nonfinite": int(broken.sum()),
        "nonfinite_reference": int((~np.isfinite(ref)).sum()),
        "masked": int((masked & ~broken).sum()),
        "max_abs": np.abs(error).max(),
        "reference_absmax": np.abs(np.where(np.isfinite(ref) & ~masked, ref, 0)).max(),
        "errors": error,
    }


def collapsed_by_hand(reference: np.ndarray, candidate: np.ndarray) -> int:
    """Rows of the last axis (two elements or more), one after the other."""
    if reference.ndim == 0 or reference.shape[-1] < 2:
        return 0
    count = 0
    for index in np.ndindex(reference.shape[:-1]):
        count += all(c == 0 for c in candidate[index]) and any(r != 0 for r in reference[index])
    return count
