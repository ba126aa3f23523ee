"""What the tests of rendering share: the sample report, variations of it, and the hostile name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from make_sample import HOSTILE

from diag.report.io import read_report
from diag.report.schema import LayerInfo, Report


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: needs playwright and a chromium on the PATH (or CHROMIUM)")


@pytest.fixture(scope="session")
def sample() -> Report:
    return read_report(Path(__file__).parent / "sample_report.json")


@pytest.fixture
def bare(sample: Report) -> Report:
    """The smallest report: a model, a run, nothing else."""
    return Report(model=sample.model, run=sample.run.model_copy(update={"reference": None}))


@pytest.fixture
def with_layers(sample: Report) -> Callable[..., Report]:
    """The sample with other layers and without births."""

    def make(*layers: LayerInfo) -> Report:
        return sample.model_copy(update={"layers": list(layers), "births": []})

    return make


@pytest.fixture(scope="session")
def hostile(sample: Report) -> Report:
    """The sample with a hostile text in every free field that a model or a user can fill."""
    data = sample.model_dump(by_alias=True)
    first, birth, finding = data["layers"][0], data["births"][0], data["findings"][0]
    for part in (first, birth["victims"], finding["layers"]):
        key = 0 if isinstance(part, list) else "name"
        part[key] = HOSTILE
    first.update(role=HOSTILE, op_type=HOSTILE, format=HOSTILE, source=HOSTILE, reason=HOSTILE)
    birth.update(layer=HOSTILE, output=HOSTILE, metric=HOSTILE)
    finding.update(title=HOSTILE, kind=HOSTILE, evidence={HOSTILE: HOSTILE})
    finding["mend"] = {"text": HOSTILE, "pins": [{"target": HOSTILE, "format": HOSTILE}], "command": HOSTILE}
    data["verdict"] = data["model"]["path"] = data["run"]["command"] = data["run"]["data"] = HOSTILE
    data["outputs"][0].update(name=HOSTILE, layer=HOSTILE)
    data["outputs"][0]["metrics"][HOSTILE] = 1.0
    data["kernels"][0].update(name=HOSTILE, tactic=HOSTILE)
    data["run"]["flags"] = data["run"]["versions"] = {HOSTILE: HOSTILE}
    data["plan"]["pins"][0].update(target=HOSTILE, reason=HOSTILE)
    data["plan"]["groups"][0].update(kind=HOSTILE, layers=[HOSTILE])
    data["gate"]["checks"][0]["name"] = HOSTILE
    data["search"].update(target=HOSTILE, metric=HOSTILE, prices=HOSTILE, proof=HOSTILE, notes=[HOSTILE])
    data["search"]["points"][0]["label"] = HOSTILE
    return Report.model_validate(data)
