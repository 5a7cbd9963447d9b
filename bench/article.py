"""`dspark bench article`: the load-adaptive threshold on three lists of confidences.

No engine runs: what is compared is how much of each draft the rule of `runtime.schedule` verifies
at three loads, beside a threshold that stays at one half, and how much of it can be expected to
survive.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from runtime.schedule import load_threshold, threshold_lengths

CONFIDENCES = {
    "high": (0.95, 0.92, 0.88, 0.75, 0.60, 0.45),
    "medium": (0.70, 0.65, 0.55, 0.42, 0.30, 0.20),
    "low": (0.50, 0.40, 0.30, 0.25, 0.15, 0.10),
}
LOADS = (0.1, 0.5, 0.9)
FIXED_THRESHOLD = 0.5


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench article`."""
    parser = kinds.add_parser(
        "article",
        help="the load-adaptive threshold on three lists of confidences",
        description="Verified and expected accepted tokens at three loads and three confidences.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report here as JSON")
    parser.set_defaults(func=_article)


def article_results() -> list[dict[str, float | str]]:
    """One row for each list and load, and one for the threshold that ignores the load."""
    rows: list[dict[str, float | str]] = []
    for name, values in CONFIDENCES.items():
        confidence = np.array([values])
        survival = np.cumprod(confidence, axis=1)[0]
        thresholds = {f"load {load}": load_threshold(load) for load in LOADS}
        for rule, threshold in {**thresholds, "fixed": FIXED_THRESHOLD}.items():
            length = int(threshold_lengths(confidence, np.array([len(values)]), threshold)[0])
            rows.append(
                {
                    "confidences": name,
                    "rule": rule,
                    "threshold": round(threshold, 6),
                    "verified": length,
                    "expected_accepted": round(float(survival[:length].sum()), 4),
                }
            )
    return rows


def _article(args: argparse.Namespace) -> int:
    rows = article_results()
    columns = list(rows[0])
    print("  ".join(f"{column:>17}" for column in columns))
    for row in rows:
        print("  ".join(f"{row[column]:>17}" for column in columns))
    if args.json:
        args.json.write_text(json.dumps({"results": rows}, indent=2) + "\n")
    return 0
