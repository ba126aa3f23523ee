"""The profiler in production: exact totals from many threads, never in the way, never raising."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime as ort
import pytest
from profile_tools import samples

import diag
from diag.drift import collector
from diag.drift.merge_files import merge_files
from diag.drift.stats import Stats
from diag.drift.stats_file import read_stats
from diag.errors import OutputError, TableError, UsageError

THREADS, CALLS = 8, 60


def session(home) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(home / "model.onnx"), options, providers=["CPUExecutionProvider"])


def profiler(home, out, **options) -> diag.Profiler:
    known = {"calibration": home / "table.json", "model": home / "model.onnx", "rate": 1.0, **options}
    return diag.Profiler(out, **known)


def merged(out) -> Stats:
    return merge_files(sorted(out.glob("*.stats")))


def test_eight_threads_lose_nothing(home, tmp_path):
    with profiler(home, tmp_path, queue_calls=THREADS * CALLS, rotate_s=0.05) as watching:
        wrapped = watching.wrap(session(home))

        def serve(thread: int) -> float:
            return sum(
                float(wrapped.run(None, {"x": samples(1000 * thread + i, 3)})[0].sum()) for i in range(CALLS)
            )

        with ThreadPoolExecutor(THREADS) as pool:
            sums = list(pool.map(serve, range(THREADS)))
    found = merged(tmp_path)
    source = found.source
    assert (source.seen, source.requests) == (3 * THREADS * CALLS, 3 * THREADS * CALLS)
    assert (source.dropped, source.errors, source.last_error) == (0, 0, "")
    everything = np.concatenate([samples(1000 * t + i, 3) for t in range(THREADS) for i in range(CALLS)])
    assert found["x"].elements == everything.size
    assert (found["x"].minimum, found["x"].maximum) == (everything.min(), everything.max())
    assert found["x"].mean == pytest.approx(everything.astype(np.float64).mean(), rel=1e-5, abs=1e-7)
    assert found["y"].mean * found["y"].elements == pytest.approx(sum(sums), rel=1e-4)
    assert len(list(tmp_path.glob("*.stats"))) > 1, "files take turns"
    assert not list(tmp_path.glob(".*")), "nothing half-written stays"


def test_a_share_of_the_calls(home, tmp_path):
    with profiler(home, tmp_path, rate=0.1, seed=1, queue_calls=1000) as watching:
        wrapped = watching.wrap(session(home))
        for i in range(1000):
            wrapped.run(["y"], {"x": samples(i, 1)})
    found = merged(tmp_path)
    assert found.source.seen == 1000
    assert 60 < found.source.requests < 140  # four standard deviations
    assert found["z"].requests == 0 and found["z"].elements == 0, "nobody asked for z"
    assert found["y"].requests == found.source.requests


def test_a_full_queue_drops_and_counts(home, tmp_path, monkeypatch):
    gate = threading.Event()
    true_count = collector.count_batch

    def slow(*args, **options):
        gate.wait(10)
        return true_count(*args, **options)

    monkeypatch.setattr(collector, "count_batch", slow)
    with profiler(home, tmp_path, queue_calls=2) as watching:
        wrapped = watching.wrap(session(home))
        began = time.monotonic()
        for i in range(20):
            wrapped.run(None, {"x": samples(i, 2)})
        assert time.monotonic() - began < 5, "the caller never waits"
        gate.set()
    source = merged(tmp_path).source
    assert source.seen == 40
    assert source.dropped >= 2 * (20 - 2 - 1)
    assert source.requests + source.dropped == 40


def test_memory_is_bounded(home, tmp_path):
    with profiler(home, tmp_path, memory_mb=1e-4) as watching:  # 100 bytes: less than one call
        watching.wrap(session(home)).run(None, {"x": samples(0)})
    source = merged(tmp_path).source
    assert (source.seen, source.requests, source.dropped) == (5, 0, 5)


def test_all_tensors_are_those_of_a_profile(home, tmp_path, trtdiag):
    """The same data through the command give the same figures."""
    with profiler(home, tmp_path / "served", tensors="all") as watching:
        wrapped = watching.wrap(session(home))
        for i in range(4):
            with np.load(home / "production" / f"{i}.npz") as batch:
                wrapped.run(None, {"x": batch["x"]})
    words = (
        "profile",
        home / "model.onnx",
        "--data",
        home / "production",
        "--calibration",
        home / "table.json",
    )
    assert trtdiag(*words, "--out", tmp_path / "p.stats", "--quiet")[0] == 0
    served, profiled = merged(tmp_path / "served"), read_stats(tmp_path / "p.stats")
    assert served.tensors == profiled.tensors
    np.testing.assert_array_equal(served.counts, profiled.counts)
    np.testing.assert_array_equal(served.tallies, profiled.tallies)
    assert served.source.identity == profiled.source.identity
    assert served["h"].clipped > 0


def test_what_goes_wrong_stays_inside(home, tmp_path, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("counting broke")

    monkeypatch.setattr(collector, "count_batch", broken)
    with profiler(home, tmp_path) as watching:
        wrapped = watching.wrap(session(home))
        assert wrapped.run(["y"], {"x": samples(0)})[0].shape == (5, 4)
        watching.observe({"x": object()}, {})
    source = merged(tmp_path).source
    assert (source.seen, source.requests, source.errors) == (6, 0, 6)
    assert source.last_error == "RuntimeError: counting broke"


def test_the_callers_own_errors_are_the_callers(home, tmp_path):
    with profiler(home, tmp_path) as watching:
        wrapped = watching.wrap(session(home))
        with pytest.raises(Exception, match="nothing"):
            wrapped.run(None, {"nothing": samples(0)})
        assert wrapped.get_inputs()[0].name == "x"


def test_nan_is_counted_and_the_rest_used(home, tmp_path):
    x = samples(0)
    x[1, 2], x[3, 0], x[3, 1] = np.nan, np.inf, -np.inf
    with profiler(home, tmp_path) as watching:
        watching.wrap(session(home)).run(None, {"x": x})
    found = merged(tmp_path)["x"]
    tallies = [found.tally(n) for n in ("nan", "positive_infinite", "negative_infinite", "bad_requests")]
    assert tallies == [1, 1, 1, 2]
    finite = x[np.isfinite(x)]
    assert (found.elements, found.minimum, found.maximum) == (27, finite.min(), finite.max())
    assert found.mean == pytest.approx(finite.mean(), rel=1e-5)
    assert [d for _, d in found.worst[:2]] == [np.inf, np.inf]


def test_a_folder_that_vanishes_costs_no_call(home, tmp_path):
    out = tmp_path / "out"
    watching = profiler(home, out, rotate_s=0.02)
    wrapped = watching.wrap(session(home))
    wrapped.run(None, {"x": samples(0)})
    deadline = time.monotonic() + 10
    while not list(out.glob("*.stats")) and time.monotonic() < deadline:
        time.sleep(0.01)
    for file in out.iterdir():
        file.unlink()
    out.rmdir()
    wrapped.run(None, {"x": samples(1)})
    time.sleep(0.1)
    out.mkdir()
    wrapped.run(None, {"x": samples(2)})
    watching.close()
    wrapped.run(None, {"x": samples(3)})  # closed: nobody looks any more
    source = merged(out).source
    assert (source.seen, source.requests) == (10, 10), "what could not be written is in the next file"
    assert source.last_error.startswith("OutputError")


def test_bad_settings_are_refused_at_once(home, tmp_path):
    with pytest.raises(UsageError, match="a rate of 2"):
        profiler(home, tmp_path, rate=2)
    with pytest.raises(UsageError, match="model="):
        profiler(home, tmp_path, tensors="all", model=None)
    with pytest.raises(TableError):
        profiler(home, tmp_path, calibration=home / "absent.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        profiler(home, tmp_path / "file")
    with profiler(home, tmp_path) as watching:
        watching.wrap(session(home))
        with pytest.raises(UsageError, match="already"):
            watching.wrap(session(home))


def test_nothing_is_written_of_the_inputs(home, tmp_path):
    """No float of an input stands in a file, but for its extremes."""
    x = samples(7, 40)
    with profiler(home, tmp_path) as watching:
        watching.wrap(session(home)).run(None, {"x": x})
    with np.load(next(tmp_path.glob("*.stats"))) as archive:
        held = b"".join(archive[name].tobytes() for name in archive.files)
    inner = [v for v in x.reshape(-1) if v not in (x.min(), x.max()) and abs(v) not in np.abs(x).max(axis=1)]
    assert not [v for v in inner if v.tobytes() in held]


torch_only = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('torch')")


@torch_only
def test_hooks_of_a_torch_module(home, tmp_path):
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
    with profiler(home, tmp_path, model=None, queue_calls=1000) as watching, torch.no_grad():
        hooks = watching.hook(module, {"1": "h", "2": "logits"})

        def serve(thread: int) -> None:
            for i in range(20):
                module(torch.from_numpy(samples(100 * thread + i)))

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(serve, range(THREADS)))
        with pytest.raises(RuntimeError):
            module(torch.zeros(2, 7))
        hooks.remove()
        module(torch.zeros(2, 6))
    found = merged(tmp_path)
    assert (found.source.requests, found.source.errors) == (THREADS * 20 * 5, 0)
    assert found.source.seen == THREADS * 20 * 5 + 2  # the call that failed went by as well
    x = torch.from_numpy(np.concatenate([samples(100 * t + i) for t in range(THREADS) for i in range(20)]))
    with torch.no_grad():
        hidden = module[:2](x).numpy()
    assert found["h"].maximum == pytest.approx(hidden.max(), rel=1e-5)
    assert found["h"].tensor.scale_from == "table" and found["logits"].tensor.scale_from == "unit"


@torch_only
def test_a_submodule_that_is_not_there(home, tmp_path):
    import torch

    with pytest.raises(UsageError, match="'encoder'"):
        profiler(home, tmp_path, model=None).hook(torch.nn.Linear(2, 2), ["encoder"])


def test_importing_diag_is_light():
    import subprocess
    import sys

    script = (
        "import sys, diag; print(sorted({'numpy', 'onnx', 'onnxruntime'} & set(sys.modules)), diag.Profiler)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] <class 'diag.drift.profiler.Profiler'>")
