"""Roles on tiny transformers exported by torch, TorchScript and dynamo, eager and fused attention."""

from __future__ import annotations

import pytest

from diag.model.load import from_proto
from diag.roles import find_roles
from fixtures.graphs import exports, scrambled

LAYERS = {"bert": 18, "gpt2": 15, "llama": 21, "vit": 20, "conformer": 32, "resnet": 11}
"""Contractions and softmaxes that each family has, by the architecture's own count, in two blocks.

ResNet: a stem, two convolutions in each of four layers, one shortcut, one classifier. Conformer: in each
block eight for attention (relative positions are rotary), four for two FFNs and three convolutions; two
convolutions and a projection in front, a head behind.
"""


@pytest.mark.export
@pytest.mark.parametrize(("family", "exporter", "attention"), exports.VARIANTS)
def test_exported_layers_are_right(family, exporter, attention):
    path = exports.cached(family, exporter, attention)
    if path is None:
        pytest.skip(exports.missing())
    fixture = scrambled(exports.exported(path))
    found = find_roles(from_proto(fixture.model))
    one_operator = 4 if attention == "operator" else 0  # two products less in each of two blocks
    assert len(fixture.truth) == LAYERS[family] - one_operator
    assert {name: (found[name].name, found[name].block) for name in fixture.truth} == dict(fixture.truth)
