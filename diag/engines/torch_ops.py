"""ONNX operators in PyTorch, as far as the float parts of networks use them. Using one imports PyTorch.

Each function takes the layer (for its attributes) and its input tensors, None for an absent one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from diag.model.graph import Layer


class _Later:
    """A module that is imported when it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


torch: Any = _Later("torch")
functional: Any = _Later("torch.nn.functional")

Tensor = Any
Operator = Callable[..., Any]


def _get(layer: Layer, name: str, default: Any = None) -> Any:
    value = layer.attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else value


def _ints(tensor: Tensor | None, otherwise: Any = None) -> Any:
    """A tensor of axes or sizes as a list."""
    return otherwise if tensor is None else [int(i) for i in tensor.reshape(-1).tolist()]


def _method(name: str) -> Operator:
    return lambda layer, x, *others: getattr(x, name)(*others)


def _function(name: str) -> Operator:
    return lambda layer, x: getattr(functional, name)(x)


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Operator:
    def apply(layer: Layer, x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = _ints(axes, _get(layer, "axes"))
        if not chosen and _get(layer, "noop_with_empty_axes", 0):
            return x
        return function(x, chosen or list(range(x.ndim)), bool(_get(layer, "keepdims", 1)))

    return apply


def _cast(layer: Layer, x: Tensor) -> Tensor:
    kinds = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16", TensorProto.DOUBLE: "float64"}
    return x.to(getattr(torch, kinds[_get(layer, "to")]))


def _clip(layer: Layer, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    low = _get(layer, "min") if low is None else low
    high = _get(layer, "max") if high is None else high
    return x if low is None and high is None else torch.clamp(x, low, high)


def _gelu(layer: Layer, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=_get(layer, "approximate", "none"))


def _gemm(layer: Layer, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if _get(layer, "transA", 0) else a
    b = b.T if _get(layer, "transB", 0) else b
    product = _get(layer, "alpha", 1.0) * (a @ b)
    return product if c is None else product + _get(layer, "beta", 1.0) * c


def _layer_norm(layer: Layer, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = x.shape[_get(layer, "axis", -1) :]
    bias = bias if bias is None else bias.expand(shape)
    return functional.layer_norm(x, shape, scale.expand(shape), bias, _get(layer, "epsilon", 1e-5))


def _rms_norm(layer: Layer, x: Tensor, scale: Tensor) -> Tensor:
    axis = _get(layer, "axis", -1) % x.ndim
    mean = x.square().mean(list(range(axis, x.ndim)), True)
    return x * torch.rsqrt(mean + _get(layer, "epsilon", 1e-5)) * scale


def _batch_norm(layer: Layer, x: Tensor, *parameters: Tensor) -> Tensor:
    scale, bias, mean, variance = parameters
    epsilon = _get(layer, "epsilon", 1e-5)
    return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


def _padded(x: Tensor, pads: Sequence[int], value: float = 0.0) -> Tensor:
    """Pads as ONNX gives them (every begin, then every end, of the last axes) put around `x`."""
    rank = len(pads) // 2
    pairs = [(pads[axis], pads[axis + rank]) for axis in reversed(range(rank))]
    return functional.pad(x, [p for pair in pairs for p in pair], value=value) if any(pads) else x


def _pad(
    layer: Layer, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    if _get(layer, "mode", "constant") != "constant" or axes is not None:
        raise NotImplementedError("Pad of this mode")
    return _padded(x, _ints(pads), 0.0 if value is None else float(value))


def _spatial(layer: Layer, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and pads. Raises NotImplementedError for automatic pads."""
    if _get(layer, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise NotImplementedError("automatic padding")
    ones = [1] * rank
    return _get(layer, "strides", ones), _get(layer, "dilations", ones), _get(layer, "pads", [0] * 2 * rank)


def _conv(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.ndim - 2
    strides, dilations, pads = _spatial(layer, rank)
    convolve = getattr(functional, f"conv{rank}d")
    return convolve(_padded(x, pads), weight, bias, strides, 0, dilations, _get(layer, "group", 1))


def _conv_transpose(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.ndim - 2
    strides, dilations, pads = _spatial(layer, rank)
    if pads[:rank] != pads[rank:] or "output_shape" in layer.attributes:
        raise NotImplementedError("ConvTranspose with uneven pads or an output_shape")
    extra, groups = _get(layer, "output_padding", [0] * rank), _get(layer, "group", 1)
    convolve = getattr(functional, f"conv_transpose{rank}d")
    return convolve(x, weight, bias, strides, pads[:rank], extra, groups, dilations)


def _max_pool(layer: Layer, x: Tensor) -> Tensor:
    rank = x.ndim - 2
    strides, dilations, pads = _spatial(layer, rank)
    pool = getattr(functional, f"max_pool{rank}d")
    rounded_up = bool(_get(layer, "ceil_mode", 0))
    padded = _padded(x, pads, -torch.inf)
    return pool(padded, _get(layer, "kernel_shape"), strides, 0, dilations, rounded_up)


def _global_average(layer: Layer, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.ndim)), True)


def _resize(
    layer: Layer, x: Tensor, roi: Any = None, scales: Tensor | None = None, sizes: Tensor | None = None
) -> Tensor:
    mode, corners = _get(layer, "mode", "nearest"), _get(layer, "coordinate_transformation_mode")
    names = {"linear": {3: "linear", 4: "bilinear", 5: "trilinear"}.get(x.ndim), "cubic": "bicubic"}
    factors = [] if scales is None else scales.tolist()
    size = _ints(sizes) or [int(n * s) for n, s in zip(x.shape, factors, strict=True)]
    if mode == "nearest":
        return functional.interpolate(x, size[2:], mode="nearest")
    aligned = corners == "align_corners"
    return functional.interpolate(x, size[2:], mode=names[mode], align_corners=aligned)


def _reshape(layer: Layer, x: Tensor, shape: Tensor) -> Tensor:
    sizes = _ints(shape)
    if not _get(layer, "allowzero", 0):
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(layer: Layer, x: Tensor) -> Tensor:
    return x.reshape(int(np.prod(x.shape[: _get(layer, "axis", 1)])), -1)


def _transpose(layer: Layer, x: Tensor) -> Tensor:
    return x.permute(_get(layer, "perm", list(reversed(range(x.ndim)))))


def _squeeze(layer: Layer, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = _ints(axes, _get(layer, "axes"))
    return x.squeeze() if chosen is None else x.squeeze(tuple(chosen))


def _unsqueeze(layer: Layer, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = _ints(axes, _get(layer, "axes"))
    for axis in sorted(a % (x.ndim + len(chosen)) for a in chosen):
        x = x.unsqueeze(axis)
    return x


def _expand(layer: Layer, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, _ints(shape)))


def _split(layer: Layer, x: Tensor, sizes: Tensor | None = None) -> Any:
    axis, count = _get(layer, "axis", 0), len(layer.outputs)
    return torch.split(x, _ints(sizes, _get(layer, "split")) or -(-x.shape[axis] // count), axis)


def _slice(
    layer: Layer,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    first, last = _ints(starts, _get(layer, "starts")), _ints(ends, _get(layer, "ends"))
    where = _ints(axes, _get(layer, "axes")) or list(range(len(first)))
    for axis, begin, end, step in zip(where, first, last, _ints(steps) or [1] * len(first), strict=True):
        kept = range(*slice(begin, end, step).indices(x.shape[axis]))
        x = x.index_select(axis, torch.tensor(list(kept), dtype=torch.int64))
    return x


def _gather(layer: Layer, x: Tensor, indices: Tensor) -> Tensor:
    axis = _get(layer, "axis", 0) % x.ndim
    flat = indices.reshape(-1).long() % x.shape[axis]
    return x.index_select(axis, flat).reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


_METHODS = (
    *(
        "Abs",
        "Cos",
        "Erf",
        "Exp",
        "Log",
        "MatMul",
        "Neg",
        "Pow",
        "Reciprocal",
        "Relu",
        "Sigmoid",
        "Sin",
        "Sqrt",
    ),
    "Tanh",
)
"""Those that are methods of tensors under the same name."""

OPERATORS: dict[str, Operator] = {
    **{name: _method(name.lower()) for name in _METHODS},
    **{name: _function(name.lower()) for name in ("HardSwish", "Mish", "Softplus", "Softsign")},
    "Add": lambda layer, a, b: a + b,
    "Sub": lambda layer, a, b: a - b,
    "Mul": lambda layer, a, b: a * b,
    "Div": lambda layer, a, b: a / b,
    "Sum": lambda layer, *parts: sum(parts),
    "Max": lambda layer, *parts: functools.reduce(torch.maximum, parts),
    "Min": lambda layer, *parts: functools.reduce(torch.minimum, parts),
    "Where": lambda layer, condition, a, b: torch.where(condition, a, b),
    "Identity": lambda layer, x: x,
    "Dropout": lambda layer, x, *others: x,
    "LeakyRelu": lambda layer, x: functional.leaky_relu(x, _get(layer, "alpha", 0.01)),
    "Elu": lambda layer, x: functional.elu(x, _get(layer, "alpha", 1.0)),
    "HardSigmoid": lambda layer, x: (_get(layer, "alpha", 0.2) * x + _get(layer, "beta", 0.5)).clamp(0, 1),
    "ReduceMean": _reduce(lambda x, axes, keep: x.mean(axes, keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: x.amax(axes, keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: x.amin(axes, keep)),
    "ReduceL2": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep)),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: x.square().sum(axes, keep)),
    "Softmax": lambda layer, x: x.softmax(_get(layer, "axis", -1)),
    "LogSoftmax": lambda layer, x: x.log_softmax(_get(layer, "axis", -1)),
    "Concat": lambda layer, *parts: torch.cat(parts, _get(layer, "axis")),
    "Tile": lambda layer, x, repeats: x.repeat(_ints(repeats)),
    "Cast": _cast,
    "Clip": _clip,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "BatchNormalization": _batch_norm,
    "Pad": _pad,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "GlobalAveragePool": _global_average,
    "Resize": _resize,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
}
"""By name, those of ONNX's own domain."""
