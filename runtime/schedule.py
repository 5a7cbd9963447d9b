"""Scheduling: how many draft tokens of each request are verified. Pure functions over arrays.

Whatever is chosen, the output distribution is the verifier's (`runtime.accept`); a policy decides
about speed alone. For that to hold, whether token x_k of a draft is verified must not depend on x_k
or on anything computed from it (DSpark section 4): c_k and the survivals a_1 .. a_k are computed
from x_1 .. x_{k-1} and may be used, c_{k+1} may not.

Symbols: R requests, g draft tokens per block. `survival` [R, g] is a_k = c_1 ... c_k, calibrated,
which never rises along a row. `step_s` [n + 1] is what a step takes with 0 .. n draft tokens
verified, its drafting included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.config import ConfigError

Int = NDArray[np.int64]
Float = NDArray[np.float64]

HISTORY_ROUNDS = 8  # of a request, whose survivals say what to expect of it

THRESHOLD_BASE = 0.3  # of the paper
THRESHOLD_SLOPE = 0.5

_INDEX_BITS = 22  # room for four million draft tokens in a step
_SURVIVAL_STEPS = 2.0**40  # survivals closer than this are ties


@dataclass(frozen=True)
class Policy:
    """A parsed policy: its name and argument (None: the default of that policy)."""

    name: str
    argument: float | None = None

    @property
    def speculates(self) -> bool:
        """Whether the drafter runs at all."""
        return self.name != "off" and (self.name, self.argument) != ("fixed", 0)

    @property
    def needs_confidence(self) -> bool:
        """Whether it looks at the drafter's confidences."""
        return self.name not in ("off", "fixed")

    @property
    def needs_tables(self) -> bool:
        """Whether it needs the engine's cost table and calibrated confidences."""
        return self.name in ("throughput", "lagged")

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}:{self.argument:g}"


def parse_policy(text: str, block_size: int) -> Policy:
    """Parse `off`, `fixed[:k]`, `threshold[:base]`, `throughput` or `lagged`.

    k is from 0 to the drafter's block size, the base from 0 to 1. Raises ConfigError naming the
    valid policies and the value.
    """
    name, colon, argument = text.partition(":")
    if not colon and name in ("off", "fixed", "threshold", "throughput", "lagged"):
        return Policy(name)
    if name == "fixed" and argument.isdecimal() and int(argument) <= block_size:
        return Policy(name, int(argument))
    if name == "threshold":
        try:
            base = float(argument)
        except ValueError:
            base = -1
        if 0 <= base <= 1:
            return Policy(name, base)
    raise ConfigError(
        f"policy must be off, fixed, fixed:k with k from 0 to {block_size}, threshold, "
        f"threshold:base with a base from 0 to 1, throughput or lagged, got {text!r}"
    )


def fixed_lengths(caps: Int, num_tokens: int | None = None) -> Int:
    """The same length for every request, [R], as far as its cap allows; None: the whole block."""
    return caps if num_tokens is None else np.minimum(caps, num_tokens)


def load_threshold(load: float, base: float = THRESHOLD_BASE) -> float:
    """Confidence below which `threshold` cuts, at a load in [0, 1]."""
    return base * (1 + THRESHOLD_SLOPE * load)


def threshold_lengths(confidence: Float, caps: Int, threshold: float) -> Int:
    """Cut each request at its first confidence below the threshold.

    Args:
        confidence: [R, g] c_k, not their products.
        caps: [R] what each request's block, parameters and remaining tokens allow.
        threshold: see `load_threshold`.
    """
    kept = np.logical_and.accumulate(confidence >= threshold, axis=1).sum(axis=1)
    return np.minimum(kept, caps)


def throughput_lengths(
    survival: Float, caps: Int, step_s: Float, base_tokens: float, min_gain: float = 0.0
) -> Int:
    """DSpark Algorithm 1: admit the likeliest draft tokens while tokens per second rise.

    Stopping at the first token that does not raise them, instead of taking the best of all counts,
    keeps every decision free of what is computed from the token it is about.

    Args:
        survival: [R, g].
        caps: [R].
        step_s: [n + 1], n at least the sum of caps.
        base_tokens: tokens that the step yields without any of these (one for every request that
            decodes in it).
        min_gain: cut only where going on would fall by more than this share below the best so far;
            0 is the paper's rule.
    """
    rows, values = _ranked(survival, caps)
    return _first(rows, int(num_admitted(values, step_s, base_tokens, min_gain)), len(caps))


def lagged_lengths(
    survival: Float, old_survival: Float, caps: Int, step_s: Float, base_tokens: float
) -> Int:
    """Verify the K likeliest draft tokens, K being the best count for older confidences.

    The count does not look at today's draft, so it may be the best of all: no early stop, and
    steps in `step_s` do not matter.

    Args:
        survival: [R, g] of this step.
        old_survival: [R, g] of two steps ago; 1 for a request too young for that.
        caps: [R].
        step_s: [n + 1], n at least the sum of caps.
        base_tokens: see `throughput_lengths`.
    """
    allowed = np.arange(survival.shape[1]) < caps[:, None]
    old_values = -np.sort(-old_survival[allowed])
    count = int(np.argmax(_tokens(old_values, base_tokens) / step_s[: len(old_values) + 1]))
    rows, _ = _ranked(survival, caps)
    return _first(rows, count, len(caps))


class Choice(NamedTuple):
    """Requests to draft for, and what that yields."""

    rows: Int  # [D], the most promising first
    longest: int  # draft tokens to verify at most for each, from 1 to g
    gain: float  # expected tokens per second over those of plain decoding, at least 1


def worth_drafting(
    samples: Float,
    arrears_s: Float,
    step_s: Callable[[int, int], Float],
    base_tokens: float,
    min_gain: float = 0.0,
) -> Choice:
    """Those of R requests for which drafting yields the most tokens per second, on average.

    How many tokens to verify at most is tried out for all requests, then how many of these are
    drafted for: those that promise most come first. Ties go by row.

    Args:
        samples: [R, H, g] survivals of H rounds that say what to expect of each request.
        arrears_s: [R] seconds by which drafting for a request lengthens the step beyond `step_s`.
        step_s: of D requests drafted for and n draft tokens at most of each, [D * n + 1].
        base_tokens, min_gain: see `throughput_lengths`, which will cut the drafts.
    """
    order = np.argsort(-samples.sum(axis=2).mean(axis=1), kind="stable")
    plain_rate = base_tokens / step_s(0, 0)[0]

    def gain(count: int, longest: int) -> float:
        rows, seconds = order[:count], step_s(count, longest)
        by_sample = samples[rows, :, :longest].swapaxes(0, 1).reshape(samples.shape[1], -1)
        values = -np.sort(-by_sample, axis=1)
        counts = num_admitted(values, seconds, base_tokens, min_gain)
        tokens = np.take_along_axis(_tokens(values, base_tokens), counts[:, None], axis=1)
        mean_s = seconds[counts].mean() + arrears_s[rows].sum()
        return float(tokens.mean() / mean_s / plain_rate)

    longest = max(range(samples.shape[2], 0, -1), key=lambda n: gain(len(order), n))
    best = Choice(order[:0], longest, 1.0)
    for count in _tried_counts(len(order)):
        if (own := gain(count, longest)) > best.gain:
            best = Choice(order[:count], longest, own)
    return best


def _tried_counts(last: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... and `last`."""
    steps = [n for i in range(last.bit_length()) for n in (1 << i, 3 << i >> 1) if n < last]
    return sorted({*steps, last})


def num_admitted(values: Float, step_s: Float, base_tokens: float, min_gain: float) -> Int:
    """How many of `values` [..., n], sorted downwards, `throughput_lengths` admits: [...]."""
    rate = _tokens(values, base_tokens) / step_s[: values.shape[-1] + 1]
    best = np.maximum.accumulate(rate, axis=-1)
    rises = rate[..., 1:] > best[..., :-1] * (1 - min_gain)
    result: Int = np.logical_and.accumulate(rises, axis=-1).sum(axis=-1)
    return result


def _ranked(survival: Float, caps: Int) -> tuple[Int, Float]:
    """Row and survival of every draft token within the caps, likeliest first.

    Ties go by position, then by row: never by anything that depends on a token's value. Survival
    does not rise along a row, so the tokens of a row come in their order.
    """
    if len(caps) == 1:
        return np.zeros(caps[0], np.int64), survival[0, : caps[0]]
    by_position = np.ascontiguousarray(survival.T)  # [g, R]
    index = np.arange(by_position.size).reshape(by_position.shape)
    # One integer to sort by: the survival in its high bits, then the place. Unlike a stable sort
    # of floats it is vectorised.
    keys = ((1 - by_position) * _SURVIVAL_STEPS).astype(np.int64) << _INDEX_BITS | index
    allowed = np.arange(len(by_position))[:, None] < caps
    order = np.sort(keys[allowed]) & ((1 << _INDEX_BITS) - 1)
    return order % len(caps), by_position.reshape(-1)[order]


def _tokens(values: Float, base_tokens: float) -> Float:
    """Expected tokens with the first 0 .. n of `values` [..., n] verified: [..., n + 1]."""
    none = np.zeros((*values.shape[:-1], 1))
    result: Float = base_tokens + np.concatenate([none, np.cumsum(values, axis=-1)], axis=-1)
    return result


def _first(rows: Int, count: int, num_requests: int) -> Int:
    return np.bincount(rows[:count], minlength=num_requests)
