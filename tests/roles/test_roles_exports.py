"""Roles on tiny transformers exported by torch, TorchScript and dynamo, eager and fused attention."""

from __future__ import annotations

import pytest

from diag.model.load import from_proto
from diag.roles import find_roles
from fixtures.graphs import exports, scrambled

LAYERS = {"bert": 18, "gpt2": 15, "llama": 21, "vit": 20}
"""Projections, attention products, softmaxes, heads and convolutions that each family has, in two blocks."""


@pytest.mark.export
@pytest.mark.parametrize("family", exports.FAMILIES)
@pytest.mark.parametrize("exporter", exports.EXPORTERS)
@pytest.mark.parametrize("attention", exports.ATTENTIONS)
def test_exported_layers_are_right(family, exporter, attention):
    path = exports.cached(family, exporter, attention)
    if path is None:
        pytest.skip(exports.missing())
    fixture = scrambled(exports.exported(path))
    found = find_roles(from_proto(fixture.model))
    assert len(fixture.truth) == LAYERS[family]
    assert {name: (found[name].name, found[name].block) for name in fixture.truth} == dict(fixture.truth)
