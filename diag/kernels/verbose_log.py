"""Reads the `Layers:` block of a build log at VERBOSE level: the only kernel list where no GPU is."""

from __future__ import annotations

import re
from collections.abc import Iterable

from diag.errors import DataError
from diag.kernels.inspector import nodes_in
from diag.kernels.kernel import Kernel, Tensor, dtype_of

_START = re.compile(r"(?:^|\] )Layers:\s*$")
_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), "
    # A list is empty, or holds `{ Name: ..., Dimensions: [...] }` entries: only ` }]` ends it.
    r"Inputs: \[(?P<inputs>| .*? \})\], "
    r"(?:Constants: \[(?P<constants>| .*? \})\], )?"
    r"Outputs: \[(?P<outputs>| .*? \})\], "
    r"(?P<rest>.*?)(?:Metadata: (?P<metadata>.*))?$"
)
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), (?:Location: \w+, )?Dimensions: \[(?P<dims>[-\d,]*)\]"
    r"(?P<rest>.*?) \}(?=, \{ Name: |\s*$)"
)
_DATATYPE = re.compile(r"(?:^|, )(?:Format/)?Datatype: ([^,]*)")
_FORMAT = re.compile(r"(?:^|, )Format(?:/Datatype)?: (.*)$")
_TACTIC = re.compile(r"(?:^|, )TacticName: ([^,]*),")
_STREAM = re.compile(r"(?:^|, )StreamId: (\d+)")
_NORM_WARNING = re.compile(r"layernorm nodes in FP16", re.IGNORECASE)


def kernels_from_log(lines: Iterable[str], where: str) -> tuple[Kernel, ...]:
    """Kernels of the last engine in a log. Raises DataError, naming `where`, when the log lists none."""
    block = _last_block(lines)
    if block is None:
        raise DataError(f"{where} ends inside its list of layers", "The log is truncated; build again.")
    kernels: list[Kernel] = []
    for line in block:
        kernel = _kernel(line)
        if kernel is None:
            raise DataError(f"{where} has a layer line that cannot be read: {line[:80]!r}", "Build again.")
        kernels.append(kernel)
    if not kernels:
        raise DataError(
            f"{where} lists no layers",
            "The build needs log level VERBOSE and profiling_verbosity = DETAILED (trtexec: --verbose "
            "--profilingVerbosity=detailed).",
        )
    return tuple(kernels)


def _last_block(lines: Iterable[str]) -> list[str] | None:
    """The lines of the last `Layers:` block; None when the log ends before the block does."""
    block: list[str] = []
    inside = False
    for raw in lines:
        line = raw.rstrip("\r\n")
        if _START.search(line):
            inside = True
            block.clear()
        elif inside and line.startswith("Name: "):
            block.append(line)
        elif inside and not line.strip():
            inside = False  # the bindings come next
    return None if inside else block


def _kernel(line: str) -> Kernel | None:
    match = _LAYER.match(line)
    if match is None:
        return None
    tactic = _TACTIC.search(match["rest"])
    stream = _STREAM.search(match["rest"])
    return Kernel(
        name=match["name"],
        layer_type=match["type"].strip(),
        nodes=nodes_in(match["metadata"] or ""),
        inputs=(*_tensors(match["inputs"]), *_tensors(match["constants"] or "", constant=True)),
        outputs=_tensors(match["outputs"]),
        tactic=tactic[1].strip() if tactic else "",
        stream=int(stream[1]) if stream else 0,
    )


def _tensors(text: str, *, constant: bool = False) -> tuple[Tensor, ...]:
    return tuple(_tensor(match, constant) for match in _TENSOR.finditer(text))


def _tensor(match: re.Match[str], constant: bool) -> Tensor:
    datatype = _DATATYPE.search(match["rest"])
    layout = _FORMAT.search(match["rest"])
    return Tensor(
        name=match["name"],
        dims=tuple(int(d) for d in match["dims"].split(",") if d),
        dtype=dtype_of(datatype[1] if datatype else ""),
        format=layout[1].strip() if layout else "",
        constant=constant,
    )


def warns_of_fp16_norms(lines: Iterable[str]) -> bool:
    """Whether TensorRT's parser itself warned that a LayerNorm runs in FP16."""
    return any(_NORM_WARNING.search(line) for line in lines)
