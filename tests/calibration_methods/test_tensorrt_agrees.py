"""The entropy method against what TensorRT itself chose.

TensorRT 10.6 calibrated MiniLM with its entropy calibrator on the 64 sentences of `en_calib`, on an H200.
Its cache holds scales; these four tensors are sums of embeddings, free of the GPU's TF32, and reach their
largest magnitude in the first batch, so that its bins are 1/2,048 of that. Scale times 127 over bin width:
"""

from __future__ import annotations

import numpy as np
import pytest

from diag.engines.onnxruntime import Session
from diag.engines.reference import with_outputs
from diag.feeds import open_feeds
from diag.model.load import load_model
from diag.numerics.calibrate import entropy
from diag.numerics.histogram import count
from fixtures.real import minilm, minilm_data

CHOSEN_BINS = {
    "embeddings/word_embeddings/Gather_output_0": 290.5,
    "embeddings/token_type_embeddings/Gather_output_0": 254.5,
    "embeddings/Add_output_0": 451.5,
    "embeddings/Add_1_output_0": 363.5,
}


@pytest.mark.export
def test_entropy_keeps_the_bins_that_tensorrt_kept():
    model = load_model(str(minilm()))
    names = {end: next(name for name in model.producers if name.endswith(f"/{end}")) for end in CHOSEN_BINS}
    session = Session(with_outputs(model.proto, list(names.values())), model.weights)
    seen = [session.run(batch) for batch in open_feeds(str(minilm_data("en_calib")), model.inputs)]
    for end, name in names.items():
        values = np.concatenate([np.abs(batch[name]).reshape(-1) for batch in seen])
        unit = (values / values.max()).astype(np.float32)
        assert entropy(count(unit, 1.0)[0], 1.0) * 2048 == CHOSEN_BINS[end]
