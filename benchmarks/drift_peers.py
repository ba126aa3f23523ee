"""Drift of one column of values: does the verdict depend on how much data there is?

    python -m benchmarks.drift_peers --peer-python peers/bin/python

Calibration is normal with deviation 1; production has 1 (the same), 1.02 (costs INT8 nothing) and 2 (costs
over 20 dB), in 10^3 to 10^6 values. Evidently (its default, and its Kolmogorov-Smirnov test) and whylogs run
in an environment of their own (`pip install evidently 'whylogs[viz]' 'pandas<3'`), each in its defaults.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHECKOUT = Path(__file__).parents[1]
DEVIATIONS = (1.0, 1.02, 2.0)
SIZES = (1_000, 10_000, 100_000, 1_000_000)
CALIBRATION = 262_144
ROW = 250
"""Values of one request, for the tool that counts requests."""

Values = np.ndarray
Found = tuple[str, int]
"""The verdict, and the bytes that the tool keeps of production (0: it keeps the values)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every tool as a process of its own and print a Markdown table."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.drift_peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peers")
    parser.add_argument("--work", choices=TOOLS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        print(json.dumps(_work(TOOLS[args.work])))
        return 0
    print("| tool | deviation | " + " | ".join(f"{size:,}" for size in SIZES) + " | s at most | bytes kept |")
    print("|---|---|" + "---|" * (len(SIZES) + 2))
    for tool in TOOLS:
        python = sys.executable if tool == "trtdiag" else args.peer_python
        command = [python, "-W", "ignore", "-m", "benchmarks.drift_peers", "--work", tool]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {tool} | did not run: {done.stderr.strip().splitlines()[-1]} |")
            continue
        for row in json.loads(done.stdout.splitlines()[-1]):
            cells = [
                tool,
                row["deviation"],
                *row["verdicts"],
                f"{row['seconds']:.2f}",
                row["bytes"] or "values",
            ]
            print("| " + " | ".join(map(str, cells)) + " |")
    return 0


def _work(tool: Callable[[Values, Values], Found]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    calibration = rng.normal(0, 1, CALIBRATION).astype(np.float32)
    rows = []
    for deviation in DEVIATIONS:
        found, seconds = [], []
        for size in SIZES:
            production = rng.normal(0, deviation, size).astype(np.float32)
            begin = time.perf_counter()
            found.append(tool(calibration, production))
            seconds.append(time.perf_counter() - begin)
        verdicts = [verdict for verdict, _ in found]
        rows.append(
            {"deviation": deviation, "verdicts": verdicts, "seconds": max(seconds), "bytes": found[-1][1]}
        )
    return rows


def trtdiag(calibration: Values, production: Values) -> Found:
    from diag.drift.accumulate import count_batch, requests_of
    from diag.drift.compare import compare
    from diag.drift.rules import drift_rules
    from diag.drift.side import sides_of_stats
    from diag.drift.stats import Stats, Tensor, empty_stats
    from diag.drift.stats_file import stats_bytes

    def counted(values: Values, label: str) -> Stats:
        rows = values[: values.size // ROW * ROW].reshape(-1, ROW)
        return count_batch(like, {"x": rows}, requests_of({"x": rows}, label))

    tensor = Tensor("x", "activation", float(np.abs(calibration).max()), "table")
    like = empty_stats("0" * 64, None, (tensor,))
    seen = counted(production, "production")
    found = compare(sides_of_stats(counted(calibration, "calibration")), sides_of_stats(seen), drift_rules())
    return found.verdict.level, len(stats_bytes(seen))


def evidently(calibration: Values, production: Values, method: str | None = None) -> Found:
    import pandas as pd
    from evidently import Report
    from evidently.metrics import ValueDrift

    metric = ValueDrift(column="x") if method is None else ValueDrift(column="x", method=method)
    report = Report([metric], include_tests=True)
    run = report.run(pd.DataFrame({"x": production}), pd.DataFrame({"x": calibration}))
    return run.dict()["tests"][0]["status"].rpartition(".")[2].lower(), 0


def evidently_ks(calibration: Values, production: Values) -> Found:
    return evidently(calibration, production, "ks")


def whylogs(calibration: Values, production: Values) -> Found:
    import pandas as pd
    import whylogs as why
    from whylogs.viz.drift.column_drift_algorithms import calculate_drift_scores

    before, now = (why.log(pd.DataFrame({"x": values})).view() for values in (calibration, production))
    scores = calculate_drift_scores(target_view=now, reference_view=before, with_thresholds=True)
    return str(scores["x"]["drift_category"]).lower(), len(now.serialize())


TOOLS: dict[str, Callable[[Values, Values], Found]] = {
    "trtdiag": trtdiag,
    "evidently": evidently,
    "evidently-ks": evidently_ks,
    "whylogs": whylogs,
}

if __name__ == "__main__":
    sys.exit(main())
