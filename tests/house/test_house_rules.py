"""Rules of the house that no single room can keep: import direction, sizes, and what an import needs."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "diag").rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 400, 60

needs_linter = pytest.mark.skipif(
    importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed"
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys; from importlinter.cli import lint_imports_command as run; sys.exit(run())"
    command = [sys.executable, "-c", script, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@needs_linter
def test_imports_point_down() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "imports point down KEPT" in result.stdout


def contract() -> list[set[str]]:
    """The layers in pyproject.toml, highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return [set(layer.replace(" ", "").split("|")) for layer in layers]


def little_house(folder: Path, module: str, line: str) -> None:
    """A package with the same rooms and the same contract, and one import in one room."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(text[text.index("[tool.importlinter]") :], encoding="utf-8")
    for room in set().union(*contract()):
        (folder / "diag" / room).mkdir(parents=True)
        (folder / "diag" / room / "__init__.py").write_text("", encoding="utf-8")
    (folder / "diag" / "__init__.py").write_text("", encoding="utf-8")
    (folder / "diag" / module / "planted.py").write_text(f"{line}\n", encoding="utf-8")


@needs_linter
@pytest.mark.parametrize(
    ("module", "line", "kept"),
    [
        ("plan", "import diag.model", True),
        ("render", "import diag.report", True),
        ("numerics", "import diag.model", False),
        ("engines", "from diag import pipeline", False),
        ("model", "def late():\n    import diag.cli", False),
        ("plan", "import diag.typed", False),  # neighbours in one layer do not know each other
        ("errors", "import diag.resources", False),
    ],
)
def test_the_contract_breaks_when_it_should(module: str, line: str, kept: bool, tmp_path: Path) -> None:
    little_house(tmp_path, module, line)
    result = lint(tmp_path)
    assert ("imports point down KEPT" in result.stdout) is kept, result.stdout + result.stderr
    assert (result.returncode == 0) is kept


def test_the_contract_names_every_room() -> None:
    rooms = {p.stem for p in (ROOT / "diag").iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert set().union(*contract()) == rooms - {"__init__"}


def too_long(source: str) -> list[str]:
    """What exceeds the limits in one module's source."""
    found = ["file"] if len(source.splitlines()) > FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > FUNCTION_LINES:
                found.append(node.name)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    assert too_long(path.read_text(encoding="utf-8")) == []


def test_what_is_too_long_is_found() -> None:
    body = "    x = 1\n"
    assert too_long("def f():\n" + body * (FUNCTION_LINES - 1)) == []
    assert too_long("class A:\n  async def g(self):\n" + ("  " + body) * FUNCTION_LINES) == ["g"]
    assert too_long("x = 1\n" * FILE_LINES) == []
    assert too_long("x = 1\n" * (FILE_LINES + 1)) == ["file"]


OPTIONAL = ("tensorrt", "tensorrt_rtx", "torch", "transformers", "PIL", "skimage", "sklearn", "playwright")
"""What the extras install; nothing may need it to be imported."""

IMPORT_ALL = """
import importlib, pkgutil, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {optional!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import diag
names = [m.name for m in pkgutil.walk_packages(diag.__path__, "diag.")]
for name in names:
    importlib.import_module(name)
present = sorted(set(sys.modules) & set({optional!r}))
print(len(names), present)
"""


def test_every_module_imports_without_the_extras() -> None:
    script = IMPORT_ALL.format(optional=OPTIONAL)
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    count, present = result.stdout.split(maxsplit=1)
    assert present.strip() == "[]"
    packages = len(list((ROOT / "diag").rglob("__init__.py")))
    assert int(count) == len(MODULES) - 1  # all but the package itself
    assert int(count) > packages


def test_commands_start_without_scipy() -> None:
    """It takes as long to import as all the rest, and few commands compute with it."""
    script = "import sys, diag.cli.main; print('scipy' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_nothing_prints_outside_the_command_line() -> None:
    for path in MODULES:
        if (ROOT / "diag" / "cli") in path.parents:
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        printed = [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
        assert not printed, path


ONLY_IN = {
    "onnxruntime": {"diag/engines/onnxruntime.py"},
    "tensorrt": {"diag/engines/tensorrt.py"},
    "tensorrt_rtx": {"diag/engines/tensorrt.py"},
    "jinja2": {"diag/render/html.py"},
}


def importers(package: str) -> set[str]:
    """Modules that import a package, at the top or inside a function."""
    found = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.split(".")[0] == package for name in names):
                found.add(path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.parametrize("package", ONLY_IN)
def test_each_engine_and_the_templates_are_imported_in_one_module(package: str) -> None:
    assert importers(package) <= ONLY_IN[package]


def test_importers_are_found() -> None:
    assert importers("onnxruntime") == ONLY_IN["onnxruntime"]
    assert "diag/model/load.py" in importers("onnx")
