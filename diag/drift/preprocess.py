"""Preprocessing that betrays itself at a model's input: factors of 255, ImageNet's constants, BGR for RGB."""

from __future__ import annotations

import numpy as np

from diag.drift.rules import DriftRules, Ratio
from diag.drift.side import Side
from diag.drift.spread import Double

IMAGENET_MEAN = np.array([0.485, 0.456, 0.406])
IMAGENET_DEVIATION = np.array([0.229, 0.224, 0.225])


def wrong_scale(calibration: Side, production: Side, rules: DriftRules) -> str | None:
    """What went wrong with an input's values, in words; None when no known factor fits."""
    for known in rules.preprocessing:
        ratio = _ratio(known, calibration, production)
        if ratio is not None and abs(ratio / known.ratio - 1) <= rules.preprocessing_within:
            return known.text
    return None


def _ratio(known: Ratio, calibration: Side, production: Side) -> float | None:
    if known.of == "width":
        before, now = (side.maximum - side.minimum for side in (calibration, production))
        return now / before if before > 0 else None
    if (calibration.minimum < 0) == (production.minimum < 0) or not calibration.absmax:
        return None
    return production.absmax / calibration.absmax


def swapped_channels(calibration: Double, production: Double, rules: DriftRules) -> bool:
    """Whether production's three channels look reversed, from the channels' means, shape (3,).

    Channels that were normalized with ImageNet's constants are swapped before that: both are tried. Other
    pictures have other means too, so this is a hint: a change of light from warm to cold looks the same.
    """
    if calibration.shape != (3,) or production.shape != (3,):
        return False
    distance = float(np.linalg.norm(production - calibration))
    pixels = production * IMAGENET_DEVIATION + IMAGENET_MEAN
    normalized = (pixels[::-1] - IMAGENET_MEAN) / IMAGENET_DEVIATION
    back = min(float(np.linalg.norm(other - calibration)) for other in (production[::-1], normalized))
    scale = float(np.linalg.norm(calibration)) + 1e-12
    return distance > 0.05 * scale and back * rules.swap_gain <= distance
