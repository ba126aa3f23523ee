"""NNCF's accuracy control on MiniLM; a script for an interpreter that has nncf, without trtdiag.

    python search_peer_nncf.py MODEL CALIBRATION VALIDATION LIMIT

Prints one JSON object: seconds, validations, mean cosine of the sentence embedding, operations reverted.
"""

import json
import logging
import re
import sys
import time
from pathlib import Path

import nncf
import numpy as np
import onnx
import onnxruntime as ort

OUTPUT = "sentence_embedding"
MAX_DROP = 0.01


def batches(folder: str, limit: int) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(file)) for file in sorted(Path(folder).glob("*.npz"))[:limit]]


class Reverted(logging.Handler):
    """Reads from NNCF's log how many operations it gave back to FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    path, calibration, validation, limit = *sys.argv[1:4], int(sys.argv[4])
    held = batches(validation, limit)
    plain = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    reference = [plain.run([OUTPUT], feed)[0] for feed in held]
    count = 0

    def cosine(model: onnx.ModelProto) -> float:
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        values = []
        for feed, want in zip(held, reference, strict=True):
            got = session.run([OUTPUT], feed)[0]
            values.append((got * want).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1))
        return float(np.concatenate(values).mean())

    def validate(model: onnx.ModelProto, _: object) -> tuple[float, None]:
        nonlocal count
        count += 1
        return cosine(model), None

    log = Reverted()
    logging.getLogger("nncf").addHandler(log)
    logging.getLogger("nncf").setLevel(logging.INFO)
    began = time.monotonic()
    quantized = nncf.quantize_with_accuracy_control(
        onnx.load(path),
        nncf.Dataset(batches(calibration, 8)),
        nncf.Dataset(held),
        validate,
        max_drop=MAX_DROP,
    )
    seconds = time.monotonic() - began
    text = "\n".join(log.lines)
    totals = [int(n) for n in re.findall(r"Total number of quantized operations in the model: (\d+)", text)]
    reverted = re.findall(r"(\d+) out of \d+ were reverted", text)
    found = {
        "version": nncf.__version__,
        "seconds": seconds,
        "validations": count,
        "cosine": cosine(quantized),
        "operations": totals[0] if totals else -1,
        "reverted": int(reverted[-1]) if reverted else text.count("reverted"),
        "log": log.lines[-8:],
    }
    sys.stdout.write(json.dumps(found) + "\n")


main()
