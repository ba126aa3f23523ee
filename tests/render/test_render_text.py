"""The terminal summary: one screen, and safe to print."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from diag.render.text import cut, next_steps, plain, summary, worst_layers
from diag.report.schema import Report

FILES = ["out/report.json", "out/report.html"]


def test_fits_one_screen(sample: Report) -> None:
    lines = plain(sample, FILES).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100


def test_fits_one_screen_at_its_fullest(hostile: Report) -> None:
    assert hostile.gate is not None
    trust = hostile.run.reference
    assert trust is not None
    shaky = trust.model_copy(update={"trusted": False, "nonfinite_tensors": ["t" * 90] * 9})
    many = hostile.model_copy(
        update={
            "verdict": "word " * 200,
            "outputs": [o.model_copy(update={"name": "o" * 200}) for o in hostile.outputs] * 20,
            "births": hostile.births * 20,
            "layers": [layer.model_copy(update={"name": "/n" * 200}) for layer in hostile.layers],
            "run": hostile.run.model_copy(update={"random_data": True, "reference": shaky}),
            "gate": hostile.gate.model_copy(update={"checks": hostile.gate.checks * 9}),
        }
    )
    lines = plain(many, FILES).splitlines()
    assert len(lines) <= 31
    assert max(map(len, lines)) <= 100


def test_says_what_matters(sample: Report) -> None:
    text = plain(sample, FILES)
    assert text.startswith("FAIL  INT8 damages saliency")
    for part in ("saliency", "17.6", "/blocks.3/attn/pv/MatMul", "pv_matmul", "int8", "Begins:", *FILES):
        assert part in text
    assert "Next: trtdiag compare vit.onnx --plan plan.yaml" in text


def test_worst_layers_come_from_local_error(sample: Report) -> None:
    assert [layer.role for layer in worst_layers(sample)] == ["pv_matmul"] * 4 + ["qk_matmul"]


def test_worst_layers_fall_back_to_accumulated_error(sample: Report) -> None:
    layers = [layer.model_copy(update={"local": {}}) for layer in sample.layers]
    worst = worst_layers(sample.model_copy(update={"layers": layers}))
    assert worst[0].name == "/decoder/Log", "what is not finite comes first"
    assert all(layer.status == "compared" for layer in worst)


def test_control_characters_do_not_reach_the_terminal(sample: Report) -> None:
    name = "evil\x1b[2J\x07\u202e[bold red]x[/]"
    output = sample.outputs[0].model_copy(update={"name": name})
    text = plain(sample.model_copy(update={"outputs": [output], "verdict": name}))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[bold red]" in text, "markup in a name is text"


def test_colour_is_only_decoration(sample: Report) -> None:
    stream = StringIO()
    Console(file=stream, width=100, force_terminal=True, color_system="truecolor").print(summary(sample))
    assert "\x1b[" in stream.getvalue()
    assert "FAIL" in stream.getvalue()


def test_names_are_cut_in_the_middle() -> None:
    assert cut("short", 10) == "short"
    assert cut("/model/layers.3/attn/MatMul", 15) == "/mod…ttn/MatMul"


def test_next_steps_are_never_a_finding_that_is_not_responsible(sample: Report) -> None:
    innocent = [finding for finding in sample.findings if finding.responsible is False]
    steps = next_steps(sample.model_copy(update={"findings": innocent}), FILES)
    assert "logarithm" not in " ".join(steps)
    assert "pin /blocks.1/attn/pv/MatMul" in steps[0]


def test_next_steps_come_from_a_finding_that_was_not_yet_measured(sample: Report) -> None:
    finding = sample.findings[0].model_copy(update={"responsible": None, "severity": "warning"})
    steps = next_steps(sample.model_copy(update={"findings": [sample.findings[2], finding]}), FILES)
    assert steps[-1] == finding.mend.command


def test_bare_report(bare: Report) -> None:
    text = plain(bare)
    assert "No output was compared." in text
    assert "No layer could be compared." in text
