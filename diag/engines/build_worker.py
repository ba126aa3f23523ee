"""The child process in which engines are built: it may crash without taking the caller along.

`python -m diag.engines.build_worker` reads a request as JSON from its input, writes TensorRT's log to its
output and the outcome as JSON to the file named in the request. `--probe FLAVOUR` only says whether it can
build; `--inspect FLAVOUR ENGINE OUT` writes the inspector's JSON of an engine.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any, cast

from diag.engines import tensorrt
from diag.engines.weak import WeakTyping
from diag.errors import TrtdiagError


def request_from(values: dict[str, Any]) -> tensorrt.BuildRequest:
    """The request as it was before it became JSON, which knows no tuples."""
    profiles = {
        name: tuple(tuple(int(size) for size in shape) for shape in shapes)
        for name, shapes in values.pop("profiles").items()
    }
    flags = tuple(values.pop("flags"))
    weak = values.pop("weak", None)
    return tensorrt.BuildRequest(
        profiles=cast("dict[str, tuple[tensorrt.Shape, tensorrt.Shape, tensorrt.Shape]]", profiles),
        flags=flags,
        weak=WeakTyping(**{**weak, "formats": tuple(weak["formats"])}) if weak else None,
        **values,
    )


def main(arguments: list[str]) -> int:
    """Run one build, or one probe. The exit status is 0 when the outcome was written, whatever it says."""
    faulthandler.enable()  # a crash leaves the Python stack in the log
    if arguments[:1] == ["--probe"]:
        return _probe(cast("tensorrt.Flavour", arguments[1]))
    if arguments[:1] == ["--inspect"]:
        return _inspect(cast("tensorrt.Flavour", arguments[1]), arguments[2], Path(arguments[3]))
    values = json.load(sys.stdin)
    outcome_path = Path(values.pop("outcome_path"))
    outcome = tensorrt.build(request_from(values), _write)
    outcome_path.write_text(json.dumps(outcome.to_json()), encoding="utf-8")
    return 0


def _probe(flavour: tensorrt.Flavour) -> int:
    try:
        answer = tensorrt.try_here(flavour)
    except TrtdiagError as error:
        answer = {"problem": error.problem}
    _write(json.dumps(answer) + "\n")
    return 0


def _inspect(flavour: tensorrt.Flavour, engine: str, out: Path) -> int:
    answer = {"problem": "", "hint": ""}
    try:
        out.write_text(tensorrt.inspect_engine(engine, flavour, _write), encoding="utf-8")
    except TrtdiagError as error:
        answer = {"problem": error.problem, "hint": error.hint}
    _write(json.dumps(answer) + "\n")
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()  # a crash must not eat the last lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
