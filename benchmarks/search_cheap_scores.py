"""How well the cheap scores of `diag.pipeline.search.cheap` order candidates, beside what is measured.

    python -m benchmarks.search_cheap_scores MODEL --data BATCHES --target "sqnr_db>=30" --out FOLDER
        [--format int8] [--calibration TABLE] [--limit BATCHES]

The truth is the damage of each candidate lowered alone, measured on the batches to choose on. For each score:
Spearman's correlation with the truth, and which share of the damage of the worst tenth of the candidates a
search has measured when its budget ends after a quarter of them. Priors by role are not in the product; they
are measured here. Trials are kept in FOLDER, so a broken run goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from unittest import mock

import numpy as np
from scipy.stats import spearmanr

from diag.engines.autograd import has_torch
from diag.engines.onnxruntime import own_process
from diag.gate.threshold import parse_threshold
from diag.pipeline.search.cheap import CheapScores, Scores, mean_ranks
from diag.pipeline.search.order import score
from diag.pipeline.search.settings import SearchSettings
from diag.pipeline.search.setup import Search, set_up
from diag.progress import Silent

PRIORS = {
    "ffn_down": 1.0,  # BERT: Bondarenko et al. 2021 (2109.12948); LLaMA: Yang et al. 2024 (2405.14428)
    "pv_matmul": 1.0,  # softmax outputs of vision transformers: Yuan et al. 2022 (PTQ4ViT)
}
"""Roles that papers find sensitive in INT8; all others count 0."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    args = _arguments(arguments)
    own_process()
    settings = SearchSettings(
        args.model,
        args.data,
        args.out,
        (parse_threshold(args.target),),
        format=args.format,
        calibration=args.calibration,
        limit=args.limit,
    )
    search = set_up(settings, Silent())
    plain, plain_s = _scored(search, torch=False)
    full, full_s = _scored(search, torch=has_torch())
    began = time.monotonic()
    truth = _truth(search, search.chosen)
    first = _truth(search, search.chosen[:1])
    print(
        f"{len(truth)} candidates, {len(search.chosen)} batches, measured in {time.monotonic() - began:.0f} s"
    )
    print(f"local errors and crest factors: {plain_s:.1f} s; with gradients: {full_s:.1f} s\n")
    print("| score | Spearman | damage of the worst tenth found in the first quarter |\n|---|---|---|")
    for name, scores in _table(search, plain, full, first).items():
        if scores:
            rho = spearmanr([scores[i] for i in truth], list(truth.values())).statistic
            print(f"| {name} | {rho:.3f} | {_found(scores, truth):.0%} |")
    return 0


def _table(search: Search, plain: CheapScores, full: CheapScores, first: Scores) -> dict[str, Scores]:
    roles = search.planned.roles
    prior = {c.id: PRIORS.get(roles[c.id].name, 0.0) for c in search.candidates}
    return {
        "local error": plain.local,
        "crest factor": plain.crest,
        "prior by role": prior,
        "local error and prior (mean of ranks)": mean_ranks([plain.local, prior]),
        "local error and crest factor: used without PyTorch": plain.combined,
        "predicted damage: used with PyTorch": full.gradient,
        "predicted damage and local error (mean of ranks)": (
            mean_ranks([full.gradient, full.local]) if full.gradient else {}
        ),
        "for comparison: measured on the first batch only": first,
    }


def _scored(search: Search, torch: bool) -> tuple[CheapScores, float]:
    began = time.monotonic()
    with mock.patch("diag.pipeline.search.cheap.has_torch", lambda: torch):
        return score(search, Silent()), time.monotonic() - began


def _truth(search: Search, batches: Sequence[int]) -> Scores:
    """Mean damage of each candidate lowered alone."""
    variants, target = search.variants, search.target
    return {
        c.id: float(np.mean([variants.damage(target, c.layers, b) for b in batches]))
        for c in search.candidates
    }


def _found(scores: Mapping[str, float], truth: Mapping[str, float]) -> float:
    """Share of the worst tenth's damage that the first quarter by `scores` holds."""
    worst = sorted(truth, key=lambda i: -truth[i])[: -(-len(truth) // 10)]
    first = set(sorted(truth, key=lambda i: -scores[i])[: -(-len(truth) // 4)])
    return sum(truth[i] for i in worst if i in first) / max(sum(truth[i] for i in worst), 1e-300)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.search_cheap_scores")
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--format", default="int8")
    parser.add_argument("--calibration")
    parser.add_argument("--limit", type=int)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
