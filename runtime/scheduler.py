"""The scheduler: which requests are drafted for in a step, and how much of each draft is verified.

It keeps what the pure rules of `runtime.schedule` need from step to step. All of it is of the past
when a draft is made, so no decision about a token depends on its value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.calibration import Calibration, head_confidence
from runtime.config import ConfigError, RuntimeConfig
from runtime.cost import CostTable
from runtime.experience import Experience
from runtime.load import LoadGauge
from runtime.metrics import Metrics
from runtime.schedule import (
    HISTORY_ROUNDS,
    THRESHOLD_BASE,
    Policy,
    fixed_lengths,
    lagged_lengths,
    load_threshold,
    parse_policy,
    threshold_lengths,
    throughput_lengths,
    worth_drafting,
)
from runtime.spec import DrafterDims

AUTO = "auto"
REFRESH_STEPS = 8  # after which the choice of whom to draft for is made anew
LOOK_STEPS = 64  # steps between looks at the draft of a request that is not drafted for
LOOK_WEIGHT = 4  # rounds that such a look counts for, or the last ones would be of long ago
CATCH_UP_STEPS = 32  # over which the drafter's arrears of context are spread when drafting resumes
PLAIN_LOOK_STEPS = 128  # steps with drafts between looks at what a plain one takes


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
    survivals: deque[NDArray[np.float64]]  # [g] of its last HISTORY_ROUNDS rounds, older first
    leaning: float  # of its confidences, see `runtime.experience`

    @property
    def speculates(self) -> bool:
        """Whether the request lets the drafter work for it."""

    @property
    def num_pending(self) -> int:
        """Computed tokens that the drafter does not have in its context yet."""


S = TypeVar("S", bound=Scheduled)


class Scheduler(Generic[S]):
    """Decides for one loop, step by step: `plan`, `lengths`, `end_round`, `end_decoding`."""

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
        self._longest_context = 0  # which those of all requests are padded to
        self._adaptive: list[S] = []  # those decoding whose policy may hold their drafts back
        self._held_back: set[S] = set()  # those that plain decoding is better for,
        self._waiting: set[S] = set()  # and those not drafted for in this step
        self._longest_draft = 0  # tokens of a draft that policies with tables may verify
        self._steps_to_choice = 0
        self._steps_to_look = LOOK_STEPS
        # Of this step's drafts: log-odds as calibrated and confidences, [g] each.
        self._judged: dict[S, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._looked_at: S | None = None
        self._steps_to_plain_look = PLAIN_LOOK_STEPS
        self._experience = None if tables is None else Experience(tables.calibration)

    def metrics(self) -> dict[str, float]:
        """Gauges by name: the server's policy, the load, and why less is done than was asked."""
        experience = self._experience
        no_tables = self._wanted == AUTO and self.default.name == "fixed"
        return {
            f'policy{{name="{self.default}"}}': 1.0,
            "load": self.gauge.value,
            "drafting_cost_factor": 1.0 if experience is None else experience.drafting_factor,
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
        """Begin a step in which these sequences decode: decide for which of them to draft."""
        self._num_decoding = len(decoding)
        self._judged.clear()
        if not decoding:
            return
        self._longest_context = max(s.num_computed for s in decoding)
        adaptive = [s for s in decoding if s.speculates and self.policy_of(s).needs_tables]
        self._steps_to_choice -= 1
        if adaptive != self._adaptive or self._steps_to_choice <= 0:
            self._adaptive, self._steps_to_choice = adaptive, REFRESH_STEPS
            self._held_back = self._choose_held_back(adaptive) if adaptive else set()
        if adaptive:
            self._look_around(adaptive)

    def _look_around(self, adaptive: list[S]) -> None:
        """Now and then do the other thing, so that what is known of it stays true."""
        self._waiting, self._looked_at = self._held_back, None
        if not self._held_back:
            self._steps_to_plain_look -= 1
            if self._steps_to_plain_look <= 0:
                self._steps_to_plain_look = PLAIN_LOOK_STEPS
                self._waiting = set(adaptive)
            return
        self._steps_to_plain_look = PLAIN_LOOK_STEPS
        self._metrics.counts["plain_is_faster_steps"] += not self.drafting
        self._steps_to_look -= 1
        if self._steps_to_look <= 0:
            self._steps_to_look = LOOK_STEPS
            # The one that was looked at longest ago owes most.
            held_back = [s for s in adaptive if s in self._held_back]
            self._looked_at = max(held_back, key=lambda s: s.num_pending)
            self._waiting = self._held_back - {self._looked_at}

    def drafts_for(self, sequence: S) -> bool:
        """Whether a decoding sequence is drafted for in this step."""
        return self.speculates(sequence) and sequence not in self._waiting

    def _choose_held_back(self, adaptive: list[S]) -> set[S]:
        assert self._tables is not None
        assert self._experience is not None
        spread_s = self._tables.cost.context_token_s / CATCH_UP_STEPS
        choice = worth_drafting(
            self._expected(adaptive),
            np.array([s.num_pending - 1 for s in adaptive]) * spread_s,
            lambda count, longest: self._step_s(count, count * longest, longest),
            self._num_decoding,
            self._min_gain,
        )
        self.drafting = choice.gain > (1 if self.drafting else 1 + self._min_gain)
        self._longest_draft = choice.longest
        chosen = choice.rows.tolist() if self.drafting else []
        return set(adaptive) - {adaptive[row] for row in chosen}

    def _expected(self, sequences: list[S]) -> NDArray[np.float64]:
        """Survivals [R, HISTORY_ROUNDS, g] to expect: own ones, for young requests also others'.

        Those of others are spread over good and bad rounds, beginning elsewhere for each request.
        """
        experience = self._experience
        assert experience is not None
        modes = [s.request.greedy for s in sequences]
        typical = {mode: experience.typical_rounds(mode) for mode in set(modes)}
        expected = np.empty((len(sequences), HISTORY_ROUNDS, experience.block_size))
        for row, (sequence, mode) in enumerate(zip(sequences, modes, strict=True)):
            own = len(sequence.survivals)
            if own:
                expected[row, :own] = sequence.survivals
            if missing := HISTORY_ROUNDS - own:
                places = ((np.arange(missing) + row) % missing + 0.5) * len(typical[mode]) / missing
                expected[row, own:] = typical[mode][places.astype(int)]
        return expected

    def _step_s(
        self, num_drafted: int, num_tokens: int, longest: int, others: int = 0
    ) -> NDArray[np.float64]:
        """Seconds of this step with 0 .. `num_tokens` draft tokens beside `others`, [n + 1].

        `longest` is the most of a request: attention pads all to it, whoever reaches it.
        """
        assert self._tables is not None
        assert self._experience is not None
        cost, context = self._tables.cost, self._longest_context
        verify_s = cost.verify_cost(self._num_decoding, others + num_tokens, context)[others:]
        if not num_drafted:
            return verify_s
        missing = self._num_decoding * longest - others - np.arange(num_tokens + 1)
        padding_s = cost.padding_cost(missing.clip(min=0), context)
        draft_s = cost.draft_cost(num_drafted, context)
        return (verify_s + padding_s + draft_s) * self._experience.drafting_factor

    def lengths(
        self,
        sequences: list[S],
        caps: NDArray[np.int64],
        signals: NDArray[np.float32] | None,
    ) -> NDArray[np.int64]:
        """Draft tokens to verify for each drafted sequence, [R], each from 0 to its cap.

        Args:
            sequences: [R].
            caps: [R] what each request's block, parameters and remaining tokens allow.
            signals: [R, g, 2] of a drafter with a confidence head, see `runtime.calibration`.
        """
        policies = [self.policy_of(s) for s in sequences]
        confidence = None
        if signals is not None and any(p.needs_confidence for p in policies):
            confidence = self._confidence(sequences, signals)
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

    def _confidence(self, sequences: list[S], signals: NDArray[np.float32]) -> NDArray[np.float64]:
        if self._experience is None:
            return head_confidence(signals)
        greedy = np.array([s.request.greedy for s in sequences])
        leanings = np.array([s.leaning for s in sequences])
        log_odds, confidence = self._experience.judge(signals, greedy, leanings)
        self._judged.update(zip(sequences, zip(log_odds, confidence, strict=True), strict=True))
        return confidence

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
        experience = self._experience
        assert experience is not None
        survival = np.cumprod(confidence, axis=1)
        longest = self._longest_draft
        caps = np.minimum(caps, longest)
        step_s = self._step_s(len(sequences), int(caps.sum()), longest, others)
        base = self._num_decoding
        if policy.name == "throughput":
            lengths = throughput_lengths(survival, caps, step_s, base, self._min_gain)
        else:
            pairs = zip(sequences, survival, strict=True)
            old = np.stack([_two_ago(s, own) for s, own in pairs])
            lengths = lagged_lengths(survival, old, caps, step_s, base)
        for row, sequence in enumerate(sequences):
            rounds = [survival[row]] * (LOOK_WEIGHT if sequence is self._looked_at else 1)
            sequence.survivals.extend(rounds)
            experience.add_rounds(sequence.request.greedy, rounds)
        return lengths

    def end_round(self, sequence: S, num_verified: int, num_accepted: int) -> None:
        """Learn what came of a sequence's draft."""
        judged = self._judged.pop(sequence, None)
        if judged is not None and self._experience is not None:
            sequence.leaning += self._experience.add_outcome(
                sequence.request.greedy, *judged, num_verified, num_accepted
            )

    def end_decoding(
        self, verified: Collection[int], new_context_tokens: int, measured_s: float
    ) -> None:
        """Learn what the step's decoding took, and book it beside what the table says.

        Args:
            verified: see `predicted_s`.
            new_context_tokens: likewise.
            measured_s: from the step's start to here.
        """
        predicted_s = self.predicted_s(verified, new_context_tokens)
        if predicted_s is not None and self._experience is not None:
            self._metrics.predicted_decoding_s += predicted_s
            self._metrics.measured_decoding_s += measured_s
            self._experience.add_step(len(verified) > 0, predicted_s, measured_s)

    def predicted_s(self, verified: Collection[int], new_context_tokens: int) -> float | None:
        """Seconds that the cost table gives this step's decoding; None without a table.

        `verified` are the draft tokens verified for each sequence that was drafted for,
        `new_context_tokens` those that the drafter took in, one a request at no extra cost.
        """
        if self._tables is None or not self._num_decoding:
            return None
        cost, context = self._tables.cost, self._longest_context
        num_verified = sum(verified)
        seconds = float(cost.verify_cost(self._num_decoding, num_verified, context)[-1])
        if verified:
            missing = self._num_decoding * max(verified) - num_verified
            seconds += float(cost.padding_cost(missing, context))
            seconds += cost.draft_cost(len(verified), context)
            seconds += cost.context_token_s * max(0, new_context_tokens - len(verified))
        return seconds


def _two_ago(sequence: Scheduled, survival: NDArray[np.float64]) -> NDArray[np.float64]:
    """Survivals [g] of the round before the last, 1 for a younger sequence."""
    history = sequence.survivals
    return history[-2] if len(history) >= 2 else np.ones_like(survival)
