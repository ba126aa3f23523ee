"""Error of a tensor measured where the tensor is, on the GPU: a few sums come to the host, not the tensor.

The sums are those of `diag.numerics`, in float64. What needs a closer look (something is not finite, stands
for infinity, or a whole row is zero) is left to the host: it is rare, and one place knows the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from diag.engines.onnxruntime import Array
from diag.numerics.distributions import DecisionSums
from diag.numerics.error import MASK_LIKE, ErrorSums
from diag.numerics.measured import Measured, TensorKind, measure_tensor

_FACTS = 10
"""Numbers before the sums of each channel: see `_Meter.reduce`."""


class DeviceMeters:
    """Measures what lies in some tensors of torch's, batch after batch, against references from the host."""

    def __init__(self, torch: Any, candidates: Sequence[tuple[Any, TensorKind]]) -> None:
        """`candidates`: the tensors, one for each reference that will come, and how they are judged."""
        self._torch = torch
        self._meters = [_Meter(torch, tensor, kind) for tensor, kind in candidates]
        self._graph: Any = None

    def are_of(self, candidates: Sequence[tuple[Any, TensorKind]]) -> bool:
        """Whether they measure those tensors: the same shapes, types and addresses."""
        return len(candidates) == len(self._meters) and all(
            meter.is_of(tensor) for meter, (tensor, _) in zip(self._meters, candidates, strict=True)
        )

    def capture(self) -> None:
        """Make the work one CUDA graph, so that a batch costs one launch and the tensors run side by side."""
        torch, main = self._torch, self._torch.cuda.Stream()
        streams = [torch.cuda.Stream() for _ in self._meters]
        main.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(main):
            for meter in self._meters:  # what is set up at a first call must not be captured
                meter.reduce()
        main.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=main):
            for meter, stream in zip(self._meters, streams, strict=True):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    meter.reduce()
            for stream in streams:
                main.wait_stream(stream)

    def bring(self, references: Sequence[Array]) -> None:
        """Put the references (any float type, the tensors' shapes) where `start` takes them from."""
        for meter, reference in zip(self._meters, references, strict=True):
            meter.bring(reference)

    def start(self) -> None:
        """Measure, on the current stream."""
        if self._graph is not None:
            self._graph.replay()
        else:
            for meter in self._meters:
                meter.reduce()

    def results(self) -> list[Measured]:
        """What was measured; the stream must have done it."""
        return [meter.result() for meter in self._meters]


class _Meter:
    """One tensor and its reference. All memory is taken at the start."""

    def __init__(self, torch: Any, candidate: Any, kind: TensorKind) -> None:
        self._torch, self._candidate, self._kind = torch, candidate, kind
        device = candidate.device
        self._values = torch.zeros((2, *candidate.shape), dtype=torch.float32, device=device)
        self._axes = self._summed_axes()
        channels = self._values[0].sum(dim=self._axes).numel() if self._axes else self._values[0].numel()
        self._found = torch.zeros(_FACTS + 2 * channels, dtype=torch.float64, device=device)
        pinned = bool(candidate.is_cuda)
        self._staged = torch.zeros(candidate.shape, dtype=torch.float32, pin_memory=pinned)
        self._host = torch.zeros(self._found.shape, dtype=torch.float64, pin_memory=pinned)

    def is_of(self, candidate: Any) -> bool:
        own = self._candidate
        return bool(
            own.data_ptr() == candidate.data_ptr()
            and own.shape == candidate.shape
            and own.dtype == candidate.dtype
        )

    def bring(self, reference: Array) -> None:
        np.copyto(self._staged.numpy(), reference, casting="same_kind")

    def reduce(self) -> None:
        """All sums of the tensor: largest error, largest reference, quietest row, place of the largest error,
        reference times error, error, four of decisions, then squares by channel of reference and error."""
        torch, found, axes = self._torch, self._found, self._axes
        reference, error = self._values[0], self._values[1]
        reference.copy_(self._staged, non_blocking=True)
        candidate = self._candidate.float()
        torch.sub(candidate, reference, out=error)  # in float32, as the host does it
        norm, flat = torch.linalg.vector_norm, (2, -1)
        found[0:2].copy_(norm(self._values.view(flat), torch.inf, dim=1).flip(0))
        found[2:3].copy_(self._quietest_row(candidate))
        found[3:4].copy_(error.abs().view(-1).argmax())
        found[4:5].copy_((reference * error).sum(dtype=torch.float64))
        found[5:6].copy_(error.sum(dtype=torch.float64))
        self._decide(found[6:_FACTS], reference, candidate)
        squares = norm(self._values, dim=[a + 1 for a in axes], dtype=torch.float64) if axes else self._values
        torch.mul(squares, squares, out=found[_FACTS:].view(squares.shape))
        self._host.copy_(found, non_blocking=True)

    def result(self) -> Measured:
        found = self._host.numpy()
        if found[0] < MASK_LIKE and found[1] < MASK_LIKE and found[2] != 0:
            return _measured(found, self._candidate.numel())
        candidate = self._candidate.float().cpu().numpy()
        return measure_tensor(self._values[0].cpu().numpy(), candidate, self._kind)

    def _summed_axes(self) -> list[int]:
        """Every axis but the channels'."""
        rank = self._candidate.ndim
        return [axis for axis in range(rank) if axis != self._kind.axis(rank)]

    def _quietest_row(self, candidate: Any) -> Any:
        """Largest magnitude of the row where that is smallest: 0 when a whole row is."""
        if not candidate.ndim or candidate.shape[-1] < 2:
            return self._torch.ones((), device=candidate.device)
        return self._torch.linalg.vector_norm(candidate, self._torch.inf, dim=-1).amin()

    def _decide(self, out: Any, reference: Any, candidate: Any) -> None:
        """Sum of KL, rows, rows of equal argmax, flips: as `diag.numerics.distributions` defines them."""
        torch, kind = self._torch, self._kind
        if kind.kind == "values":
            return
        ref, cand = (t.reshape(-1, t.shape[-1]).double() for t in (reference, candidate))
        out[1:2].fill_(len(ref))
        if kind.kind == "logits":
            log_p, log_q = ref.log_softmax(-1), cand.log_softmax(-1)
            out[0:1].copy_((log_p.exp() * (log_p - log_q)).sum().clamp(min=0))
        else:
            tiny = torch.finfo(torch.float32).smallest_normal * 2.0**-23
            out[0:1].copy_((ref * (ref.clamp(min=tiny).log() - cand.clamp(min=tiny).log())).sum())
        if not kind.decides:
            return
        same = ref.argmax(-1) == cand.argmax(-1)
        out[2:3].copy_(same.sum())
        flips = ~same
        if ref.shape[-1] > 1:
            top = ref.topk(2, dim=-1).values
            flips = flips & (top[:, 0] - top[:, 1] > 2 * kind.noise)
        out[3:4].copy_(flips.sum())


def _measured(found: Array, elements: int) -> Measured:
    worst, largest, _, index, cross, error_sum, kl, rows, same, flips = (float(v) for v in found[:_FACTS])
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
