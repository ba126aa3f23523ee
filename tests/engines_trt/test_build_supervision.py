"""What a build does when its child process misbehaves; no TensorRT is needed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diag.engines import tensorrt
from diag.engines.build import BuildOptions, build_rtx, build_tensorrt
from diag.engines.build_worker import request_from
from diag.engines.stamp import Identity, read_stamp
from diag.errors import EngineError

Worker = Callable[[str], tuple[str, ...]]

LAYER = (
    "Name: a, LayerType: kgen, Inputs: [], Outputs: [], TacticName: , StreamId: 0, Metadata: [ONNX Layer: n]"
)
SUCCESS = f"""
print("[VERBOSE] Layers:"); print({LAYER!r}); print()
open(request["engine_path"], "wb").write(b"vtrt") if request["engine_path"] else None
json.dump(dict(version="1.7", seconds=0.5, engine_bytes=4, problem="", hint="", refusals=[]),
          open(request["outcome_path"], "w"))
"""


def report(**outcome: object) -> str:
    full = {
        "version": "1.7",
        "seconds": 0,
        "engine_bytes": 0,
        "problem": "",
        "hint": "",
        "refusals": [],
        **outcome,
    }
    return f"json.dump({full!r}, open(request['outcome_path'], 'w'))"


def test_success_is_stamped(fp32_model: Path, tmp_path: Path, fake_worker: Worker) -> None:
    engine = tmp_path / "out" / "m.engine"
    result = build_rtx(
        fp32_model, engine, identity=Identity("m" * 64, "p" * 64), worker=fake_worker(SUCCESS),
        options=BuildOptions(tf32=False, flags=("REFIT",), profiles={"x": ((1, 64), (8, 64), (16, 64))}),
    )  # fmt: skip
    assert [k.nodes for k in result.kernels] == [("n",)]
    assert (result.seconds, result.engine_bytes, result.version) == (0.5, 4, "1.7")
    assert result.log_path == engine.with_name("m.engine.build.log")
    assert result.inspector_path is None
    stamp = read_stamp(engine)
    assert stamp.identity == Identity("m" * 64, "p" * 64)
    assert stamp.flags["tf32"] == "off"
    assert stamp.flags["REFIT"] == "on"
    assert stamp.profiles == {"x": [[1, 64], [8, 64], [16, 64]]}
    assert stamp.compute_capability == "SM89"
    assert sorted(p.name for p in engine.parent.iterdir()) == [
        "m.engine",
        "m.engine.build.log",
        "m.engine.json",
    ]


def test_without_a_path_nothing_stays(fp32_model: Path, tmp_path: Path, fake_worker: Worker) -> None:
    worker = fake_worker(SUCCESS)
    before = sorted(tmp_path.iterdir())
    result = build_rtx(fp32_model, worker=worker)
    assert len(result.kernels) == 1
    assert (result.engine_path, result.log_path) == (None, None)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 6)", "was killed by SIGABRT"),
        ("os.kill(os.getpid(), 9)", "ran out of memory"),
        ("sys.exit(3)", "ended with status 3"),
        ("raise RuntimeError('boom')", "ended with status 1"),
        ("pass", "ended with status 0"),
        ("open(request['outcome_path'], 'w').write('{')", "ended with status 0"),
    ],
)
def test_a_crash_names_its_cause_and_the_log(
    code: str, says: str, fp32_model: Path, tmp_path: Path, fake_worker: Worker
) -> None:
    engine = tmp_path / "m.engine"
    worker = fake_worker(f"print('[ERROR] the last words', flush=True)\n{code}")
    with pytest.raises(EngineError, match=says) as caught:
        build_rtx(fp32_model, engine, worker=worker)
    assert "the last words" in str(caught.value)
    assert "m.engine.failed.log" in str(caught.value)
    assert caught.value.exit_code == 3
    assert engine.with_name("m.engine.failed.log").is_file()
    assert not engine.exists()


def test_a_failed_build_leaves_the_older_engine_whole(
    fp32_model: Path, tmp_path: Path, fake_worker: Worker
) -> None:
    engine = tmp_path / "m.engine"
    build_rtx(fp32_model, engine, worker=fake_worker(SUCCESS))
    kept = {p.name: p.read_bytes() for p in tmp_path.glob("m.engine*")}
    with pytest.raises(EngineError):
        build_rtx(fp32_model, engine, worker=fake_worker("sys.exit(1)"))
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept


def test_a_build_that_never_ends_is_stopped(fp32_model: Path, tmp_path: Path, fake_worker: Worker) -> None:
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"limit of 0\.5 s"):
        build_rtx(
            fp32_model,
            tmp_path / "m.engine",
            options=BuildOptions(timeout_s=0.5),
            worker=fake_worker("time.sleep(60)"),
        )
    assert time.monotonic() - started < 20


def test_a_worker_that_cannot_start(fp32_model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be started"):
        build_rtx(fp32_model, tmp_path / "m.engine", worker=(str(tmp_path / "none"),))


def test_every_refused_node_is_listed(fp32_model: Path, fake_worker: Worker) -> None:
    refusals = [
        {"node": f"n{i}", "op_type": "Odd", "reason": "the operator is not supported"} for i in range(23)
    ]
    with pytest.raises(EngineError, match="refuses 23 of the model's nodes") as caught:
        build_rtx(fp32_model, worker=fake_worker(report(problem="no", refusals=refusals)))
    assert "n0 (Odd): the operator is not supported" in str(caught.value)
    assert "and 3 more" in str(caught.value)


def test_a_problem_comes_with_its_hint(fp32_model: Path, fake_worker: Worker) -> None:
    with pytest.raises(EngineError, match=r"tensorrt-rtx 1\.7: no engine\. Try harder") as caught:
        build_rtx(fp32_model, worker=fake_worker(report(problem="no engine", hint="Try harder.")))
    assert caught.value.hint == "Try harder."


def test_a_log_without_layers_is_an_engine_error(fp32_model: Path, fake_worker: Worker) -> None:
    with pytest.raises(EngineError, match="told no kernels"):
        build_rtx(fp32_model, worker=fake_worker("print('[INFO] quiet')\n" + report()))


def test_input_errors_come_before_any_process(tmp_path: Path, fp32_model: Path) -> None:
    with pytest.raises(EngineError, match="does not exist"):
        build_rtx(tmp_path / "none.onnx", worker=("never",))
    with pytest.raises(EngineError, match="no timing cache"):
        build_rtx(fp32_model, options=BuildOptions(timing_cache=tmp_path / "t.cache"), worker=("never",))


def test_the_request_survives_json(fp32_model: Path, tmp_path: Path, fake_worker: Worker) -> None:
    seen = tmp_path / "seen.json"
    code = f"json.dump(request, open({str(seen)!r}, 'w'))\n" + SUCCESS
    options = BuildOptions(
        profiles={"x": ((1, 64), (8, 64), (16, 64))}, opt_level=2, workspace_bytes=1 << 20, marks="unfused"
    )
    build_rtx(fp32_model, options=options, compute_capability="SM120", worker=fake_worker(code))
    values = json.loads(seen.read_text())
    values.pop("outcome_path")
    request = request_from(values)
    assert request == tensorrt.BuildRequest(
        flavour="tensorrt-rtx",
        onnx_path=str(fp32_model),
        compute_capability="SM120",
        profiles=options.profiles,
        opt_level=2,
        workspace_bytes=1 << 20,
        marks="unfused",
    )


def test_a_library_that_is_missing_is_named_with_its_line(
    fp32_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    outcome = tensorrt.build(tensorrt.BuildRequest("tensorrt", str(fp32_model)), lambda text: None)
    assert "cannot be imported" in outcome.problem
    assert "pip install" in outcome.hint


def test_tensorrt_asks_for_the_inspector(fp32_model: Path, tmp_path: Path, fake_worker: Worker) -> None:
    inspector = {"Layers": [{"Name": "k", "LayerType": "gemm", "Metadata": "[ONNX Layer: first]"}]}
    code = f"json.dump({inspector!r}, open(request['inspector_path'], 'w'))\n" + SUCCESS
    engine = tmp_path / "m.engine"
    result = build_tensorrt(fp32_model, engine, worker=fake_worker(code))
    assert [k.name for k in result.kernels] == ["k"]
    assert result.inspector_path == tmp_path / "m.engine.inspector.json"
