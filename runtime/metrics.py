"""Counters and gauges of the running decoder, in plain numbers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict


class Metrics:
    """Counts since start, by metric name; times in seconds.

    Draft positions are counted from 1: `verified_tokens{position}` and `accepted_tokens{position}`
    relate to what was verified, so that trimming does not look like rejection.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.verified_at: Counter[int] = Counter()
        self.accepted_at: Counter[int] = Counter()
        self._lap_s = time.perf_counter()

    def start_step(self) -> None:
        """Begin the time split of a step."""
        self.counts["steps"] += 1
        self._lap_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Book the time since the previous lap under `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._lap_s
        self._lap_s = now

    def count_round(self, num_verified: int, num_accepted: int) -> None:
        """Book one sequence's decoding round; only draft tokens kept in its output count."""
        self.counts["rounds"] += 1
        self.counts["verified_draft_tokens"] += num_verified
        self.counts["accepted_draft_tokens"] += num_accepted
        for position in range(1, num_verified + 1):
            self.verified_at[position] += 1
        for position in range(1, num_accepted + 1):
            self.accepted_at[position] += 1
