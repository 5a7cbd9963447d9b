"""Counter-based noise: a pure function of (seed, position, stream, round), never a state.

Replaying, preempting or reordering requests cannot shift anybody's random numbers, and a request
that drafts nothing consumes nothing. The generator is Philox4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011), vectorised over counters because numpy's own Philox
object costs more to seed than a whole step's uniforms here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runtime.request import Request

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


class Stream(IntEnum):
    """What a uniform is for. Two purposes never share one: shared noise biases the output."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    TARGET = 3  # a token drawn from the target alone: plain decoding and the bonus token
    COUPLED = 4  # drives draft and target alike under the coupled rule (`exponentials`)


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 block function.

    Args:
        counter: [4, n] uint64, each below 2**32.
        key: [2, n] uint64, each below 2**32.

    Returns:
        [4, n] uint64, each below 2**32.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            (product1 >> _WORD) ^ x1 ^ k0,
            product1 & _LOW,
            (product0 >> _WORD) ^ x3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([x0, x1, x2, x3])


def uniforms(
    seeds: ArrayLike, positions: ArrayLike, stream: ArrayLike, rounds: ArrayLike = 0
) -> NDArray[np.float32]:
    """Uniforms in [0, 1) with 24 random bits, exact in fp32.

    Args:
        seeds: request seeds, 64 bits.
        positions: absolute position of the token that the number decides about.
        stream: a `Stream` each.
        rounds: for numbers that may be drawn again for one position (drafts that an earlier
            rejection discarded), the anchor's position. Without it a scheduler that looks at
            older confidences would see the very noise that decides the new draft.

    All arguments broadcast against each other; the result has their common shape.
    """
    seed, position, purpose, round_ = np.broadcast_arrays(
        np.asarray(seeds, np.uint64),
        np.asarray(positions, np.uint64),
        np.asarray(stream, np.uint64),
        np.asarray(rounds, np.uint64),
    )
    counter = np.stack([position, purpose, round_, np.zeros_like(seed)]).reshape(4, -1)
    key = np.stack([seed & _LOW, seed >> _WORD]).reshape(2, -1)
    word = philox(counter, key)[0]
    return ((word >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)).reshape(seed.shape)


@lru_cache(maxsize=64)  # one round asks twice, when drafting and when accepting
def exponentials(seed: int, position: int, count: int) -> NDArray[np.float32]:
    """[count] exponential(1) numbers, one for each token id, shared by draft and target.

    The coupled rule's noise: the token of smallest exponential / probability is a sample of the
    probabilities, and draft and target that race with the same numbers agree with probability at
    least (1 - d) / (1 + d), d their total variation distance (Daliri et al., "Coupling without
    communication and drafter-invariant speculative decoding", 2024). The inverse CDF at a shared
    uniform agrees less: 0.24 instead of 0.36 of positions with the embedded model's drafter.

    Philox4x64-10 as numpy has it: too many numbers for `philox` above.
    """
    counter = np.array([0, position, Stream.COUPLED, 0], np.uint64)
    words = np.random.Philox(key=seed, counter=counter).random_raw((count + 1) // 2)
    uniform = (words.view(np.uint32)[:count] + 0.5) * 2.0**-32  # fp64: never 0, never 1
    numbers = (-np.log(uniform)).astype(np.float32)
    numbers.flags.writeable = False
    return numbers


class DraftNoise(NamedTuple):
    """What samples one request's draft: `uniforms` [g], or where they are below 0 `gumbel` [g, V'].

    A request without Gumbel noise has zeros [g, 1].
    """

    uniforms: NDArray[np.float32]
    gumbel: NDArray[np.float32]


def draft_noise(
    requests: Sequence[Request],
    anchors: Sequence[int],
    block_size: int,
    vocab_size: int,
    draft_vocab: NDArray[np.int64] | None,
) -> list[DraftNoise]:
    """Noise for the drafts after the given anchor positions.

    Args:
        requests: [R].
        anchors: [R] absolute position of each request's anchor.
        block_size: g.
        vocab_size: V of the target.
        draft_vocab: [V'] target id of each draft id; None where the vocabularies are the same.
    """
    numbers = np.zeros((len(requests), block_size), np.float32)
    gumbel = [np.zeros((block_size, 1), np.float32)] * len(requests)
    sampled = []
    for row, (request, anchor) in enumerate(zip(requests, anchors, strict=True)):
        if request.greedy:
            continue
        if not request.coupled:
            sampled.append(row)
            continue
        numbers[row] = -1
        race = [exponentials(request.seed, anchor + 1 + k, vocab_size) for k in range(block_size)]
        gumbel[row] = -np.log(race if draft_vocab is None else [e[draft_vocab] for e in race])
    if sampled:
        at = np.array([[anchors[row]] for row in sampled])
        seeds = np.array([[requests[row].seed] for row in sampled], np.uint64)
        positions = at + np.arange(1, block_size + 1)
        numbers[sampled] = uniforms(seeds, positions, Stream.DRAFT, at)
    return list(map(DraftNoise, numbers, gumbel))


class RoundNoise(NamedTuple):
    """A round's noise for one request.

    `coins` [l] decide about each draft token; `tokens` [l + 1] draw the target's own token in
    each row, should the round end there; both are empty where the request is greedy or coupled.
    `position` is the absolute one of the first row's token.
    """

    coins: NDArray[np.float32]
    tokens: NDArray[np.float32]
    position: int


def round_noise(
    requests: Sequence[Request], anchors: Sequence[int], lengths: Sequence[int]
) -> list[RoundNoise]:
    """Uniforms of one round for many requests, made at once because each call costs the same.

    Args:
        requests: [R].
        anchors: [R] absolute position of each request's anchor.
        lengths: [R] draft tokens verified, l of each request.
    """
    seeds, positions, rounds, streams = [], [], [], []
    for request, anchor, length in zip(requests, anchors, lengths, strict=True):
        if request.greedy or request.coupled:
            continue
        seeds += [request.seed] * (2 * length + 1)
        positions += [
            *range(anchor + 1, anchor + 1 + length),
            *range(anchor + 1, anchor + 2 + length),
        ]
        rounds += [anchor] * length + [0] * (length + 1)
        streams += [Stream.ACCEPT] * length + [Stream.RESIDUAL] * length + [Stream.TARGET]
    noise = np.empty(0, np.float32)
    if seeds:
        noise = uniforms(np.array(seeds, np.uint64), positions, streams, rounds)
    result, start = [], 0
    for request, anchor, length in zip(requests, anchors, lengths, strict=True):
        if request.greedy or request.coupled:
            result.append(RoundNoise(noise[:0], noise[:0], anchor + 1))
            continue
        split, end = start + length, start + 2 * length + 1
        result.append(RoundNoise(noise[start:split], noise[split:end], anchor + 1))
        start = end
    return result
