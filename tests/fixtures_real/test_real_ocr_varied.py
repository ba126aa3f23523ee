"""Lines in several fonts: shaped as PaddleOCR shapes them, and read back by the network."""

import numpy as np
import onnxruntime
import pytest

from diag.errors import DataError, ModelError
from fixtures.real import ocr, ocr_varied


def ready(split):
    try:
        return ocr_varied.varied_data(split)
    except DataError as missing:
        pytest.skip(str(missing))


def test_unknown_split():
    with pytest.raises(
        DataError, match=r"there are no lines called 'eval'\. Choose one of search, held_out, judge\."
    ):
        ocr_varied.varied_data("eval")


def test_a_batch_is_as_wide_as_its_widest_line():
    widths = [30, 70]
    lines = [np.full((3, 48, width), 0.5, np.float32) for width in widths]
    batch = ocr_varied._padded(lines)
    assert batch.shape == (2, 3, 48, 96)  # the next multiple of 32
    for row, width in zip(batch, widths, strict=True):
        assert (row[:, :, :width] == 0.5).all()
        assert (row[:, :, width:] == 0).all()


@pytest.mark.parametrize("split", ["search", "held_out", "judge"])
def test_lines_are_dark_on_light_and_no_two_batches_alike(split):
    batches = [np.load(file)["x"] for file in sorted(ready(split).glob("*.npz"))]
    assert len(batches) * 4 == len(ocr_varied.varied_lines(split))
    assert len({batch.shape[3] for batch in batches}) > 1
    for batch in batches:
        assert (batch.dtype, batch.shape[:3]) == (np.float32, (4, 3, 48))
        assert np.abs(batch).max() <= 1
        assert batch.min() < -0.2  # ink of at most 80 is -0.37 or less
        assert np.median(batch[:, :, :, :64]) > 0.5  # paper of at least 200 is 0.57 or more


def test_splits_share_no_text():
    taken = [number for split in ocr_varied.SPLITS.values() for number in range(split.start, split.stop)]
    assert len(set(taken)) == len(taken)


def test_the_network_reads_them():
    data = ready("held_out")
    try:
        model = ocr.ppocr("v4")
    except ModelError as missing:
        pytest.skip(str(missing))
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    read = [
        text
        for file in sorted(data.glob("*.npz"))
        for text in ocr.read_lines(model, session.run(None, {"x": np.load(file)["x"]})[0])
    ]
    same = [
        a.replace(" ", "") == b.replace(" ", "")
        for a, b in zip(read, ocr_varied.varied_lines("held_out"), strict=True)
    ]
    assert np.mean(same) >= 0.9
