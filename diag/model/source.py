"""Where a node comes from in the user's own code, as PyTorch's exporters leave it on the node."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import PurePath

from onnx import NodeProto

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = re.compile(
    r"[/\\](site|dist)-packages[/\\]torch[/\\]|[/\\]torch[/\\]nn[/\\](modules[/\\]|functional\.py)"
)


@dataclass(frozen=True, slots=True)
class Source:
    """Module path (`model.layers.3.attn`), class name, and file and line of the call, where known."""

    module: str
    class_name: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{PurePath(self.file).name}:{self.line}" if self.file else ""
        return ", ".join(part for part in (self.module, place) if part)


def source_of(node: NodeProto) -> Source | None:
    """Source of a node from torch's metadata (`pkg.torch.onnx.*`), None when there is none.

    The keys are those that torch.onnx's dynamo exporter writes (torch 2.5 and later). The stack trace's
    last frame is the innermost; for a module of torch's own (nn.Linear) it lies in torch, and the line that
    called the module is the user's.
    """
    meta = {entry.key: entry.value for entry in node.metadata_props}
    scopes = _strings(meta.get("pkg.torch.onnx.name_scopes", ""))
    classes = _strings(meta.get("pkg.torch.onnx.class_hierarchy", ""))
    frames = _FRAME.findall(meta.get("pkg.torch.onnx.stack_trace", ""))
    # The last scope is the operator itself; the one before it is the module that called it.
    module = next((scope for scope in reversed(scopes[:-1]) if scope), "")
    if not module and not frames:
        return None
    users = [frame for frame in frames if not _TORCH.search(frame[0])]
    file, line = (users or frames or [("", "0")])[-1]
    class_name = classes[-2].rsplit(".", 1)[-1] if len(classes) > 1 else ""
    return Source(module, class_name, file, int(line))


def _strings(text: str) -> list[str]:
    """A Python list literal of strings; anything else counts as empty."""
    try:
        value = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(item) for item in value] if isinstance(value, list) else []
