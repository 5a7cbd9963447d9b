"""The scheduler: which requests are drafted for in a step, and how much of each draft is verified.

It keeps what the pure rules of `runtime.schedule` need from step to step. All of it is of the past
when a draft is made, so no decision about a token depends on its value.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.calibration import Calibration, sigmoid
from runtime.config import ConfigError, RuntimeConfig
from runtime.cost import CostTable
from runtime.load import LoadGauge
from runtime.metrics import Metrics
from runtime.schedule import (
    THRESHOLD_BASE,
    Outlook,
    Policy,
    expect_throughput,
    fixed_lengths,
    lagged_lengths,
    load_threshold,
    parse_policy,
    threshold_lengths,
    throughput_lengths,
)
from runtime.spec import DrafterDims

AUTO = "auto"
RECENT_ROUNDS = 128  # whose survivals say what to expect of drafting
REFRESH_ROUNDS = 8  # new ones before the expectation is worked out again
PROBE_STEPS = 64  # plain steps between looks at one request's draft
PROBE_WEIGHT = 8  # rounds that such a look counts for, or the last ones would be of long ago
CATCH_UP_STEPS = 32  # over which the drafter's arrears of context are spread when drafting resumes


class Tables(NamedTuple):
    """What `dspark profile` and `dspark calibrate` measured of this pair on this machine."""

    cost: CostTable
    calibration: Calibration


def available_policies(drafter: DrafterDims | None, tables: Tables | None) -> tuple[str, ...]:
    """Names of the policies that this model can run under, by what it has."""
    if drafter is None:
        return ("off",)
    names = ["off", "fixed"]
    if drafter.has_confidence:
        names.append("threshold")
        if tables is not None:
            names += ["throughput", "lagged"]
    return tuple(names)


def resolve_policy(text: str, drafter: DrafterDims | None, tables: Tables | None) -> Policy:
    """The server's policy from its option; `auto` is the best that the model has all for.

    Without a drafter there is nothing to schedule: always `off`. Raises ConfigError for an unknown
    policy, or one that lacks something here.
    """
    available = available_policies(drafter, tables)
    if text == AUTO:
        return Policy("throughput" if "throughput" in available else available[:2][-1])
    if drafter is None:
        return Policy("off")
    policy = parse_policy(text, drafter.block_size)
    if policy.name not in available:
        lacks = "a cost table and a calibration: run `dspark profile` and `dspark calibrate`"
        if not drafter.has_confidence:
            lacks = "a drafter with a confidence head"
        raise ConfigError(f"policy {policy.name} needs {lacks}")
    return policy


class Scheduled(Protocol):
    """What the scheduler knows of a sequence."""

    request: Any  # its `greedy` and `policy`
    num_computed: int
    survivals: deque[NDArray[np.float64]]  # [g] of its last two rounds, older first

    @property
    def speculates(self) -> bool:
        """Whether the request lets the drafter work for it."""

    @property
    def num_pending(self) -> int:
        """Computed tokens that the drafter does not have in its context yet."""


S = TypeVar("S", bound=Scheduled)


class Scheduler(Generic[S]):
    """Decides for one loop, step by step: `plan`, then `lengths`, then `end_step`."""

    def __init__(
        self,
        default: Policy,
        config: RuntimeConfig,
        metrics: Metrics,
        tables: Tables | None,
        gauge: LoadGauge,
    ) -> None:
        """Start with the calibration's rounds as what to expect.

        Args:
            default: of requests that name no policy.
            config: its minimum gain.
            metrics: told why drafting stops.
            tables: required for policies that need them.
            gauge: the load, for `threshold`.
        """
        self.default = default
        self.gauge = gauge
        self.drafting = True  # as last decided for requests under a policy that may stop it
        self._wanted = config.policy
        self._min_gain = config.min_gain
        self._metrics = metrics
        self._tables = tables
        self._num_decoding = 0
        self._mean_context = 0.0
        self._held_back: set[S] = set()
        self._plain_steps = 0
        self._outlooks: dict[tuple[int, int, int], Outlook] = {}
        self._new_rounds = 0
        if tables is not None:
            seeds = [tables.calibration.greedy.survivals, tables.calibration.sampling.survivals]
            self._recent = np.concatenate([np.array(s, np.float64) for s in seeds])[-RECENT_ROUNDS:]

    def metrics(self) -> dict[str, float]:
        """Gauges by name: the server's policy, the load, and why less is done than was asked."""
        no_tables = self._wanted == AUTO and self.default.name == "fixed"
        return {
            f'policy{{name="{self.default}"}}': 1.0,
            "load": self.gauge.value,
            'falls_back{reason="plain_is_faster"}': float(not self.drafting),
            'falls_back{reason="no_tables"}': float(no_tables),
        }

    def policy_of(self, sequence: S) -> Policy:
        """The policy that a sequence runs under: its request's or the server's."""
        policy: Policy = sequence.request.policy or self.default
        return policy

    def speculates(self, sequence: S) -> bool:
        """Whether the drafter may ever work for a sequence, and needs its context for that."""
        return sequence.speculates and self.policy_of(sequence).speculates

    def plan(self, decoding: list[S]) -> None:
        """Begin a step in which these sequences decode: decide whether drafting pays."""
        self._num_decoding = len(decoding)
        self._held_back = set()
        if not decoding:
            return
        self._mean_context = sum(s.num_computed for s in decoding) / len(decoding)
        adaptive = [s for s in decoding if s.speculates and self.policy_of(s).needs_tables]
        if not adaptive:
            return
        gain = self._gain(adaptive)
        self.drafting = gain > (1 if self.drafting else 1 + self._min_gain)
        if self.drafting:
            self._plain_steps = 0
            return
        self._metrics.counts["plain_is_faster_steps"] += 1
        self._held_back = set(adaptive)
        self._plain_steps += 1
        if self._plain_steps % PROBE_STEPS == 0:
            self._held_back.remove(min(adaptive, key=lambda s: s.num_pending))

    def drafts_for(self, sequence: S) -> bool:
        """Whether a decoding sequence is drafted for in this step."""
        return self.speculates(sequence) and sequence not in self._held_back

    def _gain(self, adaptive: list[S]) -> float:
        """Tokens per second with drafting for these sequences over those without, as expected."""
        assert self._tables is not None
        cost = self._tables.cost
        outlook = self._expect(len(adaptive))
        arrears = sum(s.num_pending - 1 for s in adaptive) * cost.context_token_s
        plain_s = cost.verify_cost(self._num_decoding, 0, self._mean_context)[0]
        seconds = outlook.seconds + arrears / CATCH_UP_STEPS
        return float(outlook.tokens / seconds * plain_s / self._num_decoding)

    def _expect(self, num_drafted: int) -> Outlook:
        assert self._tables is not None
        if self._new_rounds >= REFRESH_ROUNDS:
            self._outlooks.clear()
            self._new_rounds = 0
        key = (self._num_decoding, num_drafted, int(self._mean_context) // 64)
        if key not in self._outlooks:
            num_tokens = num_drafted * self._recent.shape[1]
            self._outlooks[key] = expect_throughput(
                self._recent,
                num_drafted,
                self._step_s(num_drafted, num_tokens),
                self._num_decoding,
                self._min_gain,
            )
        return self._outlooks[key]

    def _step_s(self, num_drafted: int, num_tokens: int, others: int = 0) -> NDArray[np.float64]:
        """Seconds of this step with 0 .. `num_tokens` draft tokens beside `others`, [n + 1]."""
        assert self._tables is not None
        cost, context = self._tables.cost, self._mean_context
        verify_s = cost.verify_cost(self._num_decoding, others + num_tokens, context)[others:]
        return verify_s + cost.draft_cost(num_drafted, context)

    def lengths(
        self,
        sequences: list[S],
        caps: NDArray[np.int64],
        confidence_logits: NDArray[np.float32] | None,
    ) -> NDArray[np.int64]:
        """Draft tokens to verify for each drafted sequence, [R], each from 0 to its cap.

        Args:
            sequences: [R].
            caps: [R] what each request's block, parameters and remaining tokens allow.
            confidence_logits: [R, g] of the drafter, if it has that head.
        """
        policies = [self.policy_of(s) for s in sequences]
        confidence = None
        if confidence_logits is not None and any(p.needs_confidence for p in policies):
            confidence = self._confidence(sequences, confidence_logits)
        lengths = np.zeros_like(caps)
        # Those that weigh costs come last: what the others verify is part of their step.
        for policy in sorted(set(policies), key=lambda p: (p.needs_tables, str(p))):
            rows = np.array([row for row, p in enumerate(policies) if p == policy])
            if not policy.needs_confidence:
                lengths[rows] = self._fixed(policy, caps[rows])
                continue
            assert confidence is not None, f"policy {policy} without a confidence head"
            own = [sequences[row] for row in rows]
            lengths[rows] = self._by_confidence(
                policy, own, caps[rows], confidence[rows], int(lengths.sum())
            )
        return lengths

    def _confidence(self, sequences: list[S], logits: NDArray[np.float32]) -> NDArray[np.float64]:
        if self._tables is None:
            return sigmoid(logits)
        greedy = np.array([s.request.greedy for s in sequences])
        return self._tables.calibration.confidence(logits, greedy)

    def _fixed(self, policy: Policy, caps: NDArray[np.int64]) -> NDArray[np.int64]:
        return fixed_lengths(caps, None if policy.argument is None else int(policy.argument))

    def _by_confidence(
        self,
        policy: Policy,
        sequences: list[S],
        caps: NDArray[np.int64],
        confidence: NDArray[np.float64],
        others: int,
    ) -> NDArray[np.int64]:
        if policy.name == "threshold":
            base = THRESHOLD_BASE if policy.argument is None else policy.argument
            return threshold_lengths(confidence, caps, load_threshold(self.gauge.value, base))
        survival = np.cumprod(confidence, axis=1)
        step_s = self._step_s(len(sequences), int(caps.sum()), others)
        self._remember(survival)
        if policy.name == "throughput":
            return throughput_lengths(survival, caps, step_s, self._num_decoding, self._min_gain)
        old = np.stack([_two_steps_ago(s, own) for s, own in zip(sequences, survival, strict=True)])
        return lagged_lengths(survival, old, caps, step_s, self._num_decoding)

    def _remember(self, survival: NDArray[np.float64]) -> None:
        if not self.drafting:
            survival = np.repeat(survival, PROBE_WEIGHT, axis=0)
        self._recent = np.concatenate([self._recent, survival])[-RECENT_ROUNDS:]
        self._new_rounds += len(survival)

    def predicted_s(
        self, num_drafted: int, num_verified: int, new_context_tokens: int
    ) -> float | None:
        """Seconds that the cost table gives this step's decoding; None without a table.

        `new_context_tokens` are those that the drafter took in, one a request at no extra cost.
        """
        if self._tables is None or not self._num_decoding:
            return None
        cost, context = self._tables.cost, self._mean_context
        seconds = float(cost.verify_cost(self._num_decoding, num_verified, context)[-1])
        if num_drafted:
            seconds += cost.draft_cost(num_drafted, context)
            seconds += cost.context_token_s * max(0, new_context_tokens - num_drafted)
        return seconds


def _two_steps_ago(sequence: Scheduled, survival: NDArray[np.float64]) -> NDArray[np.float64]:
    """Survivals [g] of the round before the last, 1 for a younger sequence; keeps this one's."""
    history = sequence.survivals
    old = history[0] if len(history) == 2 else np.ones_like(survival)
    history.append(survival)
    return old
