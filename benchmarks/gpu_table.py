"""The GPU suite's results as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Found = Mapping[str, Any]

_HEAD = (
    "| engine | build | kernels (reformats) | latency, median (95 %) | format error | engine error "
    "| engine against emulation | verdict |",
    "|---|---:|---:|---:|---|---|---|---|",
)


def markdown(found: Found) -> str:
    """One table for each model, and under it what its other parts found."""
    machine = found["machine"]
    what = "Rehearsal without TensorRT: nothing here was measured on a GPU." if machine["rehearsal"] else ""
    lines = ["# GPU suite", "", *([what, ""] if what else []), *_machine(machine)]
    for name, parts in found["models"].items():
        lines += ["", f"## {name}", "", *_HEAD]
        lines += [_row(part, parts[part]) for part in parts if "outputs" in parts[part]]
        lines += ["", *_rest(parts)]
    return "\n".join(lines).rstrip() + "\n"


def _machine(machine: Found) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    options = ", ".join(f"{name} {value}" for name, value in machine["options"].items())
    yield f"{machine['date']}; {'; '.join(machine['gpus']) or 'no GPU'}; {machine['cores']} cores."
    yield f"{versions}; {options}."


def _row(name: str, part: Found) -> str:
    output = _worst(part["outputs"])
    errors, latency = part["outputs"][output], part["latency"]
    cells = [
        f"{name} ({part['pins']} pins)" if "pins" in part else name,
        f"{part['build_s']:.1f} s",
        f"{part['kernels']} ({part['reformats']})",
        f"{latency['median_ms']:.3f} ms ({latency['low_ms']:.3f} to {latency['high_ms']:.3f})",
        _error(errors["format"]),
        _error(errors["engine"]),
        f"{_error(errors['engine_vs_emulation'])}; cosines to the reference differ by {_fidelity(errors)}",
        f"{part['verdicts'][output]['kind']}",
    ]
    return "| " + " | ".join(cells) + " |"


def _worst(outputs: Found) -> str:
    return min(outputs, key=lambda name: _number(outputs[name]["engine"]["sqnr_db"]))


def _fidelity(errors: Found) -> str:
    """How far the emulation foretells the engine: cosines are compared, since single codes flip."""
    return f"{abs(_number(errors['format']['cosine']) - _number(errors['engine']['cosine'])):.1e}"


def _error(metrics: Found) -> str:
    text = f"cos {_number(metrics['cosine']):.6f}, {_number(metrics['sqnr_db']):.1f} dB"
    if "top1" in metrics:
        text += f", top-1 {_number(metrics['top1']):.4f}, KL {_number(metrics['kl']):.3g}"
    lost = _number(metrics.get("nonfinite", 0))
    return text + (f", {lost:.0f} not finite" if lost else "")


def _number(value: Any) -> float:
    """JSON's words for NaN and infinity are read as the numbers that they are."""
    return float(value)


def _rest(parts: Found) -> Iterator[str]:
    for name, part in parts.items():
        if part["status"] != "done":
            yield f"- {name}: {part['status']}: {part.get('reason', '')}"
            continue
        for line in _notes(name, part):
            yield f"- {name}: {line}"


def _notes(name: str, part: Found) -> Iterator[str]:
    if name == "overhead":
        yield (
            f"bare {part['bare_ms']:.3f} ms between events, {part['started_and_awaited_ms']:.3f} ms by the "
            f"process's clock, with its arrays moved {part['with_transfers_ms']:.3f} ms, "
            f"compared with a reference {part['compared_ms']:.3f} ms: {part['times_bare']:.2f} times bare, "
            f"{part['times_with_transfers']:.2f} times a run with transfers; with reference and emulation "
            f"{part['compared_twice_ms']:.3f} ms, {part['twice_times_bare']:.2f} times bare"
        )
    if name == "observer":
        for way in ("rebuilt", "marked"):
            other = part[way]
            gaps = ", ".join(f"{output} {_number(gap):.3g}" for output, gap in other["rel_l2"].items())
            yield (
                f"{way}: {other['kernels']} kernels ({part['shipped_kernels']} shipped), "
                f"{other['latency']['median_ms']:.3f} ms, relative L2 to the shipped: {gaps}"
            )
    if name == "weak":
        gaps = ", ".join(f"{output} {_number(gap):.3g}" for output, gap in part["rel_l2"].items())
        yield (
            f"{part['int8_kernels']} of {part['kernels']} kernels touch INT8, built in "
            f"{part['build_s']:.1f} s, {part['latency_ms']:.3f} ms, relative L2 to the reference: {gaps}"
        )
    for verdict in (part.get("verdicts") or {}).values():
        yield verdict["text"]
    yield from (
        text for text in part.get("self_checks", ()) if "agrees" not in text and "not run" not in text
    )
    yield from part.get("audit", ())
    yield from part.get("findings", ())
