"""Inlines a model's local functions, so that every layer is an operator of the main graph."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import FunctionProto, ModelProto, NodeProto, inliner

from diag.errors import ModelError

_Key = tuple[str, str, str]


def inline_functions(proto: ModelProto) -> ModelProto:
    """The model without local functions; what an exporter wrote on a call stays with the nodes it becomes.

    Changes `proto`. Raises ModelError when a function cannot be inlined.
    """
    if not proto.functions:
        return proto
    try:
        known = {_key(function, function.name): function for function in proto.functions}
        own: list[FunctionProto] = []
        for function in proto.functions:
            _give_metadata(function.node, known, own)
        _give_metadata(proto.graph.node, known, own)
        proto.functions.extend(own)
        return inliner.inline_local_functions(proto)
    except Exception as error:
        raise ModelError(f"the model's local functions cannot be inlined: {error}") from error


def _give_metadata(
    nodes: Iterable[NodeProto], known: dict[_Key, FunctionProto], own: list[FunctionProto]
) -> None:
    """Let every call with metadata call a function of its `own`, whose nodes carry that metadata."""
    for node in nodes:
        called = known.get(_key(node, node.op_type))
        if called is None or not node.metadata_props:
            continue
        copy = FunctionProto()
        copy.CopyFrom(called)
        copy.name = node.op_type = f"{called.name}@{len(own)}"
        own.append(copy)
        for inner in copy.node:
            if not inner.metadata_props:
                inner.metadata_props.extend(node.metadata_props)
        _give_metadata(copy.node, known, own)


def _key(caller: NodeProto | FunctionProto, name: str) -> _Key:
    return caller.domain, name, getattr(caller, "overload", "")
