"""The final plan on an engine: built and audited by TensorRT-RTX's compiler, which needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from search_tools import workplace

from diag.cli.search_options import engine_of
from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, OnnxRuntimeRunner
from diag.engines.stamp import Identity, check_stamp, read_stamp
from diag.errors import EngineError, UsageError
from diag.kernels.read import read_kernels
from diag.pipeline.engine.builds import EngineBuilds, Runs
from diag.pipeline.engine.stage import Subject
from diag.pipeline.search.job import pin_layers
from diag.pipeline.settings import EngineSettings
from diag.progress import Silent

NO_RTX = "TensorRT-RTX is not installed"


def test_the_plan_is_built_and_audited(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason=NO_RTX)
    place = workplace(tmp_path)
    found = place.pin(confirm="tensorrt-rtx")
    assert found.met
    assert found.on_engine is True
    assert found.builds is None  # not run here: no numbers to search by
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["kernels"]
    assert report["search"]["points"]
    assert (tmp_path / "out" / "model.engine").is_file()


class _Zeros:
    def __init__(self, runner: OnnxRuntimeRunner, share: float) -> None:
        self._runner, self._share = runner, share

    def run(self, feed: Feed) -> Mapping[str, Array]:
        return {name: self._share * array for name, array in self._runner.run(feed).items()}


@dataclass(frozen=True)
class Compiled(EngineBuilds):
    """Compiled by TensorRT-RTX, run by ONNX Runtime since no GPU is here; wrong unless `needs` is pinned."""

    needs: str = ""
    left: list[set[str]] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return True

    @contextmanager
    def open(self, subject: Subject, identity: Identity) -> Iterator[Runs]:
        engine = self.build(subject, identity)
        self.plans.append(identity.plan_sha256)
        self.left.append({file.name for file in engine.parent.glob("*.engine")})
        right = subject.typed.formats[self.needs] != "int8"
        yield _Zeros(OnnxRuntimeRunner.emulation(subject.typed.model), 1.0 if right else 0.0)

    def kept(self, out: Path, identity: Identity) -> str:
        check_stamp(super().kept(out, identity), identity)  # it is there, and this plan's
        return "emulate"


def test_every_set_is_compiled_and_the_last_one_ships(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason=NO_RTX)
    place = workplace(tmp_path)
    emulated = place.pin("emulated")
    ranked = [effect.candidate.id for effect in emulated.ranking.effects]
    needed = next(pin for pin in ranked if pin not in emulated.search.pins)
    builds = Compiled(EngineSettings("tensorrt-rtx"), needed)
    found = pin_layers(place.settings(confirm="tensorrt-rtx"), Silent(), builds)
    assert found.met
    assert set(found.search.pins) == {*emulated.search.pins, needed}
    assert found.builds is not None
    # One more is built to be listened to, which needs its GPU: that answer is missing, the search goes on.
    assert len(builds.plans) + 1 == found.builds.found.builds <= found.builds.found.limit
    # The first, that one, the last that held, the one under trial.
    assert all(len(left) <= 4 for left in builds.left)
    out = tmp_path / "out"
    assert not (out / ".builds").exists()
    assert found.report is not None
    assert found.report.plan is not None
    stamp = check_stamp(out / "model.engine", read_stamp(out / "model.engine").identity)
    assert stamp.identity.plan_sha256 == found.report.plan.sha256
    assert (out / stamp.log).is_file()
    assert read_kernels(out / "model.engine")


def test_an_engine_of_another_plan_is_not_taken_for_this_one(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason=NO_RTX)
    builds = EngineBuilds(EngineSettings("tensorrt-rtx"))
    workplace(tmp_path).pin(confirm="tensorrt-rtx")
    identity = read_stamp(tmp_path / "out" / "model.engine").identity
    assert builds.kept(tmp_path / "out", identity) == str(tmp_path / "out" / "model.engine")
    other = Identity(identity.model_sha256, "0" * 64, identity.table_sha256)
    assert builds.kept(tmp_path / "out", other) == "tensorrt-rtx"


def test_without_confirming_nothing_is_said_of_an_engine(tmp_path: Path) -> None:
    found = workplace(tmp_path).pin()
    assert (found.on_engine, found.builds) == (None, None)


def test_an_engine_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="no engine"):
        engine_of("openvino")


def test_an_engine_that_cannot_work_here_is_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diag.pipeline.engine.stage.load", lambda flavour: None)
    monkeypatch.setattr("diag.pipeline.engine.stage.find_gpus", tuple)
    with pytest.raises(EngineError, match="none is here"):
        workplace(tmp_path).pin(confirm="tensorrt")
    assert not (tmp_path / "out").exists()
