"""Acceptance: how many draft tokens the target agrees with, and the token that follows them.

Nothing here looks at the scheduling policy, the load or the batch. Each rule returns the accepted
draft tokens and exactly one token of the target after them, so a round always makes progress.

Leviathan et al. 2023 (rejection); DSpark section 2; greedy is either rule with one-hot p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.randomness import RoundNoise, exponentials
from runtime.request import Request
from runtime.sampling import Probs, draw, race, softmax, target_probs

TargetRow = Callable[[int], Probs]


class Accepted(NamedTuple):
    """The first `num_accepted` draft tokens stand; `next_token` follows them."""

    num_accepted: int
    next_token: int


class Draft(NamedTuple):
    """Draft tokens of one request: ids [l], logits [l, V'], target id of each draft id [V'].

    `logits` are None for a greedy request, whose q is one-hot on `token_ids`. `signals`
    [g, 2], of the whole block, are for the scheduler (`runtime.calibration`); acceptance never
    looks at them.
    """

    token_ids: NDArray[np.int64]
    logits: NDArray[np.float32] | None
    vocab: NDArray[np.int64] | None
    signals: NDArray[np.float32] | None = None

    def first(self, length: int) -> Draft | None:
        """The first `length` tokens; None where that is 0."""
        if length == 0:
            return None
        logits = None if self.logits is None else self.logits[:length]
        return Draft(self.token_ids[:length], logits, self.vocab, self.signals)


def accept(
    request: Request, draft: Draft | None, noise: RoundNoise, logits: NDArray[np.float32]
) -> Accepted:
    """Apply the request's rule to one round.

    Args:
        request: temperature, filters and rule.
        draft: the l draft tokens that were verified; None where l is 0.
        noise: of this round and request.
        logits: [l + 1, V] of the verifier; row i follows the anchor and i draft tokens.
    """
    ids = np.empty(0, np.int64) if draft is None else draft.token_ids
    if request.greedy:
        return accept_equal(ids, lambda row: int(logits[row].argmax()))

    def target(row: int) -> Probs:
        return target_probs(logits[row], request)

    if request.coupled:
        size = logits.shape[1]
        return accept_equal(
            ids,
            lambda row: race(target(row), exponentials(request.seed, noise.position + row, size)),
        )
    if draft is None:
        return Accepted(0, draw(target(0), noise.tokens[0]))
    assert draft.logits is not None, "a sampled draft comes with its logits"
    draft_probs = softmax(draft.logits / np.float32(request.temperature))
    return accept_rejection(ids, draft_probs, draft.vocab, target, noise)


def accept_equal(draft_ids: NDArray[np.int64], target_token: Callable[[int], int]) -> Accepted:
    """Accept while the draft equals the target's own token (greedy and coupled rules).

    `target_token(row)` is the target's token after `row` draft tokens; asked only as far as needed.
    """
    for row, draft_id in enumerate(draft_ids):
        token = target_token(row)
        if token != draft_id:
            return Accepted(row, token)
    return Accepted(len(draft_ids), target_token(len(draft_ids)))


def accept_rejection(
    draft_ids: NDArray[np.int64],
    draft_probs: NDArray[np.float32],
    vocab: NDArray[np.int64] | None,
    target: TargetRow,
    noise: RoundNoise,
) -> Accepted:
    """Speculative rejection sampling.

    Draft token x is accepted when u < p(x) / q(x); at the first rejection the token comes from
    norm(max(p - q, 0)); when all pass, from p.

    Args:
        draft_ids: [l] target ids, sampled from `draft_probs`.
        draft_probs: [l, V'] the exact distributions that were sampled (q).
        vocab: [V'] target id of each draft id, ascending; None when the vocabularies are the same.
        target: row -> [V] target probabilities (p), asked only as far as needed.
        noise: coins [l] and tokens [l + 1].
    """
    for row, draft_id in enumerate(draft_ids):
        p, q = target(row), draft_probs[row]
        column = draft_id if vocab is None else np.searchsorted(vocab, draft_id)
        if noise.coins[row] * q[column] < p[draft_id]:
            continue
        residual = p.copy()
        residual[slice(None) if vocab is None else vocab] -= q
        np.maximum(residual, 0, out=residual)
        # p == q up to rounding leaves nothing; then p itself is the residual's limit.
        weights = residual if residual.any() else p
        return Accepted(row, draw(weights, noise.tokens[row]))
    length = len(draft_ids)
    return Accepted(length, draw(target(length), noise.tokens[length]))
