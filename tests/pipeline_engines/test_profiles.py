"""Optimisation profiles from data and from words."""

from __future__ import annotations

import numpy as np
import pytest

from diag.errors import UsageError
from diag.feeds import open_feeds
from diag.model.graph import TensorInfo
from diag.pipeline.engine.profiles import measured_profiles, parse_profile, profiles_for

INPUTS = {
    "ids": TensorInfo(7, ("batch", "seq")),
    "a:b": TensorInfo(1, (1, 3, "h", None)),
    "fixed": TensorInfo(1, (2, 4)),
}


def test_given_shapes():
    assert parse_profile("ids:1x8/4x16/8x64", INPUTS) == ("ids", ((1, 8), (4, 16), (8, 64)))
    assert parse_profile("ids:4,16", INPUTS) == ("ids", ((4, 16),) * 3)
    assert parse_profile("a:b:1x3x8x8", INPUTS)[0] == "a:b"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ids", "cannot be read"),
        ("ids:", "cannot be read"),
        (":1x2", "names ''"),
        ("ids:1x-1", "cannot be read"),
        ("ids:1x2/3x4", "cannot be read"),
        ("ids:1x2/3x4/5x6/7x8", "cannot be read"),
        ("other:1x2", "no input of the model"),
        ("ids:1x2x3", "does not fit"),
        ("a:b:2x3x8x8", "does not fit the input, which is \\(1, 3, h, \\?\\)"),
        ("ids:2x2/1x2/4x2", "must rise"),
        ("ids:1x2/2x1/4x2", "must rise"),
    ],
)
def test_words_that_cannot_be(text, says):
    with pytest.raises(UsageError, match=says):
        parse_profile(text, INPUTS)


def test_from_data_with_what_is_given_on_top(tmp_path):
    for number, (rows, length) in enumerate([(4, 16), (8, 16), (8, 16), (2, 64)]):
        arrays = {"ids": np.zeros((rows, length), np.int64), "mask": np.zeros((rows, 1), np.float32)}
        np.savez(tmp_path / f"{number}.npz", **arrays)
    inputs = {"ids": INPUTS["ids"], "mask": TensorInfo(1, ("batch", 1))}
    feeds = open_feeds(str(tmp_path), inputs)
    assert measured_profiles(feeds)["ids"] == ((2, 16), (8, 16), (8, 64))
    found = profiles_for(inputs, ["mask:1x1/8x1/32x1"], feeds)
    assert found == {"ids": ((2, 16), (8, 16), (8, 64)), "mask": ((1, 1), (8, 1), (32, 1))}


def test_static_inputs_need_none_and_dynamic_ones_are_all_listed():
    assert profiles_for({"fixed": INPUTS["fixed"]}, ["fixed:2x4"], None) == {}
    with pytest.raises(UsageError) as caught:
        profiles_for(INPUTS, [], None)
    assert "ids (batch, seq), a:b (1, 3, h, ?)" in str(caught.value)
    assert "fixed" not in str(caught.value)
