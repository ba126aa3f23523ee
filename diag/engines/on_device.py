"""Error of a tensor measured where the tensor is, on the GPU: a few sums come to the host, not the tensor.

The sums are those of `diag.numerics`, in float64. What needs a closer look (something is not finite, stands
for infinity, or a whole row is zero) is left to the host: it is rare, and one place knows the rules.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from diag.engines.onnxruntime import Array
from diag.numerics.distributions import DecisionSums
from diag.numerics.error import MASK_LIKE, ErrorSums
from diag.numerics.measured import Measured, TensorKind, measure_tensor

_FACTS = 10
"""Numbers before the sums of each channel: see `_reduced`."""


class DeviceMeter:
    """Measures what lies in one tensor of torch's, batch after batch, against references from the host."""

    def __init__(self, torch: Any, candidate: Any, kind: TensorKind) -> None:
        self._torch, self._candidate, self._kind = torch, candidate, kind
        self._reference = torch.zeros(candidate.shape, dtype=torch.float32, device=candidate.device)
        self._graph: Any = None
        self._found: Any = None

    def is_of(self, candidate: Any) -> bool:
        """Whether it measures that tensor: the same shape, type and address."""
        own = self._candidate
        return bool(
            own.data_ptr() == candidate.data_ptr()
            and own.shape == candidate.shape
            and own.dtype == candidate.dtype
        )

    def capture(self) -> None:
        """Make the work one CUDA graph, so that a batch costs one launch."""
        torch, side = self._torch, self._torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm = self._reduced()  # what is set up at a first call must not be captured
        side.synchronize()
        self._found = torch.empty(warm.shape, dtype=warm.dtype, pin_memory=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            self._found.copy_(self._reduced(), non_blocking=True)

    def bring(self, reference: Array) -> None:
        """Copy a reference (any float type, the tensor's shape) to the device, on the current stream."""
        host = np.asarray(reference, np.float32, order="C")
        self._reference.copy_(self._torch.from_numpy(host if host.flags.writeable else host.copy()))

    def start(self) -> None:
        """Measure, on the current stream."""
        if self._graph is None:
            self._found = self._reduced().cpu()
        else:
            self._graph.replay()

    def result(self) -> Measured:
        """What was measured; the stream must have done it."""
        found = self._found.numpy()
        if found[0]:
            return _measured(found, self._candidate.numel())
        candidate = self._candidate.float().cpu().numpy()
        return measure_tensor(self._reference.cpu().numpy(), candidate, self._kind)

    def _reduced(self) -> Any:
        return _reduced(self._torch, self._reference, self._candidate, self._kind)


def _reduced(torch: Any, reference: Any, candidate: Any, kind: TensorKind) -> Any:
    """All sums of one tensor as float64 numbers: `_FACTS` of them, then two for each channel."""
    norm, candidate = torch.linalg.vector_norm, candidate.float()
    error = candidate - reference  # in float32, as the host does it
    flat = error.reshape(-1).abs()
    worst, index = flat.max(dim=0)
    largest = norm(reference, torch.inf)
    rows = candidate if candidate.ndim else candidate.reshape(1)
    silent = norm(rows, torch.inf, dim=-1).amin() == 0 if rows.shape[-1] > 1 else torch.zeros_like(worst)
    plain = (worst < MASK_LIKE) & (largest < MASK_LIKE) & ~silent.bool()
    facts = [
        plain,
        (reference * error).sum(dtype=torch.float64),
        error.sum(dtype=torch.float64),
        worst,
        index,
    ]
    facts += [largest, *_decisions(torch, reference, candidate, kind)]
    channels = _channels(torch, reference, error, kind)
    return torch.cat([torch.stack([fact.double() for fact in facts]), *channels])


def _channels(torch: Any, reference: Any, error: Any, kind: TensorKind) -> tuple[Any, Any]:
    """Sums of squares of reference and error, one for each channel."""
    axis = kind.axis(reference.ndim)
    others = [d for d in range(reference.ndim) if d != axis] if axis is not None else None

    def squares(values: Any) -> Any:
        found = torch.linalg.vector_norm(values, dim=others, dtype=torch.float64)
        return (found * found).reshape(-1)

    return squares(reference), squares(error)


def _decisions(torch: Any, reference: Any, candidate: Any, kind: TensorKind) -> tuple[Any, Any, Any, Any]:
    """Sum of KL, rows, rows of equal argmax, flips: as `diag.numerics.distributions` defines them."""
    nothing = torch.zeros((), dtype=torch.float64, device=reference.device)
    if kind.kind == "values":
        return nothing, nothing, nothing, nothing
    ref, cand = (t.reshape(-1, t.shape[-1]).double() for t in (reference, candidate))
    rows = nothing + len(ref)
    if kind.kind == "probabilities":
        tiny = torch.finfo(torch.float32).smallest_normal * 2.0**-23
        ratio = ref.clamp(min=tiny).log() - cand.clamp(min=tiny).log()
        return (ref * ratio).sum(), rows, nothing, nothing
    log_p, log_q = ref.log_softmax(-1), cand.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum().clamp(min=0)
    same = ref.argmax(-1) == cand.argmax(-1)
    flips = ~same
    if ref.shape[-1] > 1:
        top = ref.topk(2, dim=-1).values
        flips = flips & (top[:, 0] - top[:, 1] > 2 * kind.noise)
    return kl, rows, same.sum(), flips.sum()


def _measured(found: Array, elements: int) -> Measured:
    _, cross, error_sum, worst, index, largest, kl, rows, same, flips = (float(v) for v in found[:_FACTS])
    reference_square, error_square = np.split(found[_FACTS:].copy(), 2)
    sums = ErrorSums(
        reference_square,
        error_square,
        cross=cross,
        error_sum=error_sum,
        elements=elements,
        max_abs=worst,
        max_abs_index=int(index),
        reference_absmax=largest,
    )
    return Measured(sums, DecisionSums(kl, int(rows), int(same), int(flips)))
