"""Counters and gauges of the running decoder, in plain numbers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from typing import NamedTuple, get_args

from runtime.request import FinishReason

# What is observed once per answered request: buckets by name, and what it says.
_SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKENS = tuple(float(2**n) for n in range(0, 16, 1))


class Histogram(NamedTuple):
    """Upper bounds of the buckets and a sentence on what is observed."""

    buckets: tuple[float, ...]
    help: str


HISTOGRAMS = {
    "request_prompt_tokens": Histogram(_TOKENS, "prompt tokens of a request"),
    "request_output_tokens": Histogram(_TOKENS, "generated tokens of a request"),
    "request_queue_seconds": Histogram(_SHORT_S, "from arrival to first computation"),
    "time_to_first_token_seconds": Histogram(_SHORT_S, "from arrival to first token"),
    "inter_token_seconds": Histogram(
        (0.001, 0.0025, *_SHORT_S[:9]), "mean time between tokens of a request"
    ),
    "request_seconds": Histogram((*_SHORT_S[4:], 60.0, 120.0, 300.0), "from arrival to last token"),
    "accepted_length": Histogram(
        tuple(1 + n / 2 for n in range(15)), "mean tokens per decoding round of a request"
    ),
}

# Counted from 0 on: a rate over a counter that first appears at 1 misses what made it appear.
COUNTED = (
    *(f"finished_{reason}" for reason in get_args(FinishReason)),
    "requests",
    "prompt_tokens",
    "output_tokens",
    "steps",
    "rounds",
    "drafted_tokens",
    "verified_draft_tokens",
    "accepted_draft_tokens",
    "preemptions",
    "prefix_cache_queried_tokens",
    "prefix_cache_hit_tokens",
)


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
        # Taken out by the exporter's thread; without one the oldest are lost.
        self.observations: deque[tuple[str, float]] = deque(maxlen=1 << 14)
        self.counts.update(dict.fromkeys(COUNTED, 0))
        self.predicted_decoding_s = 0.0  # by the cost table,
        self.measured_decoding_s = 0.0  # and by the clock, of the same steps
        self._start_s = self._lap_s = time.perf_counter()

    def start_step(self) -> None:
        """Begin the time split of a step."""
        self.counts["steps"] += 1
        self._start_s = self._lap_s = time.perf_counter()

    @property
    def step_s(self) -> float:
        """Seconds from the step's start to its last lap."""
        return self._lap_s - self._start_s

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

    def observe_request(
        self, stats: dict[str, float], num_prompt_tokens: int, num_output_tokens: int
    ) -> None:
        """Book an answered request by the statistics of its last output."""
        first_s, total_s = stats["time_to_first_token_s"], stats["total_time_s"]
        values = {
            "request_prompt_tokens": num_prompt_tokens,
            "request_output_tokens": num_output_tokens,
            "request_queue_seconds": stats["time_in_queue_s"],
            "time_to_first_token_seconds": first_s,
            "request_seconds": total_s,
        }
        if num_output_tokens > 1:
            values["inter_token_seconds"] = (total_s - first_s) / (num_output_tokens - 1)
        if rounds := stats["num_rounds"]:
            values["accepted_length"] = 1 + stats["num_accepted_draft_tokens"] / rounds
        self.observations.extend((name, float(value)) for name, value in values.items())
