"""What `trtdiag doctor` is told, with engines present, missing and crashing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from diag.engines import gpu, probe
from diag.engines.gpu import Gpu, find_gpus

H200 = Gpu("NVIDIA H200", "9.0", "143771 MiB", "580.65")
L4 = Gpu("NVIDIA L4", "8.9", "23034 MiB", "580.65")


def answering(text: str, status: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})")


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_installed", lambda module: True)


def statuses(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...], worker: tuple[str, ...]
) -> dict[str, probe.EngineStatus]:
    monkeypatch.setattr(probe, "find_gpus", lambda: gpus)
    return {status.name: status for status in probe.probe(worker)}


def test_every_engine_is_told_of() -> None:
    found = {status.name: status for status in probe.probe()}
    assert list(found) == ["emulate", "tensorrt-rtx", "tensorrt", "gpu", "torch", "polygraphy"]
    assert found["emulate"].usable
    assert found["emulate"].version
    for status in found.values():
        assert status.usable or status.missing
        assert status.usable or status.install or status.name in ("gpu", "tensorrt")


@pytest.mark.usefixtures("all_installed")
def test_rtx_builds_everywhere_and_runs_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = answering(json.dumps({"version": "1.7.1", "builds": True}))
    bare = statuses(monkeypatch, (), worker)["tensorrt-rtx"]
    assert (bare.usable, bare.version) == (True, "1.7.1")
    assert "cannot run" in bare.missing
    assert "cannot run" in statuses(monkeypatch, (H200,), worker)["tensorrt-rtx"].missing
    assert statuses(monkeypatch, (L4,), worker)["tensorrt-rtx"].missing == ""


@pytest.mark.usefixtures("all_installed")
def test_tensorrt_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cannot = answering(json.dumps({"version": "10.13", "builds": False}))
    assert "no NVIDIA GPU" in statuses(monkeypatch, (), cannot)["tensorrt"].missing
    assert "driver too old" in statuses(monkeypatch, (H200,), cannot)["tensorrt"].missing
    can = answering(json.dumps({"version": "10.13", "builds": True}))
    found = statuses(monkeypatch, (H200,), can)
    assert found["tensorrt"].can == "builds and runs on NVIDIA H200"
    assert "NVIDIA H200 (9.0, 143771 MiB)" in found["gpu"].can


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("worker", "says"),
    [
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"), "ended the process with status -11"),
        (answering("no json"), "status 0"),
        (answering('{"problem": "libcuda is missing"}'), "libcuda is missing"),
        (("/nowhere/python",), "no process can be started"),
    ],
)
def test_a_library_that_cannot_be_imported(
    worker: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorrt-rtx", "tensorrt"):
        status = statuses(monkeypatch, (), worker)[name]
        assert not status.usable
        assert says in status.missing
        assert "pip install" in status.install


def test_missing_packages_come_with_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_installed", lambda module: False)
    for name, status in statuses(monkeypatch, (), ("never",)).items():
        assert not status.usable
        assert name == "gpu" or "pip install" in status.install


def test_gpus_as_nvidia_smi_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 143771 MiB, 580.65'\necho noise\n")
    tool.chmod(0o755)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: str(tool))
    assert find_gpus() == (H200,)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert find_gpus() == ()
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    assert find_gpus() == ()
