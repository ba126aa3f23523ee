"""The rule on biases: an INT8 kernel adds them as INT32 codes."""

from __future__ import annotations

from collections.abc import Iterator

from diag.lint.hazard import QDQ, Hazard, hazards, lint_rules
from diag.model.graph import Model
from diag.typed.bias_range import INT32_MAX, bias_ratios


def check_biases(model: Model) -> Iterator[Hazard]:
    """Layers whose bias, in units of input step x weight step, leaves or nearly leaves INT32."""
    shares = {name: ratio / INT32_MAX for name, ratio in bias_ratios(model).items()}
    over = sorted((name for name in shares if shares[name] > 1), key=lambda name: -shares[name])
    rules = lint_rules()
    near = [name for name, share in shares.items() if rules.bias_warning_share < share <= 1]
    mend = (
        "Give the smallest weight channels a larger step (bias / (input step x 2^31)), or leave it in float."
    )
    for severity, names in (("error", over), ("warning", near)):
        share = max((shares[name] for name in names), default=0.0)
        yield from hazards(
            (f"bias-range-{severity}", QDQ, "error" if severity == "error" else "warning"),
            names,
            f"{len(names)} biases need {'more than' if severity == 'error' else 'nearly'} INT32: "
            f"{share:.3g} of its range at {names[0] if names else ''}",
            mend,
            int32_share=share,
        )
