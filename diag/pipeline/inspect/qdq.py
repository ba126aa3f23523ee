"""What a Q/DQ model of another tool holds: its quantizers judged, and as plan, table and float model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diag.errors import ModelError
from diag.lint.hazard import QDQ
from diag.lint.qdq import check_qdq
from diag.model import shapes
from diag.model.graph import Model
from diag.model.load import load_model
from diag.pipeline.check.hazards import findings_from
from diag.pipeline.inspect.foreign import Foreign, take_apart
from diag.pipeline.inspect.report import model_info_of, run_info
from diag.plan.schema import plan_sha256, plan_to_yaml
from diag.report.schema import Finding, LayerInfo, PinInfo, PlanInfo, Report
from diag.roles import find_roles
from diag.typed.brought import Quantizer, find_quantizers
from diag.typed.types import complete

QDQ_FILES = PLAN_FILE, TABLE_FILE, MODEL_FILE = ("plan.yaml", "table.json", "fp32.onnx")


@dataclass(frozen=True)
class QdqInspection:
    """A report on a Q/DQ model, the model taken apart, and what to say of it in the terminal."""

    report: Report
    foreign: Foreign
    rows: tuple[tuple[str, str], ...]

    def write(self, out: Path) -> dict[Path, str]:
        """Write the float model; the texts of plan and table, to be written with the report."""
        table = self.foreign.write(out / MODEL_FILE)
        text = json.dumps(table.model_dump(by_alias=True), allow_nan=False, indent=1)
        return {out / PLAN_FILE: plan_to_yaml(self.foreign.plan), out / TABLE_FILE: text}


def inspect_qdq(file: str, command: str) -> QdqInspection:
    """Read a Q/DQ model. Raises ModelError when it holds no quantizers, or some that cannot be taken out."""
    model = load_model(file)
    quantizers = find_quantizers(model)
    if not quantizers:
        raise ModelError(
            f"{file!r} is an ONNX model without DequantizeLinear: there are no quantizers to inspect",
            f"For hazards of a number format: trtdiag check {file} --format fp16 --out DIR.",
        )
    types = complete(shapes.infer(model), model)
    foreign = take_apart(model, quantizers)
    run = run_info(None, file, command)
    run.engine = f"Q/DQ model of {model.proto.producer_name or 'an unknown tool'}, read and not run"
    report = Report(
        schema="trtdiag.report/1",
        model=model_info_of(model),
        plan=_plan_info(foreign),
        run=run,
        verdict=_verdict(foreign, quantizers),
        layers=_layers(foreign.below, foreign.formats),
        findings=[*findings_from(check_qdq(model, quantizers, types)), *_unsaid(foreign)],
    )
    return QdqInspection(report, foreign, tuple(_rows(foreign, quantizers)))


def _verdict(foreign: Foreign, quantizers: Sequence[Quantizer]) -> str:
    formats = Counter(foreign.formats.values())
    said = ", ".join(f"{number} in {fmt}" for fmt, number in sorted(formats.items())) or "none"
    exact = "say it all" if not foreign.unsaid else "do not say all of it"
    return (
        f"Q/DQ model with {len(quantizers)} quantizers; layers quantized: {said}; a plan and a table {exact}."
    )


def _rows(foreign: Foreign, quantizers: Sequence[Quantizer]) -> list[tuple[str, str]]:
    kinds = Counter(q.kind for q in quantizers)
    codes = Counter(q.code_name for q in quantizers)
    rows = [
        (
            "quantizers",
            f"{kinds['activation']} of activations, {kinds['weight']} of float weights, "
            f"{kinds['stored']} of stored codes",
        ),
        ("codes", ", ".join(f"{number} {name}" for name, number in sorted(codes.items()))),
        ("plan", f"default {foreign.plan.default}, {len(foreign.plan.pins)} pins"),
        ("table", f"{len(foreign.ranges)} activations, {len(foreign.weight_ratios)} weights not at min-max"),
    ]
    if foreign.stripped.relus:
        rows.append(("Relus put back", str(len(foreign.stripped.relus))))
    return rows


def _unsaid(foreign: Foreign) -> list[Finding]:
    return [
        Finding(id=f"unsaid-{number}", kind=QDQ, severity="note", title=f"not in plan and table: {sentence}")
        for number, sentence in enumerate(foreign.unsaid, 1)
    ]


def _plan_info(foreign: Foreign) -> PlanInfo:
    plan = foreign.plan
    pins = [PinInfo(target=str(pin), format=pin.format, layers=1) for pin in plan.pins]
    return PlanInfo(default=plan.default, base=plan.base, pins=pins, sha256=plan_sha256(plan))


def _layers(model: Model, formats: Mapping[str, str]) -> list[LayerInfo]:
    """The layers that are quantized, with the roles that they have in the float model."""
    roles = find_roles(model)
    return [
        LayerInfo(
            id=name,
            name=name,
            op_type=model.layer_by_id[name].op_type,
            role=roles[name].name,
            block=roles[name].block,
            format=fmt,
            outputs=list(model.layer_by_id[name].outputs),
            status="not_run",
        )
        for name, fmt in formats.items()
    ]
