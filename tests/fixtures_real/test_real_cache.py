"""What the cache promises: made once, whole or not at all."""

import threading

import pytest

from fixtures.real import cache


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRTDIAG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_environment_names_the_folder(monkeypatch, own_cache):
    assert cache.cache_folder().parent == own_cache
    monkeypatch.setenv("TRTDIAG_CACHE", "")
    assert cache.cache_folder().parent == cache.CHECKOUT / ".cache"
    assert (cache.CHECKOUT / "pyproject.toml").is_file()


@pytest.mark.parametrize("made", [cache.made_file, cache.made_folder])
def test_a_maker_that_fails_leaves_nothing_and_may_try_again(made, own_cache):
    def half(path):
        (path / "part" if path.is_dir() else path).write_text("half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        made("a/b", half)
    assert [p.name for p in cache.cache_folder().rglob("*")] == ["a"]


def test_a_file_is_made_once():
    calls = []

    def make(file):
        calls.append(file)
        file.write_text("whole")

    first = cache.made_file("x/model.onnx", make)
    assert cache.made_file("x/model.onnx", make) == first == cache.cache_folder() / "x/model.onnx"
    assert first.read_text() == "whole"
    assert len(calls) == 1
    assert calls[0].name == "model.onnx", "exporters look at the name"


def test_two_at_a_time_both_get_the_whole_folder():
    both_inside = threading.Barrier(2, timeout=20)
    got = []

    def make(folder):
        (folder / "a").write_text("1")
        both_inside.wait()
        (folder / "b").write_text("2")

    def work():
        folder = cache.made_folder("d", make)
        got.append(sorted(p.name for p in folder.iterdir()))

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert got == [["a", "b"], ["a", "b"]]
    assert [p.name for p in cache.cache_folder().iterdir()] == ["d"]
