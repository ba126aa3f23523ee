"""Everything that is known before the first batch runs: model, data, roles, plan, formats, scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from diag.calibration.awq import search_awq
from diag.calibration.cache_table import read_calibration
from diag.calibration.minmax import measure_ranges
from diag.calibration.table import CalibrationTable, TensorRange
from diag.errors import PlanError, TableError, UsageError
from diag.feeds import Feeds
from diag.model import shapes
from diag.model.graph import Model, TensorInfo
from diag.model.load import load_model
from diag.numerics.formats import FORMATS
from diag.plan.resolve import Resolved, Resolver
from diag.plan.schema import Plan, plan_for_format, read_plan
from diag.progress import Progress
from diag.roles import Role, find_roles, norm_parts
from diag.typed.apply import TypedModel, apply_formats, operands_of
from diag.typed.blocks import BlockLayer, BlockTuning, block_layers
from diag.typed.operands import Operand
from diag.typed.types import complete

_WITHOUT_TABLE = frozenset({"int4", "mxfp8"})
"""Formats whose scales come from the weights, or are found while the engine runs."""


@dataclass(frozen=True)
class Planned:
    """A model with its plan resolved."""

    model: Model
    types: Mapping[str, TensorInfo]
    roles: Mapping[str, Role]
    plan: Plan
    resolved: Resolved
    resolver: Resolver

    @property
    def method(self) -> str | None:
        """Calibration method that the plan names; None leaves the choice to the table."""
        method = self.plan.quantizer.method
        return None if method == "awq" else method

    @property
    def awq(self) -> bool:
        """Whether the plan asks for a search of INT4's scales and steps."""
        return self.plan.quantizer.method == "awq" and "int4" in self.resolved.formats.values()

    @property
    def blocks(self) -> tuple[BlockLayer, ...]:
        """Layers with weights in blocks. Raises PlanError for blocks that do not fit."""
        size = self.plan.quantizer.block_size
        return block_layers(self.model, self.resolved.formats, self.types, size).layers

    def with_plan(self, plan: Plan) -> Planned:
        """The same model under another plan. Raises PlanError."""
        return dataclasses.replace(self, plan=plan, resolved=self.resolver.resolve(plan))

    @property
    def activations(self) -> tuple[str, ...]:
        """Tensors that need a scale, in graph order."""
        return tuple(dict.fromkeys(o.tensor for o in self.operands if o.weight is None))

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Operands that get a quantizer, in graph order."""
        return operands_of(self.model, self.resolved.formats, self.types, self.fused)

    @property
    def fused(self) -> bool:
        """Whether quantizers are placed where engines fuse them."""
        return self.plan.placement == "fused"

    def apply(self, table: CalibrationTable | None) -> TypedModel:
        """The plan applied, with the scales of `table`."""
        quantized = {f for f in self.resolved.formats.values() if FORMATS[f].quantized} - _WITHOUT_TABLE
        scales = {} if table is None else {fmt: table.scales(fmt, self.method) for fmt in quantized}
        return apply_formats(
            self.model,
            self.resolved.formats,
            base=self.plan.base,
            scales=scales,
            out_of_range=self.plan.constants.out_of_range,
            block_size=self.plan.quantizer.block_size,
            fused=self.fused,
            tuning=self._tuning(table),
            **self._compensation(table),
        )

    def _tuning(self, table: CalibrationTable | None) -> BlockTuning | None:
        """What the search for INT4 found, if the plan asks for it. Raises TableError."""
        if table is None or table.awq is None or not self.awq:
            return None
        blocks = self.blocks
        for layer in blocks:
            if table.awq.blocks.get(layer.layer, layer.size) != layer.size:
                raise TableError(
                    f"the table's steps of layer {layer.layer!r} are for blocks of "
                    f"{table.awq.blocks[layer.layer]}, and the plan has {layer.size}",
                    "Calibrate again with this plan.",
                )
        outputs = {x.layer: x.weight.shape[1 - x.axis] for x in blocks if x.weight.ndim == 2}
        return BlockTuning(table.awq.vectors(), table.awq.step_ratios(outputs))

    def _compensation(self, table: CalibrationTable | None) -> dict[str, dict[str, NDArray[Any]]]:
        """What belongs to the ranges beside them: found by compensation, or imported with them."""
        if table is None or self.method not in (None, table.method):
            return {}
        found = table.compensation
        if found is None:
            return {"weight_ratios": table.imported_ratios()}
        formats = self.resolved.formats
        others = {f for f in formats.values() if FORMATS[f].quantized} - {found.format}
        return {
            "weight_ratios": {} if others else found.weight_factors(),
            "corrections": found.bias_corrections(formats),
        }


def before_last_third(batches: int) -> int:
    """How many of the batches are left to choose on where the last third is held out."""
    return batches - max(1, batches // 3)


def choose_plan(plan_path: str | None, fmt: str | None) -> Plan:
    """The plan that the user gave, as a file or as a format."""
    if (plan_path is None) == (fmt is None):
        raise UsageError("give either --plan PLAN or --format FORMAT", "For example: --format int8.")
    return read_plan(plan_path) if plan_path is not None else plan_for_format(str(fmt))


def plan_on(model_path: str, plan: Plan) -> Planned:
    """Load the model and resolve the plan on its layers. Raises ModelError and PlanError."""
    _refuse_unavailable(plan)
    model = load_model(model_path)
    types = complete(shapes.infer(model), model)
    roles = find_roles(model)
    names = {layer: role.name for layer, role in roles.items()}
    blocks = {layer: role.block for layer, role in roles.items()}
    resolver = Resolver.of(model, names, blocks, norm_parts(model), types)
    return Planned(model, types, roles, plan, resolver.resolve(plan), resolver)


def _refuse_unavailable(plan: Plan) -> None:
    if plan.quantizer.weights != "per_channel":
        raise PlanError(
            "this release quantizes weights per channel only", "Take the quantizer out of the plan."
        )


def calibrate(
    planned: Planned, feeds: Feeds, table_path: str | None, progress: Progress
) -> tuple[CalibrationTable | None, str]:
    """The table of scales, and in words where it came from. Without one: min-max on the data."""
    table, origin = _ranges(planned, feeds, table_path, progress)
    if not planned.awq or (table is not None and table.awq is not None):
        return table, origin
    found = search_awq(planned.model, planned.blocks, feeds, len(feeds), progress)
    table = table or new_table(planned.model, feeds, {})
    origin = f"{origin}; INT4 searched" if origin else f"INT4 searched on the compared data ({feeds.label})"
    return table.model_copy(update={"awq": found}), origin


def _ranges(
    planned: Planned, feeds: Feeds, table_path: str | None, progress: Progress
) -> tuple[CalibrationTable | None, str]:
    if table_path is not None and planned.awq:
        table = read_scales(planned, table_path)
        assert table is not None
        return table, f"{table_path} ({table.data})"
    if not planned.activations:
        return None, ""
    if table_path is not None:
        table = read_scales(planned, table_path)
        assert table is not None
        return table, f"{table_path} ({table.method}, {table.data})"
    if planned.method not in (None, "minmax"):
        raise TableError(
            f"the plan takes its scales by {planned.method}, and without a table only min-max is measured",
            f"Run trtdiag calibrate --method {planned.method}, and give --calibration TABLE.",
        )
    progress.start("calibrating (min-max) on the data given", len(feeds))
    ranges = measure_ranges(planned.model, planned.activations, feeds, progress)
    _refuse_unreached(ranges)
    return new_table(planned.model, feeds, ranges), f"min-max on the compared data themselves ({feeds.label})"


def read_scales(planned: Planned, table_path: str | None) -> CalibrationTable | None:
    """The table or cache, if the plan needs one; checked to hold every tensor that will be quantized."""
    needed = planned.activations
    if not needed and not planned.awq:
        return None
    if table_path is None:
        what = "quantizes activations and needs their scales" if needed else "wants INT4 scales searched"
        raise TableError(f"the plan {what}", "Give --calibration TABLE.")
    table = read_calibration(table_path, planned.model, needed)
    missing = [name for name in needed if name not in table.tensors]
    if missing:
        raise TableError(
            f"calibration {table_path!r} lacks {len(missing)} of {len(needed)} tensors, or gives them no "
            f"finite scale, first {missing[0]!r}",
            "Calibrate again with the plan: trtdiag calibrate MODEL --plan PLAN --data DATA --out TABLE.",
        )
    if planned.awq and table.awq is None:
        raise TableError(
            f"table {table_path!r} holds no search of INT4's scales, which the plan asks for (method: awq)",
            "Make one with trtdiag calibrate --plan PLAN.",
        )
    _refuse_unreached({name: table.tensors[name] for name in needed})
    table.scales("int8", planned.method)  # a method that the table lacks is refused before the work begins
    return table


def _refuse_unreached(ranges: Mapping[str, TensorRange]) -> None:
    """A tensor that never held an element has no range, and any scale would be a guess."""
    unreached = [name for name, found in ranges.items() if not found.elements and not found.absmax]
    if unreached:
        raise TableError(
            f"the calibration data put no element into {len(unreached)} of {len(ranges)} tensors that the "
            f"plan quantizes, first {unreached[0]!r}",
            "Calibrate with data that reach them, or pin the layers that read them.",
        )


def new_table(model: Model, feeds: Feeds, ranges: Mapping[str, TensorRange]) -> CalibrationTable:
    """A table of measured ranges, stamped with the model and the data."""
    return CalibrationTable(
        schema="trtdiag.calibration/1",
        model_sha256=model.sha256,
        data=feeds.label,
        data_sha256=feeds.sha256,
        method="minmax",
        batches=len(feeds),
        tensors=dict(ranges),
    )
