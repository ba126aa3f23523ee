"""FP8 in ever fewer layers: models that tell which of them an engine gets wrong.

    python -m benchmarks.fp8_variants MODEL --calibration TABLE --out OUT

writes `OUT/BASE-NAME.onnx` for the bases FP32 and FP16; `benchmarks.gpu_typed_models` runs them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from diag.model.save import save_model
from diag.pipeline.prepare import plan_on, read_scales
from diag.plan.schema import Pin, plan_for_format

PROJECTIONS = ("qkv_proj", "attn_out_proj", "ffn_up", "ffn_down")
KEPT: dict[str, tuple[str, ...]] = {
    "all": (),
    "no-attention": ("qk_matmul", "pv_matmul"),
    "only-attention": PROJECTIONS,
    "no-qk": ("qk_matmul",),
    "no-pv": ("pv_matmul",),
}
"""Roles that each variant keeps in the base format."""


def main() -> None:
    """Write every variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    planned = plan_on(given.model, plan_for_format("fp8"))
    for base in ("fp32", "fp16"):
        for name, kept in KEPT.items():
            pins = tuple(Pin(role=role, format=base) for role in kept)
            plan = plan_for_format("fp8").model_copy(update={"base": base, "pins": pins})
            fitted = planned.with_plan(plan)
            typed = fitted.apply(read_scales(fitted, given.calibration))
            save_model(typed.proto, typed.weights, given.out / f"{base}-{name}.onnx")


if __name__ == "__main__":
    main()
