"""The search for INT4 scales and steps over a model: rows of every input, then layer by layer.

Memory: a fixed number of rows for each input, whatever the data; weights one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from diag.calibration.records import channels_text
from diag.calibration.samples import evenly
from diag.calibration.table import Awq, AwqLayer
from diag.engines.onnxruntime import processors
from diag.engines.watch import Watcher
from diag.errors import TableError
from diag.model.graph import Model
from diag.numerics.awq import (
    CLIP_RATIOS,
    LEAST_GAIN,
    Layer,
    best_alpha,
    best_ratios,
    channel_factors,
    noise_share,
)
from diag.progress import Progress
from diag.typed.blocks import BlockLayer

Float = NDArray[np.float32]
Batch = Mapping[str, NDArray[np.generic]]

ROWS = 512
"""Rows looked at of each input."""


@dataclass
class _Rows:
    """Rows of one tensor, and the sum of magnitudes of all."""

    sampled: list[Float] = field(default_factory=list)
    magnitude: NDArray[np.float64] | float = 0.0
    count: int = 0

    def add(self, values: Float, most: int) -> None:
        vectors = values.reshape(-1, values.shape[-1])
        self.magnitude = self.magnitude + np.abs(vectors).sum(axis=0, dtype=np.float64)
        self.count += len(vectors)
        self.sampled.append(evenly(values, most))

    def halves(self) -> tuple[Float, Float]:
        """Rows to search on and rows held out: of other batches, where there are two."""
        if len(self.sampled) > 1:
            return np.concatenate(self.sampled[::2]), np.concatenate(self.sampled[1::2])
        return self.sampled[0][::2], self.sampled[0][1::2]

    def mean_magnitude(self) -> Float:
        return np.asarray(self.magnitude / max(self.count, 1), np.float32)


def search_awq(
    model: Model, layers: Sequence[BlockLayer], batches: Iterable[Batch], count: int, progress: Progress
) -> Awq:
    """Search every INT4 layer among `layers` on `count` batches.

    Raises TableError when an input is not finite, or is a single row.
    """
    by_tensor: dict[str, list[BlockLayer]] = {}
    for layer in layers:
        if layer.format == "int4" and _searchable(model, layer):
            by_tensor.setdefault(layer.source, []).append(layer)
    rows = _read_rows(model, tuple(by_tensor), batches, count, progress)
    progress.start("searching INT4 scales and steps", len(by_tensor))
    # Products of blocks are small: whole searches side by side, and no threads inside a product.
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(processors()) as pool:
        found = []
        for one in pool.map(lambda x: _search_tensor(x, by_tensor[x], rows.pop(x)), by_tensor):
            found.append(one)
            progress.advance()
    return Awq(
        factors={one.tensor: one.factors for one in found if one.factors},
        alphas={one.tensor: one.alpha for one in found if one.factors},
        layers={name: layer for one in found for name, layer in one.layers.items()},
        blocks={x.layer: x.size for x in layers if x.format == "int4"},
        rows=ROWS,
    )


def _searchable(model: Model, layer: BlockLayer) -> bool:
    """The input's last axis must be the reduction, and the weights a matrix."""
    return layer.weight.ndim == 2 and not model.layer_by_id[layer.layer].attributes.get("transA", 0)


def _read_rows(
    model: Model, tensors: tuple[str, ...], batches: Iterable[Batch], count: int, progress: Progress
) -> dict[str, _Rows]:
    rows = {name: _Rows() for name in tensors}
    watcher = Watcher(model, tensors)
    progress.start("reading the inputs of INT4 layers", count)
    for batch in batches if tensors else ():
        for name, values in watcher.run(batch).items():
            if not np.isfinite(values).all():
                raise TableError(
                    f"tensor {name!r} is not finite on these data", "Check model and data in FP32 first."
                )
            rows[name].add(np.asarray(values, np.float32), -(-ROWS // count))
        progress.advance()
    for name, found in rows.items():
        if sum(map(len, found.sampled)) < 2:
            raise TableError(f"the data hold a single row of {name!r}", "Give more data to search on.")
    return rows


@dataclass(frozen=True)
class _Found:
    """What is kept of the search over the layers that read one tensor."""

    tensor: str
    alpha: float
    factors: str
    layers: dict[str, AwqLayer]


def _search_tensor(tensor: str, readers: Sequence[BlockLayer], rows: _Rows) -> _Found:
    """Search the layers that read one tensor, which share its scale."""
    layers = [_turned(reader) for reader in readers]
    search, held = rows.halves()
    factors = plain = np.ones(search.shape[1], np.float32)
    before = [noise_share(layer, held, plain) for layer in layers]
    alpha = best_alpha(layers, search, rows.mean_magnitude())
    if alpha:
        factors = channel_factors(rows.mean_magnitude(), alpha)
        ratios, after = _steps(layers, search, held, factors)
        alpha = alpha if sum(after) * LEAST_GAIN < sum(before) else 0.0
    if not alpha:
        ratios, after = _steps(layers, search, held, plain)
    text = channels_text(factors if alpha else None) or ""
    kept = [bool(alpha) or new < old for old, new in zip(before, after, strict=True)]
    found = {
        reader.layer: AwqLayer(
            tensor=tensor,
            sqnr_db_before=_db(before[i]),
            sqnr_db_after=_db(after[i] if kept[i] else before[i]),
            ratios=_letters(ratios[i]) if kept[i] else "",
        )
        for i, reader in enumerate(readers)
    }
    return _Found(tensor, alpha, text, found)


def _steps(
    layers: Sequence[Layer], search: Float, held: Float, factors: Float
) -> tuple[list[Float], list[float]]:
    """The best ratios of each layer, and its noise with them on the rows held out."""
    ratios = [best_ratios(layer, search, factors) for layer in layers]
    return ratios, [noise_share(x, held, factors, cut) for x, cut in zip(layers, ratios, strict=True)]


def _turned(reader: BlockLayer) -> Layer:
    weight = np.asarray(reader.weight, np.float32)
    return Layer(np.ascontiguousarray(weight if reader.axis == 0 else weight.T), reader.size)


def _letters(ratios: Float) -> str:
    """Each ratio as a letter, `a` for the first of CLIP_RATIOS; row by row."""
    known = np.array(CLIP_RATIOS, np.float32)
    codes = np.abs(ratios.reshape(-1, 1) - known).argmin(axis=1)
    return bytes((codes + ord("a")).astype(np.uint8)).decode()


def _db(noise: float) -> float:
    """Decibels of signal over noise; 300 stands for no noise at all."""
    return min(300.0, -10 * math.log10(noise)) if noise > 0 else 300.0
