"""Acceptance: how many draft tokens the target agrees with, and the token that follows them.

Nothing here looks at the scheduling policy, the load or the batch. Each rule returns the accepted
draft tokens and exactly one token of the target after them, so a round always makes progress.

Leviathan et al. 2023 (rejection); DSpark section 2; greedy is either rule with one-hot p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.randomness import Stream, uniforms
from runtime.request import Request
from runtime.sampling import Probs, draw, softmax, target_probs

TargetRow = Callable[[int], Probs]


class Accepted(NamedTuple):
    """The first `num_accepted` draft tokens stand; `next_token` follows them."""

    num_accepted: int
    next_token: int


class Draft(NamedTuple):
    """One request's draft: token ids [g], logits [g, V'] and the target id of each draft id [V'].

    `logits` are None for a greedy request, whose q is one-hot on `token_ids`.
    """

    token_ids: NDArray[np.int64]
    logits: NDArray[np.float32] | None
    vocab: NDArray[np.int64] | None


def accept(
    request: Request,
    position: int,
    num_verified: int,
    draft: Draft | None,
    logits: NDArray[np.float32],
) -> Accepted:
    """Apply the request's rule to one round.

    Args:
        request: temperature, filters, seed and rule.
        position: absolute position of the first drafted token (the anchor's plus one).
        num_verified: draft tokens l that were verified; may be 0.
        draft: of this round; may be None when `num_verified` is 0.
        logits: [l + 1, V] of the verifier; row i follows the anchor and i draft tokens.
    """
    ids = draft.token_ids[:num_verified] if draft is not None else np.empty(0, np.int64)
    if request.greedy:
        return accept_equal(ids, lambda row: int(logits[row].argmax()))

    def target(row: int) -> Probs:
        return target_probs(logits[row], request)

    positions = np.arange(position, position + num_verified + 1)
    if request.coupled or draft is None:
        stream = Stream.COUPLED if request.coupled else Stream.TARGET
        noise = uniforms(request.seed, positions, stream)
        return accept_equal(ids, lambda row: draw(target(row), noise[row]))

    assert draft.logits is not None, "a sampled draft comes with its logits"
    draft_probs = softmax(draft.logits[:num_verified] / np.float32(request.temperature))
    return accept_rejection(
        ids, draft_probs, draft.vocab, target, seed=request.seed, position=position
    )


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
    vocab: NDArray[Any] | None,
    target: TargetRow,
    *,
    seed: int,
    position: int,
) -> Accepted:
    """Speculative rejection sampling.

    Draft token x is accepted when u < p(x) / q(x); at the first rejection the token comes from
    norm(max(p - q, 0)); when all pass, from p.

    Args:
        draft_ids: [l] target ids, sampled from `draft_probs`.
        draft_probs: [l, V'] the exact distributions that were sampled (q).
        vocab: [V'] target id of each draft id, or None when the vocabularies are the same.
        target: row -> [V] target probabilities (p), asked only as far as needed.
        seed: of the request.
        position: absolute position of `draft_ids[0]`.
    """
    length = len(draft_ids)
    anchor = position - 1
    coins = uniforms(seed, np.arange(position, position + length), Stream.ACCEPT, anchor)
    for row, draft_id in enumerate(draft_ids):
        p, q = target(row), draft_probs[row]
        column = draft_id if vocab is None else np.searchsorted(vocab, draft_id)
        if coins[row] * q[column] < p[draft_id]:
            continue
        residual = p.copy()
        residual[slice(None) if vocab is None else vocab] -= q
        np.maximum(residual, 0, out=residual)
        # p == q up to rounding leaves nothing; then p itself is the residual's limit.
        weights = residual if residual.any() else p
        noise = uniforms(seed, position + row, Stream.RESIDUAL)
        return Accepted(row, draw(weights, float(noise)))
    noise = uniforms(seed, position + length, Stream.TARGET)
    return Accepted(length, draw(target(length), float(noise)))
