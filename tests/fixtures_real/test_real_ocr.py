"""PP-OCR: the upgraded model computes what the packaged one does, and reads what is drawn."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from diag.errors import DataError, ModelError
from diag.feeds import open_feeds
from diag.model.load import load_model
from fixtures.real import ocr as fixture


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def ready(version):
    try:
        return fixture.ppocr(version), fixture.ppocr_data("eval")
    except (ModelError, DataError) as missing:
        pytest.skip(str(missing))


def test_blank_and_repeated_classes_are_dropped(tmp_path):
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
    onnx.helper.set_model_props(model, {"character": "a\nb"})
    onnx.save(model, tmp_path / "m.onnx")
    steps = np.eye(4, dtype=np.float32)[[0, 1, 1, 0, 1, 2, 2, 3, 0]]
    assert fixture.read_lines(tmp_path / "m.onnx", steps[None]) == ["aab "]


def test_missing_package(monkeypatch):
    monkeypatch.setattr(fixture, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        fixture.ppocr("v4")
    assert str(caught.value) == (
        "package rapidocr_onnxruntime is not installed. "
        "Run: pip install --no-deps rapidocr-onnxruntime==1.4.4."
    )


def test_unknown_split():
    with pytest.raises(DataError, match=r"there are no lines called 'en'\. Choose one of calib, eval\."):
        fixture.ppocr_data("en")


@pytest.mark.parametrize(("version", "right"), [("v6", 0.9), ("v4", 0.75)])
def test_it_reads_what_is_drawn_as_the_packaged_model_does(version, right):
    model, data = ready(version)
    assert load_model(model).opset == 17
    package, name, _ = fixture._FILES[version]
    packaged = Path(find_spec(package).origin).parent / "models" / name
    ours, theirs = session(model), session(packaged)
    read, feeds = [], open_feeds(str(data), load_model(model).inputs, limit=4)
    for batch in feeds:
        (probabilities,) = ours.run(None, batch)
        np.testing.assert_allclose(probabilities, theirs.run(None, batch)[0], atol=1e-5)
        read += fixture.read_lines(model, probabilities)
    drawn = fixture.ocr_lines("eval")[:16]
    same = [a.replace(" ", "") == b.replace(" ", "") for a, b in zip(read, drawn, strict=True)]
    assert np.mean(same) >= right
