"""The one contract: `report.json`. Terminal, HTML, JUnit, SARIF and the gate are functions of it.

Field meanings are fixed here; the JSON Schema in `docs/report.schema.json` is generated from these classes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from diag.report.drift import Drift
from diag.report.parts import STRICT, Number
from diag.report.parts import Metrics as Metrics

SCHEMA = "trtdiag.report/1"


class Part(BaseModel):
    """Base of all parts."""

    model_config = STRICT


class ModelInfo(Part):
    path: str
    sha256: str
    opset: int
    node_count: int


class PinInfo(Part):
    """One pin as it was given, and how many layers it moved."""

    target: str
    format: str
    reason: str = ""
    layers: int = 0


class GroupInfo(Part):
    """Layers that changed precision together, and why."""

    kind: str
    layers: list[str]


class PlanInfo(Part):
    default: str
    base: str = "fp32"
    pins: list[PinInfo] = []
    groups: list[GroupInfo] = []
    sha256: str


class ReferenceTrust(Part):
    """Whether the FP32 reference can be trusted: its own movement under two harmless changes."""

    trusted: bool
    optimisation_rel_l2: Number
    """Largest relative L2 of an output between ONNX Runtime's lowest and highest optimisation level."""
    jitter_rel_l2: Number
    """Largest relative L2 of an output when every tensor moves by one FP32 rounding."""
    tolerance_rel_l2: Number
    nonfinite_tensors: list[str] = []
    """Tensors in which the reference itself is not finite."""


class RunInfo(Part):
    command: str
    engine: str
    versions: dict[str, str]
    flags: dict[str, str] = {}
    data: str = ""
    """What was fed, in words (a folder, or random data and its seed)."""
    random_data: bool = False
    calibration: str = ""
    """Where the scales came from, in words."""
    batches: int
    samples: int
    seconds: Number
    peak_memory_mb: Number
    seed: int | None = None
    started: str
    reference: ReferenceTrust | None = None


class WorstCase(Part):
    """Where the largest error is: batch (by its order in the data) and element."""

    batch: int
    index: list[int] = []
    channel: int | None = None
    """Channel with the smallest SQNR."""


class OutputInfo(Part):
    name: str
    layer: str = ""
    metrics: Metrics
    """Emulation against reference: the error of the number format."""
    engine: Metrics = {}
    """Engine against reference; empty where no engine ran."""
    engine_vs_emulation: Metrics = {}
    """Engine against emulation: the error of the engine itself."""
    worst: WorstCase | None = None


Status = Literal["compared", "not_observable", "not_run"]


class LayerInfo(Part):
    id: str
    name: str
    op_type: str
    role: str = "other"
    block: int | None = None
    format: str
    built: str = ""
    """Type in which the engine's kernel works, `folded` where no kernel names the layer; empty: not known."""
    outputs: list[str]
    source: str = ""
    """Module path and source line in the user's code, where the exporter left them."""
    accumulated: Metrics = {}
    """Error with everything before it lowered too: where it hurts."""
    local: Metrics = {}
    """Error with the reference's inputs: who did it. Empty where the layer computes as the reference does."""
    engine: Metrics = {}
    """Error of the built engine's tensor against the reference."""
    worst: WorstCase | None = None
    status: Status
    reason: str = ""


class Birth(Part):
    """A layer whose inputs were good and whose output is bad."""

    layer: str
    output: str
    metric: str
    before: Number
    """The metric at the layer's worst input."""
    after: Number
    batch: int
    index: list[int] = []
    victims: list[str] = []
    """Bad layers behind it, whose badness it explains, in graph order."""
    reaches_output: bool
    """False when the damage heals before any graph output."""


class Kernel(Part):
    name: str
    layers: list[str] = []
    inputs: list[str] = []
    outputs: list[str] = []
    input_types: list[str] = []
    output_types: list[str] = []
    tactic: str = ""
    accumulator: str = ""
    time_ms: Number | None = None


class Mend(Part):
    text: str = ""
    pins: list[PinInfo] = []
    command: str = ""


class Finding(Part):
    id: str
    kind: str
    severity: Literal["error", "warning", "note"]
    layers: list[str] = []
    """Node names, the first is where it is born; may hold a graph input; empty when no node is to blame."""
    title: str
    evidence: dict[str, Number | str | bool] = {}
    responsible: bool | None = None
    share_removed: Number | None = None
    """Share of the final error that keeping only these layers in FP32 removes."""
    share_reproduced: Number | None = None
    """Share of the final error that lowering only these layers reproduces."""
    mend: Mend = Mend()


class Check(Part):
    name: str
    value: Number | None
    bound: Number
    passed: bool


class GateResult(Part):
    passed: bool
    checks: list[Check] = []


class SearchPoint(Part):
    """One plan in the picture of accuracy against price."""

    label: str
    kind: Literal["start", "candidate", "chosen", "rival"]
    pins: int
    value: Number
    """The target's first metric, on the batches held out."""
    price: Number
    """Time over that of the plan without pins."""
    met: bool


class SearchInfo(Part):
    """What `pin` weighed before it chose."""

    target: str
    metric: str
    bound: Number
    higher_is_better: bool
    measured_prices: bool
    prices: str
    """Where prices come from, in words."""
    points: list[SearchPoint] = []
    proof: str = ""
    notes: list[str] = []


class Report(Part):
    schema_: Literal["trtdiag.report/1"] = Field("trtdiag.report/1", alias="schema")
    model: ModelInfo
    plan: PlanInfo | None = None
    run: RunInfo
    verdict: str = ""
    """One sentence: what was found."""
    outputs: list[OutputInfo] = []
    layers: list[LayerInfo] = []
    births: list[Birth] = []
    kernels: list[Kernel] = []
    findings: list[Finding] = []
    search: SearchInfo | None = None
    """What was weighed; only where `trtdiag pin` wrote the report."""
    drift: Drift | None = None
    """Production against calibration; only where `trtdiag drift` wrote the report."""
    gate: GateResult | None = None

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
