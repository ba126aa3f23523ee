"""The wheel: the package and its data, nothing else, and found wherever it is unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from diag.resources import data_dir

ROOT = Path(__file__).parents[2]
DATA = ("rules", "reports")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as an installer would build it, with the build backend of pyproject.toml."""
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    folder = tmp_path_factory.mktemp("dist")
    script = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("*.whl")
    return path


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def files(folder: Path) -> set[str]:
    """Files under a folder of the checkout, without what Python and editors leave behind."""
    found = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(folder).as_posix() for p in found if not p.name.startswith(".")}


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    names = contents(wheel)
    modules = {f"diag/{name}" for name in files(ROOT / "diag") if name.endswith(".py")}
    assert modules
    assert modules <= names


@pytest.mark.parametrize("data", DATA)
def test_the_wheel_carries_the_data(data: str, wheel: Path) -> None:
    carried = {n for n in contents(wheel) if n.startswith(f"diag/_data/{data}/")}
    assert carried == {f"diag/_data/{data}/{name}" for name in files(ROOT / data)}
    assert carried


def test_the_wheel_carries_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in contents(wheel)}
    assert "diag" in tops
    (metadata,) = tops - {"diag"}
    assert metadata.endswith(".dist-info")
    suffixes = {Path(n).suffix for n in contents(wheel) if n.startswith("diag/") and "/_data/" not in n}
    assert suffixes <= {".py", ".typed"}
    assert not any("test" in Path(n).name or "fixtures" in n for n in contents(wheel))


def test_the_wheel_installs_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [n for n in archive.namelist() if n.endswith("/entry_points.txt")]
        assert "trtdiag = diag.cli.main:main" in archive.read(entry).decode()
        (metadata,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
        assert "\nName: trtdiag\n" in archive.read(metadata).decode()


SCRIPT = """
import sys
from pathlib import Path
import diag
from diag.resources import data_dir
assert Path(diag.__file__).is_relative_to(sys.argv[1]), diag.__file__
for name in ("rules", "reports"):
    folder = data_dir(name)
    assert folder.is_relative_to(sys.argv[1]), folder
    assert any(folder.iterdir())
from diag.cli.main import run
from diag.roles.rules import __name__ as _
"""


def test_an_unpacked_wheel_finds_its_own_data(wheel: Path, tmp_path: Path) -> None:
    site = (tmp_path / "site").resolve()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(site)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("data", DATA)
def test_a_checkout_finds_its_data(data: str) -> None:
    assert data_dir(data) == ROOT / data


def test_data_that_is_nowhere_says_so() -> None:
    with pytest.raises(
        FileNotFoundError, match="trtdiag's data folder 'recipes' is missing: the installation"
    ):
        data_dir("recipes")
