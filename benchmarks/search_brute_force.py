"""`trtdiag rank` and `pin` beside brute force and a peer, in INT8, on the same batches.

    python -m benchmarks.search_brute_force MODEL --calibration TABLE --data BATCHES [--nncf PYTHON]
        [--target "kl<=0.3"] [--limit 8] [--switch]

Brute force rebuilds the model for every candidate, alone in INT8 and alone out of it, and runs every batch;
its pin set is the shortest prefix of its ranking that meets the target on all batches, thinned one by one.
Without `--target`: MiniLM's sentence embedding to a cosine of 0.99. `--switch`: brute force switches layers
instead of rebuilding, which saves hours on a large model; its passes are counted as whole ones all the same.
`--nncf PYTHON` names an interpreter with nncf in it, whose accuracy control then works on the same task.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import spearmanr

from diag.engines.onnxruntime import own_process
from diag.gate.threshold import parse_threshold
from diag.model.graph import Model
from diag.pipeline.prepare import read_scales
from diag.pipeline.search.job import pin_layers
from diag.pipeline.search.settings import SearchSettings
from diag.pipeline.search.setup import Search, set_up
from diag.plan.schema import Plan, pin_for
from diag.progress import Silent
from diag.search.pins import thinned
from diag.search.rank import rank

TARGET = "sentence_embedding:cosine>=0.99"


@dataclass
class Brute:
    """Brute force on the batches of a search, counting whole forward passes."""

    search: Search
    switch: bool
    passes: int = 0

    def damage(self, low: frozenset[str]) -> float:
        """Damage on all batches with these layers in INT8."""
        batches = range(self.search.batches)
        self.passes += len(batches)
        variants = self.search.variants
        metrics = (
            variants.metrics(low, batches)
            if self.switch
            else variants.plan_metrics(self.rebuilt(low), batches)
        )
        return self.search.target.damage(metrics)

    def rebuilt(self, low: frozenset[str]) -> Model:
        """The model with these layers in INT8 and all others in FP32."""
        formats = self.search.planned.resolved.formats
        high = [n for n, fmt in formats.items() if fmt == "int8" and n not in low]
        plan = Plan.model_validate(
            {
                "schema": "trtdiag.plan/1",
                "default": "int8",
                "pins": [pin_for(n, "fp32").model_dump() for n in high],
            }
        )
        planned = self.search.planned.with_plan(plan)
        typed = planned.apply(read_scales(planned, self.search.table))
        return typed.model


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and the targets; exit 1 when a target is missed."""
    args = _arguments(arguments)
    own_process()
    with tempfile.TemporaryDirectory() as folder:
        ranked = _ranked(args, folder)
        ours, seconds = _ours(args, folder)
        brute = _brute(args, folder)
    by_us = {e.candidate.id: e.lowered_mean for e in ours.ranking.effects}
    names = list(by_us)
    rho = float(spearmanr([by_us[n] for n in names], [brute["lowered"][n] for n in names]).statistic)
    rows = [
        ("trtdiag rank", *ranked, "-"),
        ("brute force, ranking", *brute["ranked"], "-"),
        ("trtdiag pin, with proof and rivals", ours.forward_equivalents, seconds, len(ours.search.pins)),
        ("brute force, ranking and choosing", *brute["whole"], len(brute["pins"])),
    ]
    print("| | forward passes | seconds | pins |\n|---|---|---|---|")
    for name, passes, spent, pins in rows:
        print(f"| {name} | {passes:.0f} | {spent:.1f} | {pins} |")
    if args.nncf:
        print(_nncf(args))
    ratio = brute["ranked"][0] / ranked[0]
    whole = brute["whole"][0] / ours.forward_equivalents
    print(f"brute force over ours, the whole search: {whole:.1f} times the forward passes")
    apart = abs(len(brute["pins"]) - len(ours.search.pins))
    checks = [
        (f"brute force over ours, forward passes to rank: {ratio:.1f} (target 10)", ratio >= 10),
        (f"Spearman with brute force: {rho:.3f} (target 0.95)", rho >= 0.95),
        (f"pins apart from brute force: {apart} (target 1)", apart <= 1),
        (f"target met on the batches held out: {ours.met}", ours.met),
    ]
    for text, passed in checks:
        print(f"{'ok  ' if passed else 'MISS'} {text}")
    return int(not all(passed for _, passed in checks))


def _ranked(args: argparse.Namespace, folder: str) -> tuple[float, float]:
    """Forward passes and seconds of our ranking alone, setting up included."""
    began = time.monotonic()
    search = set_up(_settings(args, f"{folder}/ranked"), Silent())

    def damage(low: frozenset[str], batch: int) -> float:
        return search.variants.damage(search.target, low, batch)

    rank(search.candidates, damage, search.chosen, Silent())
    return search.variants.forward_equivalents, time.monotonic() - began


def _ours(args: argparse.Namespace, folder: str):  # type: ignore[no-untyped-def]
    began = time.monotonic()
    return pin_layers(_settings(args, f"{folder}/ours"), Silent()), time.monotonic() - began


def _settings(args: argparse.Namespace, out: str) -> SearchSettings:
    return SearchSettings(
        args.model,
        args.data,
        out,
        (parse_threshold(args.target),),
        format="int8",
        calibration=args.calibration,
        limit=args.limit,
    )


def _brute(args: argparse.Namespace, folder: str) -> dict:  # type: ignore[type-arg]
    search = set_up(_settings(args, f"{folder}/brute"), Silent())
    brute, began = Brute(search, args.switch), time.monotonic()
    everything = search.low()
    lowered = {c.id: brute.damage(c.layers) for c in search.candidates}
    for candidate in search.candidates:
        brute.damage(everything - candidate.layers)
    ranked = brute.passes, time.monotonic() - began
    order = sorted(lowered, key=lambda n: -lowered[n])

    def meets(ids: frozenset[str]) -> bool:
        return brute.damage(search.low(ids)) <= 1.0

    length = next(n for n in range(len(order) + 1) if meets(frozenset(order[:n])))
    pins = thinned(frozenset(order[:length]), order, meets)
    whole = brute.passes, time.monotonic() - began
    return {"lowered": lowered, "ranked": ranked, "whole": whole, "pins": sorted(pins)}


def _nncf(args: argparse.Namespace) -> str:
    script = Path(__file__).with_name("search_peer_nncf.py")
    done = subprocess.run(
        [args.nncf, str(script), args.model, args.nncf_calibration or args.data, args.data, str(args.limit)],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode != 0:
        return f"| NNCF accuracy control | failed: {done.stderr.strip().splitlines()[-1][:200]} | | |"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    passes = f"{found['validations'] * args.limit} ({found['validations']} validations)"
    return (
        f"| NNCF {found['version']} accuracy control, cosine {found['cosine']:.4f} | {passes} | "
        f"{found['seconds']:.1f} | {found['reverted']} of {found['operations']} operations reverted |"
    )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.search_brute_force")
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--switch", action="store_true")
    parser.add_argument("--nncf", help="interpreter with nncf")
    parser.add_argument("--nncf-calibration", help="batches that NNCF calibrates on")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
