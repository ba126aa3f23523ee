"""The calibration table: what was measured of each tensor, and the range that a quantizer takes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diag.errors import TableError
from diag.files import write_text
from diag.numerics.awq import CLIP_RATIOS
from diag.numerics.calibrate import PERCENTILES
from diag.numerics.formats import FORMATS, symmetric_scale

SCHEMA = "trtdiag.calibration/1"

BEST = "best"
IMPORTED = "imported"
"""Method of ranges that others chose: those of a TensorRT cache, or of a foreign model's quantizers."""
PERCENTILE = "percentile_99.99"
"""What plain `percentile` means."""

SEARCHED = "searched"
"""Ranges that compensation chose by the error of the layers' outputs."""

CHOICES = ("minmax", "entropy", "percentile", *PERCENTILES, "mse", BEST)
"""Names by which a method can be asked for."""

_MAKES = {BEST: "--method best", SEARCHED: "--compensate"}
"""Options that make the ranges which not every table holds."""


Flag = Literal["empty", "zero", "constant", "coarse", "zero_channels"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class MethodRange(_Part):
    """The range of one method, and what it costs on the calibration data."""

    absmax: float = Field(ge=0)
    """Values beyond +-absmax are clipped."""
    clipped_share: float | None = Field(ge=0)
    clipped_energy_ratio: float | None = Field(ge=0)
    """Energy that clipping cuts off over the energy of the tensor: 0.01 limits the SQNR to 20 dB. None, like
    the share, when the range was imported and no data were there to judge it."""
    sqnr_db: float | None = None
    """Of the tensor itself in INT8, estimated from the histogram; None for a tensor of zeros."""
    halves_differ: float | None = None
    """By how much the ranges of the two halves of the data differ, relative to the larger; None when a half
    holds nothing."""
    output_sqnr_db: float | None = None
    """Of the output of the layers that read the tensor, with nothing else quantized: noise over signal of
    each output vector (token, pixel), averaged over vectors, then over layers. None when it was not measured;
    300 stands for no error at all."""


class Evidence(_Part):
    """Exact sums that tables merge by; see `diag.calibration.records` for how they are written."""

    exponents: tuple[int | None, int | None]
    """log2 of the histogram's bin width, for each half of the data; None where there are only zeros."""
    counts: tuple[str, str]
    """Histogram of magnitudes of each half: zeros, then 2,048 bins, trailing zeros left out."""
    half_absmax: tuple[float, float]
    total: str
    """Sum of all elements, an exact binary fraction."""
    energy: str
    """Sum of all squares, likewise."""


class TensorRange(_Part):
    """Range of one tensor. Symmetric: values beyond +-`absmax` of the chosen method are clipped."""

    absmax: float = Field(ge=0)
    """Largest magnitude: the min-max range. Where nothing was measured, the imported range."""
    minimum: float
    maximum: float
    elements: int = Field(ge=0)
    nonfinite: int = Field(default=0, ge=0)
    """NaN and infinities, in batches that were left out."""
    flags: tuple[Flag, ...] = ()
    best: str | None = None
    """The method whose range costs the layers' outputs least."""
    searched: float | None = Field(default=None, ge=0)
    """The range that compensation chose."""
    methods: dict[str, MethodRange] = {}
    evidence: Evidence | None = None
    channel_absmax: str | None = None
    """Largest magnitude in each channel, where their number does not depend on the data."""

    def cost_of(self, method: str) -> MethodRange | None:
        """Range and cost of one of `CHOICES` or `searched`; None when it was not measured."""
        name = PERCENTILE if method == "percentile" else method
        return self.methods.get((self.best or "") if name == BEST else name)

    def range_of(self, method: str) -> float | None:
        """The range of one of `CHOICES`, `searched` or `imported`; None when there is none."""
        if method == SEARCHED:
            return self.searched
        if method == "minmax" and (self.evidence is not None or IMPORTED not in self.methods):
            return self.absmax
        cost = self.cost_of(method)
        return None if cost is None else cost.absmax


class Credit(_Part):
    """What one step of compensation brought to one group of layers, and whether it was kept."""

    step: str
    group: str
    """Role of the layers."""
    layers: dict[str, float]
    """SQNR in dB that each layer's own output gained on held-out data."""
    before: float
    """Damage of the model's outputs on held-out data before (noise over signal, or what a target counts)."""
    after: float
    kept: bool
    reason: str = ""
    """Why it was not kept."""


class Compensation(_Part):
    """What was changed beside the ranges so that a quantized model loses less."""

    format: str
    """The quantized format that the corrections were measured in; they hold for its layers only."""
    original_sha256: str
    """The model that was compensated; the table belongs to the new one."""
    fp32_max_abs: float
    """Largest difference between the outputs of the two models in FP32, on held-out data."""
    fp32_rel_l2: float
    """The same as relative L2, of the output where it is largest."""
    credits: tuple[Credit, ...] = ()
    weight_ratios: dict[str, str] = {}
    """Weight to the factors by which the steps of its channels are smaller than min-max."""
    corrections: dict[str, str] = {}
    """Layer to what is added to each channel of its output when it is quantized."""

    def weight_factors(self) -> dict[str, NDArray[np.float32]]:
        """`weight_ratios` as arrays of shape (channels,)."""
        return {name: vector_of(text) for name, text in self.weight_ratios.items()}

    def bias_corrections(self, formats: Mapping[str, str]) -> dict[str, NDArray[np.float32]]:
        """`corrections` as arrays of shape (channels,), of the layers that are in `format`."""
        wanted = {name: text for name, text in self.corrections.items() if formats.get(name) == self.format}
        return {name: vector_of(text) for name, text in wanted.items()}


class AwqLayer(_Part):
    """What the search for INT4 found for one layer. SQNR of its output on rows that were held out."""

    tensor: str
    """Its input."""
    sqnr_db_before: float
    """With round-to-nearest."""
    sqnr_db_after: float
    ratios: str = ""
    """A letter for each block and output channel: how much smaller its step is, from `a` (not) on. Empty: the
    search did not help, and the layer stays as it was."""


class Awq(_Part):
    """Scales and steps for INT4 weights, searched on the outputs of the layers (`diag.numerics.awq`)."""

    factors: dict[str, str] = {}
    """Input tensor to the numbers that its channels are divided by; the weights are multiplied."""
    alphas: dict[str, float] = {}
    """Strength behind each of the factors."""
    layers: dict[str, AwqLayer]
    blocks: dict[str, int]
    """Block size of each layer."""
    rows: int
    """Rows of each input that were looked at, half of them held out."""

    def vectors(self) -> dict[str, NDArray[np.float32]]:
        """`factors` as arrays of shape (channels,)."""
        return {name: vector_of(text) for name, text in self.factors.items()}

    def step_ratios(self, outputs: Mapping[str, int]) -> dict[str, NDArray[np.float32]]:
        """Ratios of the layers that kept theirs, shape (blocks, outputs), given their output channels.

        Raises TableError for letters that make no such array.
        """
        table = np.array(CLIP_RATIOS, np.float32)
        found = {}
        for name, layer in self.layers.items():
            if layer.ratios and name in outputs:
                codes = np.frombuffer(layer.ratios.encode(), np.uint8).astype(int) - ord("a")
                if len(codes) % outputs[name] or codes.min() < 0 or codes.max() >= len(table):
                    raise TableError(f"the table's steps of layer {name!r} are damaged", "Calibrate again.")
                found[name] = table[codes].reshape(-1, outputs[name])
        return found


def vector_of(text: str) -> NDArray[np.float32]:
    """Numbers with spaces between them, one for each channel."""
    return np.array([float(word) for word in text.split()], np.float32)


class CacheRecord(_Part):
    """The TensorRT calibration cache that a table was imported from, whole: it can be written again."""

    version: str
    """The TensorRT that wrote it, `10.6.0` for example."""
    algorithm: str
    scales: dict[str, str]
    """Every entry in the file's order, those that fit no tensor among them: eight hexadecimal digits each."""


class CalibrationTable(_Part):
    """Ranges by tensor name, and what they were measured on."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, allow_inf_nan=False)

    schema_: str = Field(SCHEMA, alias="schema", pattern="^trtdiag\\.calibration/1$")
    model_sha256: str
    data: str
    """What was fed, in words."""
    data_sha256: str
    method: str = Field(
        pattern="^(" + "|".join(name.replace(".", r"\.") for name in (*CHOICES, SEARCHED, IMPORTED)) + ")$"
    )
    """The method whose ranges are used unless another is asked for."""
    batches: int
    samples: int = 0
    half_samples: tuple[int, int] = (0, 0)
    """Samples in each of the two halves that stability is judged by."""
    skipped_batches: int = 0
    """Batches that were left out because they hold NaN or infinity."""
    random_seeds: tuple[int, ...] = ()
    """Seeds of random numbers among the data."""
    sampled_batches: tuple[str, ...] = ()
    """Keys of the batches on which the methods' effect on the outputs is measured."""
    cache: CacheRecord | None = None
    imported_weights: dict[str, str] = {}
    """Weight to its channels' steps over min-max, as a foreign model's quantizers have them."""
    tensors: dict[str, TensorRange]
    compensation: Compensation | None = None
    """None for a table of a model as it came."""
    awq: Awq | None = None
    """None unless the plan asks for `method: awq`."""

    def scales(self, fmt: str, method: str | None = None) -> dict[str, float]:
        """Step of each tensor in a quantized format, `range / largest code` (INT8: 127, FP8 E4M3: 448).

        `method`: one of `CHOICES` or `searched`, None for the table's own. Raises TableError when the table
        lacks it.
        """
        chosen = method or self.method
        return {
            name: float(symmetric_scale(np.array(self._range(name, chosen)), FORMATS[fmt]))
            for name in self.tensors
        }

    def imported_ratios(self) -> dict[str, NDArray[np.float64]]:
        """`imported_weights` as arrays of shape (channels,)."""
        words = {name: text.split() for name, text in self.imported_weights.items()}
        return {name: np.array([float(word) for word in given]) for name, given in words.items()}

    def _range(self, name: str, method: str) -> float:
        found = self.tensors[name].range_of(method)
        if found is None:
            hint = f"Calibrate with {_MAKES.get(method, '--method all')}."
            if self.method == IMPORTED:
                hint = "Its ranges were imported: leave the method out of the plan, or calibrate on data."
            raise TableError(f"the calibration table holds no {method} range of tensor {name!r}", hint)
        return found


def read_table(path: str | Path, model_sha256: str | None = None) -> CalibrationTable:
    """Read a table and check that it is this model's (unless `model_sha256` is None). Raises TableError."""
    name = f"calibration table {str(path)!r}"
    try:
        table = CalibrationTable.model_validate(_parse(Path(path), name))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its top level"
        raise TableError(
            f"{name} is not a {SCHEMA} table: {first['msg']} at {place}", "Make one with trtdiag calibrate."
        ) from error
    if model_sha256 is not None and table.model_sha256 != model_sha256:
        raise TableError(
            f"{name} was made for another model ({table.model_sha256[:12]}..., "
            f"this one is {model_sha256[:12]}...)",
            "Make one for this model with trtdiag calibrate.",
        )
    return table


def _parse(path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"{name} cannot be read: {error.strerror or error}", "Check the path.") from error
    except json.JSONDecodeError as error:
        raise TableError(
            f"{name} is not JSON (line {error.lineno}: {error.msg})", "Was it cut off? Calibrate again."
        ) from error
    except (ValueError, RecursionError) as error:
        raise TableError(f"{name} is not a JSON file", "Make one with trtdiag calibrate.") from error


def write_table(table: CalibrationTable, path: Path) -> None:
    """Write a table, whole or not at all. Equal tables give equal bytes."""
    write_text(json.dumps(table.model_dump(by_alias=True), allow_nan=False, indent=1), path)
