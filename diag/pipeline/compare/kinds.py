"""How each tensor is judged: by its values, as a distribution, or as a decision."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from diag.engines.reference import Trust
from diag.errors import UsageError
from diag.gate.threshold import Threshold
from diag.model.graph import Layer, Model, TensorInfo
from diag.numerics.measured import TensorKind
from diag.pipeline.prepare import Planned

_RESHAPING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""What may stand behind the last softmax; a converter of opsets puts Flatten and Reshape around old ones."""


def tensor_kinds(planned: Planned, trust: Trust) -> dict[str, TensorKind]:
    """Softmax as distributions; what heads and a softmax at the end give out as decisions."""
    kinds: dict[str, TensorKind] = {}
    for layer in planned.model.layers:
        role = planned.roles[layer.id].name
        for name in layer.outputs:
            given_out, noise = name in planned.model.outputs, trust.noise.get(name, 0.0)
            if given_out and _holds_classes(planned.model, planned.types, name):
                kinds[name] = TensorKind("classes", noise=noise)
            elif layer.op_type == "Softmax":
                kinds[name] = TensorKind("probabilities")
            elif given_out and role in ("lm_head", "head") and layer.op_type in ("MatMul", "Gemm", "Add"):
                kinds[name] = TensorKind("logits", noise=noise)
            elif layer.op_type in ("Conv", "ConvTranspose"):
                kinds[name] = TensorKind(convolution=True)
    return kinds


def require_metrics(
    thresholds: Iterable[Threshold], outputs: Collection[str], kinds: Mapping[str, TensorKind]
) -> None:
    """Refuse thresholds on a metric that none of their outputs has. Raises UsageError."""
    for threshold in thresholds:
        chosen = [kinds.get(name, TensorKind()) for name in outputs if threshold.output in (None, name)]
        decisions, distributions = any(k.decides for k in chosen), any(k.kind != "values" for k in chosen)
        has = {"top1": decisions, "flips": decisions, "kl": distributions}
        if not has.get(threshold.metric, True):
            raise UsageError(
                f"no output has {threshold.metric}, which {str(threshold)!r} asks for: "
                "it is measured of a head's logits and of a softmax at the end of the model",
                "Choose a metric of values, such as cosine or sqnr_db.",
            )


def _holds_classes(model: Model, types: Mapping[str, TensorInfo], tensor: str) -> bool:
    """Whether the rows of this tensor are those of a softmax along its last axis, in whatever shape."""
    layer = model.producers.get(tensor)
    if layer is None:
        return False
    if layer.op_type == "Softmax":
        return _along_last_axis(model, types, layer)
    width = _width(types, tensor)
    same = layer.op_type in _RESHAPING and width is not None and width == _width(types, layer.inputs[0])
    return same and _holds_classes(model, types, layer.inputs[0])


def _along_last_axis(model: Model, types: Mapping[str, TensorInfo], softmax: Layer) -> bool:
    """Before opset 13 the default is axis 1, which then stands for itself and all behind it."""
    info = types.get(softmax.outputs[0])
    axis = softmax.attributes.get("axis", -1 if model.opset >= 13 else 1)
    return axis == -1 or (info is not None and info.shape is not None and axis == len(info.shape) - 1)


def _width(types: Mapping[str, TensorInfo], tensor: str) -> int | str | None:
    """Length of a row; None when it is not known."""
    info = types.get(tensor)
    return info.shape[-1] if info is not None and info.shape else None
