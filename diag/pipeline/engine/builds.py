"""Builds for a search: a plan built and run, what its engine points at, and the one that ships in the end."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from diag.engines.debug_tensors import can_observe
from diag.engines.gpu import find_gpus
from diag.engines.onnxruntime import Array
from diag.engines.runner import Feed, TensorRtRunner
from diag.engines.stamp import Identity, check_stamp, read_stamp, write_stamp
from diag.engines.tensorrt import load
from diag.errors import DataError, EngineError
from diag.files import output_folder
from diag.kernels.kernel import Kernel
from diag.kernels.known import Build, match_known_issues
from diag.kernels.read import INSPECTOR_SUFFIX, LOG_SUFFIX, read_kernels
from diag.model.save import save_model
from diag.pipeline.engine.departures import departures, emulated_errors
from diag.pipeline.engine.layers import observed_layers
from diag.pipeline.engine.stage import (
    ENGINE_FILE,
    TYPED_FILE,
    Subject,
    built_engine,
    require_engine,
    runs_here,
)
from diag.pipeline.prepare import Planned
from diag.pipeline.settings import EngineSettings
from diag.search.builds import Pointed

FOLDER = ".builds"
"""Of the engines of a search that is under way, in its folder."""


class Runs(Protocol):
    """A built plan that can be run."""

    def run(self, feed: Feed) -> Mapping[str, Array]: ...


class Builds(Protocol):
    """What builds the plans of a search and runs them."""

    @property
    def name(self) -> str:
        """As the user calls it."""

    @property
    def identity(self) -> str:
        """Version, GPU and options: what a measurement holds for, beside its plan and data."""

    @property
    def runs(self) -> bool:
        """Whether engines can be run here; else they are only built and read."""

    def open(self, subject: Subject, identity: Identity) -> AbstractContextManager[Runs]:
        """Build a plan, and have it ready to run. Raises EngineError."""

    def suspects(self, subject: Subject, identity: Identity, among: Collection[str]) -> Pointed:
        """Layers of `among` that the engine of an earlier build points at, the likeliest first."""

    def drop(self, out: Path, identity: Identity) -> None:
        """The engine of this plan is not wanted any more; what is known of it may stay."""

    def kept(self, out: Path, identity: Identity) -> str:
        """For `EngineSettings.engine`: this plan's engine where it is built already, else who builds it."""

    def finish(self, out: Path, identity: Identity) -> None:
        """This plan ships: nothing of the others stays."""


@dataclass(frozen=True)
class EngineBuilds:
    """TensorRT or TensorRT-RTX on this machine. Raises EngineError where it cannot work here."""

    settings: EngineSettings

    def __post_init__(self) -> None:
        require_engine(self.settings.engine)

    @property
    def name(self) -> str:
        return self.settings.engine

    @property
    def identity(self) -> str:
        trt = load("tensorrt" if self.name == "tensorrt" else "tensorrt-rtx")
        gpus = [gpu.name for gpu in find_gpus()[:1]]
        return "\n".join([self.name, str(trt.__version__), *gpus, repr(replace(self.settings, timeout_s=0))])

    @property
    def runs(self) -> bool:
        return self.name == "tensorrt" or runs_here(self.settings)

    def build(self, subject: Subject, identity: Identity) -> Path:
        """Write the typed model and build it. Raises EngineError."""
        output_folder(subject.out / FOLDER)
        save_model(subject.typed.for_engines, subject.typed.weights, subject.out / TYPED_FILE)
        name = _path(subject.out, identity).relative_to(subject.out)
        return built_engine(subject, self.settings, identity, str(name)).path

    @contextmanager
    def open(self, subject: Subject, identity: Identity) -> Iterator[Runs]:
        with TensorRtRunner(self.build(subject, identity)) as runner:
            yield runner

    def suspects(self, subject: Subject, identity: Identity, among: Collection[str]) -> Pointed:
        path = _path(subject.out, identity)
        known: tuple[str, ...] = ()
        with suppress(DataError, EngineError):
            stamp = read_stamp(path)
            if stamp.flavour == "tensorrt":
                build = Build(stamp.version, stamp.compute_capability, _kernels(path))
                known = pointed_at(build, subject.planned)
            if can_observe(stamp.flavour, stamp.version):
                return self._listened(subject, identity, among, known)
        return Pointed(known)

    def _listened(
        self, subject: Subject, identity: Identity, among: Collection[str], known: tuple[str, ...]
    ) -> Pointed:
        """With where the engine leaves the emulation; a build that fails costs only this answer."""
        found: tuple[str, ...] = ()
        with suppress(EngineError):
            found = self._departures(subject, identity, among)
        return Pointed((*known, *found), builds=1)

    def _departures(self, subject: Subject, identity: Identity, among: Collection[str]) -> tuple[str, ...]:
        """By one more build, whose tensors between kernels are listened to on one batch."""
        name = f"{FOLDER}/{_path(subject.out, identity).stem}-observed.engine"
        listening = built_engine(subject, self.settings, identity, name, marks="unfused")
        model, feed = subject.planned.model, subject.feeds.first()
        seen = observed_layers(listening.path, model, [feed])
        engine = {name: metrics["rel_l2"] for name, metrics in seen.items()}
        return departures(model, among, engine, emulated_errors(model, subject.typed.model, engine, feed))

    def drop(self, out: Path, identity: Identity) -> None:
        _path(out, identity).unlink(missing_ok=True)

    def kept(self, out: Path, identity: Identity) -> str:
        for path in (_path(out, identity), out / ENGINE_FILE):
            with suppress(EngineError):
                check_stamp(path, identity)
                return str(path)
        return self.name

    def finish(self, out: Path, identity: Identity) -> None:
        engine, final = _path(out, identity), out / ENGINE_FILE
        if engine.is_file():
            stamp = read_stamp(engine)
            for file in sorted(engine.parent.glob(f"{engine.name}*")):
                file.replace(final.with_name(final.name + file.name.removeprefix(engine.name)))
            write_stamp(final, replace(stamp, log=final.name + LOG_SUFFIX))
        shutil.rmtree(out / FOLDER, ignore_errors=True)


def _path(out: Path, identity: Identity) -> Path:
    return out / FOLDER / f"{identity.plan_sha256[:16]}.engine"


def _kernels(engine: Path) -> tuple[Kernel, ...]:
    """What was read back from an engine, which itself may be gone."""
    beside = [engine.with_name(engine.name + suffix) for suffix in (INSPECTOR_SUFFIX, LOG_SUFFIX)]
    return next((read_kernels(file) for file in beside if file.is_file()), ())


def pointed_at(build: Build, planned: Planned) -> tuple[str, ...]:
    """Layers that known issues of this engine name: those that cure one, else those that it was found in."""
    layers: list[str] = []
    for match in match_known_issues(build, planned.model):
        cures = match.issue.cured_by_roles
        if cures:
            layers += [layer for layer, role in planned.roles.items() if role.name in cures]
            continue
        layers += match.layers
        if match.issue.pattern.kernel:
            wanted = re.compile(match.issue.pattern.kernel)
            fitting = [k for k in build.kernels if wanted.search(f"{k.name} {k.tactic}")]
            layers += [node for kernel in fitting for node in kernel.nodes]
    return tuple(dict.fromkeys(layers))
