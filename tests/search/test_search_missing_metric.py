"""A target on a metric that no output has is refused at once; it is not a target that even FP32 misses."""

import pytest
from search_tools import workplace

from diag.errors import UsageError
from diag.gate.threshold import parse_threshold
from diag.numerics.measured import TensorKind
from diag.pipeline.compare.kinds import require_metrics

KINDS = {
    "logits": TensorKind("logits"),
    "shares": TensorKind("classes"),
    "inner": TensorKind("probabilities"),
}
OUTPUTS = ["logits", "shares", "inner", "hidden"]


@pytest.mark.parametrize(
    "target", ["hidden:top1>=0.9", "inner:top1>=0.9", "hidden:kl<=0.1", "hidden:flips<=2", "inner:flips<=2"]
)
def test_refused(target):
    with pytest.raises(UsageError, match=f"no output has {target.split(':')[1].split('=')[0][:-1]}, which"):
        require_metrics([parse_threshold(target)], OUTPUTS, KINDS)


@pytest.mark.parametrize(
    "target",
    [
        "top1>=0.9",
        "logits:top1>=0.9",
        "shares:flips<=1",
        "inner:kl<=0.1",
        "hidden:cosine>=0.9",
        "sqnr_db>=20",
    ],
)
def test_let_through(target):
    require_metrics([parse_threshold(target)], OUTPUTS, KINDS)


def test_pin_says_so(tmp_path):
    with pytest.raises(UsageError) as caught:
        workplace(tmp_path, family="bert").pin(target="top1>=0.99")
    assert str(caught.value) == (
        "no output has top1, which 'top1>=0.99' asks for: it is measured of a head's logits and of a softmax "
        "at the end of the model. Choose a metric of values, such as cosine or sqnr_db."
    )
