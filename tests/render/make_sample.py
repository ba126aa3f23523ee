"""Makes `sample_report.json`: a ViT-like comparison with every feature that a page must show.

Run `python tests/render/make_sample.py` after a change; a test fails while the file is old. The numbers
are invented (a fixed formula), shaped like the measured INT8 damage of a small vision transformer.
"""

from __future__ import annotations

import math
from pathlib import Path

from diag.report.io import dumps
from diag.report.schema import (
    Birth,
    Check,
    Finding,
    GateResult,
    GroupInfo,
    Kernel,
    LayerInfo,
    Mend,
    ModelInfo,
    OutputInfo,
    PinInfo,
    PlanInfo,
    ReferenceTrust,
    Report,
    RunInfo,
    SearchInfo,
    SearchPoint,
    WorstCase,
)

HOSTILE = "</script><img src=x onerror=alert(1)>"
"""A layer name that tries to leave its place; models come from strangers."""

SAMPLE = Path(__file__).parent / "sample_report.json"

# One transformer block: name, operator, role, local SQNR in dB (None: computed as in the reference).
_BLOCK = (
    ("norm1/LayerNormalization", "LayerNormalization", "norm", None),
    ("attn/qkv/MatMul", "MatMul", "qkv_proj", 38.0),
    ("attn/qk/MatMul", "MatMul", "qk_matmul", 33.0),
    ("attn/scale/Mul", "Mul", "attn_scale", None),
    ("attn/Softmax", "Softmax", "attn_softmax", None),
    ("attn/pv/MatMul", "MatMul", "pv_matmul", 21.0),
    ("attn/proj/MatMul", "MatMul", "attn_out_proj", 37.0),
    ("attn/Add", "Add", "residual_add", None),
    ("norm2/LayerNormalization", "LayerNormalization", "norm", None),
    ("mlp/fc1/MatMul", "MatMul", "ffn_up", 36.0),
    ("mlp/act/Gelu", "Gelu", "ffn_act", None),
    ("mlp/fc2/MatMul", "MatMul", "ffn_down", 35.0),
    ("mlp/Add", "Add", "residual_add", None),
)
BLOCKS = 4
_HEALED = "/blocks.1/mlp/act/Gelu"
_BORN = "/blocks.1/attn/pv/MatMul"


def _wave(index: int, size: float) -> float:
    """A reproducible wobble between -size and size."""
    return round(size * math.sin(index * 2.399963), 2)


def _metrics(sqnr_db: float, index: int, elements: int = 1_210_368) -> dict[str, float]:
    return {
        "sqnr_db": round(sqnr_db, 3),
        "rel_l2": float(f"{10 ** (-sqnr_db / 20):.4g}"),
        "cosine": round(1 - 10 ** (-sqnr_db / 10) / 2, 7),
        "max_abs": float(f"{8 * 10 ** (-sqnr_db / 20):.4g}"),
        "mean_error": float(f"{_wave(index, 1e-3):.3g}"),
        "channel_min_sqnr_db": round(sqnr_db - 9 + _wave(index + 3, 4), 3),
        "nonfinite": 0.0,
        "zero_collapsed_rows": 0.0,
        "worst_batch_sqnr_db": round(sqnr_db - 2.2, 3),
        "elements": float(elements),
        "reference_rms": 0.92,
        "reference_absmax": 11.4,
    }


def _layer(
    index: int, total: int, name: str, op_type: str, role: str, block: int | None, local: float | None
) -> LayerInfo:
    depth = 44 - 25.2 * index / total - (4.5 if index > 20 else 0)
    accumulated = depth + _wave(index, 3.0)
    if local is not None:
        accumulated = min(accumulated, local + 1)
    quantized = local is not None
    return LayerInfo(
        id=f"L{index:04d}",
        name=name,
        op_type=op_type,
        role=role,
        block=block,
        format="int8" if quantized else "fp32",
        outputs=[f"{name}_output_0"],
        source=f"blocks.{block}, vit.py:{80 + index % 40}" if block is not None else "",
        accumulated=_metrics(accumulated, index),
        local={} if local is None else _metrics(local + _wave(index, 2.5), index),
        engine=_metrics(accumulated - 0.4, index) if index % 3 == 0 else {},
        worst=WorstCase(batch=index % 8, index=[0, index % 6, 17, 3], channel=(index * 37) % 384),
        status="compared",
    )


def layers(blocks: int = BLOCKS) -> list[LayerInfo]:
    """The layers in graph order: patch embedding, `blocks` blocks, norm, head and decoder."""
    rows: list[tuple[str, str, str, int | None, float | None]] = [
        ("/patch_embed/proj/Conv", "Conv", "conv", None, 40.0),
        ("/patch_embed/Reshape", "Reshape", "other", None, None),
        ("/pos_embed/Add", "Add", "embedding", None, None),
    ]
    for block in range(blocks):
        rows += [(f"/blocks.{block}/{name}", op, role, block, db) for name, op, role, db in _BLOCK]
    rows += [
        ("/norm/LayerNormalization", "LayerNormalization", "norm", None, None),
        ("/decoder/Conv", "Conv", "conv", None, 34.0),
        ("/decoder/Log", "Log", "elementwise", None, None),
        ("/decoder/Sigmoid", "Sigmoid", "elementwise", None, None),
        ("/head/Gemm", "Gemm", "head", None, 36.0),
    ]
    made = [_layer(index, len(rows), *row) for index, row in enumerate(rows)]
    return [_special(layer) for layer in made]


def _special(layer: LayerInfo) -> LayerInfo:
    """The cases a page easily gets wrong: fused away, not run, exact, non-finite, collapsed."""
    if layer.op_type == "Mul" and layer.block in (0, 2):
        return layer.model_copy(
            update={
                "accumulated": {},
                "local": {},
                "engine": {},
                "worst": None,
                "status": "not_observable",
                "reason": "fused into one attention kernel",
            }
        )
    if layer.op_type == "Reshape":
        exact = _metrics(60, 0) | {
            "sqnr_db": math.inf,
            "channel_min_sqnr_db": math.inf,
            "worst_batch_sqnr_db": math.inf,
        }
        return layer.model_copy(
            update={"accumulated": exact | {"rel_l2": 0.0, "cosine": 1.0, "max_abs": 0.0, "mean_error": 0.0}}
        )
    if layer.name == "/decoder/Log":
        broken = layer.accumulated | {
            "sqnr_db": -math.inf,
            "channel_min_sqnr_db": math.nan,
            "nonfinite": 12.0,
        }
        return layer.model_copy(update={"accumulated": broken})
    if layer.name == _HEALED:
        return layer.model_copy(
            update={"accumulated": layer.accumulated | {"sqnr_db": 9.4, "zero_collapsed_rows": 3.0}}
        )
    if layer.name == "/head/Gemm":
        return layer.model_copy(
            update={
                "accumulated": {},
                "local": {},
                "engine": {},
                "worst": None,
                "status": "not_run",
                "reason": "the run was stopped",
            }
        )
    return layer


def _births(names: list[str]) -> list[Birth]:
    behind = names.index(_BORN) + 1
    return [
        Birth(
            layer=_BORN,
            output=f"{_BORN}_output_0",
            metric="sqnr_db",
            before=33.1,
            after=19.8,
            batch=3,
            index=[0, 5, 17, 3],
            victims=names[behind : behind + 24],
            reaches_output=True,
        ),
        Birth(
            layer=_HEALED,
            output=f"{_HEALED}_output_0",
            metric="sqnr_db",
            before=31.0,
            after=9.4,
            batch=6,
            index=[0, 2, 11],
            victims=[],
            reaches_output=False,
        ),
    ]


def _findings() -> list[Finding]:
    return [
        Finding(
            id="F1",
            kind="sensitive-op",
            severity="error",
            layers=[_BORN, "/blocks.2/attn/pv/MatMul"],
            title="INT8 attention probabilities lose the small weights before the product with V",
            evidence={"sqnr_db": 19.8, "levels_used": 11, "crest": 46.2, "per_tensor": True},
            responsible=True,
            share_removed=0.91,
            share_reproduced=0.88,
            mend=Mend(
                text="Keep the product of probabilities and V in FP16 in all blocks.",
                pins=[PinInfo(target="role 'pv_matmul'", format="fp16", reason="measured: removes 91 %")],
                command="trtdiag compare vit.onnx --plan plan.yaml --data photos --out out",
            ),
        ),
        Finding(
            id="F2",
            kind="exp-log-domain",
            severity="warning",
            layers=["/decoder/Log"],
            title="The logarithm meets zeros that the reference does not have",
            evidence={"nonfinite": 12, "smallest_reference": 1.2e-7, "largest_ratio": math.inf},
            responsible=False,
            share_removed=0.02,
            mend=Mend(
                text="Pin the layer, or clamp its input.",
                pins=[PinInfo(target="/decoder/Log", format="fp32")],
            ),
        ),
        Finding(
            id="F3",
            kind="shared-range",
            severity="note",
            layers=["/head/Gemm"],
            title="One scale serves channels of very different size",
            evidence={"channel_spread": 44.0},
        ),
    ]


def _kernels() -> list[Kernel]:
    return [
        Kernel(
            name="_gemm_mha_v2_0x7f",
            layers=["/blocks.0/attn/qk/MatMul", "/blocks.0/attn/scale/Mul", "/blocks.0/attn/Softmax"],
            input_types=["Int8", "Int8"],
            output_types=["Half"],
            tactic="0x3f1c",
            accumulator="Int32",
            time_ms=0.031,
        ),
        Kernel(
            name="patch_embed_conv",
            layers=["/patch_embed/proj/Conv"],
            input_types=["Float"],
            output_types=["Half"],
        ),
    ]


def _outputs() -> list[OutputInfo]:
    saliency = _metrics(17.61, 5, 602_112) | {"nonfinite": 0.0}
    logits = _metrics(24.9, 9, 8_000) | {"kl": 0.0312, "top1": 0.9688, "flips": 1.0}
    return [
        OutputInfo(
            name="saliency",
            layer="/decoder/Sigmoid",
            metrics=saliency,
            worst=WorstCase(batch=3, index=[0, 0, 112, 41], channel=0),
        ),
        OutputInfo(
            name="logits", layer="/head/Gemm", metrics=logits, worst=WorstCase(batch=6, index=[0, 281])
        ),
    ]


def _run() -> RunInfo:
    return RunInfo(
        command="trtdiag compare vit.onnx --plan plan.yaml --data photos --engine tensorrt --out out",
        engine="tensorrt",
        versions={"trtdiag": "0.1.0", "tensorrt": "10.12.0", "onnxruntime": "1.32.0", "onnx": "1.23.2"},
        flags={"tf32": "off", "strongly_typed": "on"},
        data="folder photos, 8 files",
        calibration="min-max on the same 8 batches (no --calibration given)",
        batches=8,
        samples=32,
        seconds=41.7,
        peak_memory_mb=1312.0,
        started="2026-11-30T12:00:00Z",
        reference=ReferenceTrust(
            trusted=True, optimisation_rel_l2=3.1e-7, jitter_rel_l2=2.2e-6, tolerance_rel_l2=1e-4
        ),
    )


def _plan() -> PlanInfo:
    return PlanInfo(
        default="int8",
        base="fp32",
        pins=[
            PinInfo(target="role 'norm'", format="fp32", reason="norms stay", layers=9),
            PinInfo(target=r"match 're:^/decoder/(Log|Sigmoid)$'", format="fp32", layers=2),
        ],
        groups=[GroupInfo(kind="qkv", layers=["/blocks.0/attn/qkv/MatMul"])],
        sha256="5e" * 32,
    )


def report() -> Report:
    """The whole sample."""
    rows = layers()
    return Report(
        model=ModelInfo(path="models/vit.onnx", sha256="a1" * 32, opset=17, node_count=214),
        plan=_plan(),
        run=_run(),
        verdict=(
            "INT8 damages saliency to 17.6 dB; it begins at the attention's product with V in block 1, "
            "and the number format is to blame."
        ),
        outputs=_outputs(),
        layers=rows,
        births=_births([row.name for row in rows]),
        kernels=_kernels(),
        findings=_findings(),
        search=_search(),
        gate=GateResult(
            passed=False,
            checks=[
                Check(name="saliency:sqnr_db>=30", value=17.61, bound=30, passed=False),
                Check(name="logits:top1>=0.95", value=0.9688, bound=0.95, passed=True),
                Check(name="saliency:kl<=0.1 (not measured)", value=None, bound=0.1, passed=False),
            ],
        ),
    )


def _search() -> SearchInfo:
    weighed = [
        ("no pins", "start", 0, 17.61, 1.0),
        ("1 pin", "candidate", 1, 21.4, 1.012),
        ("3 pins", "candidate", 3, 26.9, 1.035),
        ("4 pins in FP16", "chosen", 4, 31.6, 1.046),
        ("everything in FP16", "rival", 0, 60.8, 0.78),
        ("everything in BF16", "rival", 0, 41.2, 0.78),
    ]
    points = [
        SearchPoint(label=label, kind=kind, pins=pins, value=value, price=price, met=value >= 30)  # type: ignore[arg-type]
        for label, kind, pins, value, price in weighed
    ]
    return SearchInfo(
        target="saliency:sqnr_db>=30",
        metric="sqnr_db",
        bound=30,
        higher_is_better=True,
        measured_prices=False,
        prices="an estimate from operations and bytes (roofline), not measured",
        points=points,
        proof="Taking any pin away misses the target, measured on the batches it was chosen on.",
        notes=["/blocks.1/attn/pv/MatMul is unstable: it appears or vanishes on random data."],
    )


if __name__ == "__main__":
    SAMPLE.write_text(dumps(report()) + "\n", encoding="utf-8")
