"""Counter-based uniforms: a pure function of (seed, position, stream, round), never a state.

Replaying, preempting or reordering requests cannot shift anybody's random numbers, and a request
that drafts nothing consumes nothing. The generator is Philox4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011), vectorised over counters because numpy's own Philox
object costs more to seed than a whole step's uniforms here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
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
    COUPLED = 4  # drives draft and target alike under the coupled rule


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


def draft_uniforms(
    requests: Sequence[Request], anchors: Sequence[int], block_size: int
) -> NDArray[np.float32]:
    """[R, g] uniforms that sample the drafts after the given anchor positions (0 for greedy)."""
    noise = np.zeros((len(requests), block_size), np.float32)
    rows = [row for row, request in enumerate(requests) if not request.greedy]
    if rows:
        anchor = np.array([[anchors[row]] for row in rows])
        coupled = np.array([[requests[row].coupled] for row in rows])
        noise[rows] = uniforms(
            np.array([[requests[row].seed] for row in rows], np.uint64),
            anchor + np.arange(1, block_size + 1),
            np.where(coupled, Stream.COUPLED, Stream.DRAFT),
            np.where(coupled, 0, anchor),
        )
    return noise


class RoundNoise(NamedTuple):
    """A round's uniforms for one request; empty for a greedy one.

    `coins` [l] decide about each draft token; `tokens` [l + 1] draw the target's own token in
    each row, should the round end there.
    """

    coins: NDArray[np.float32]
    tokens: NDArray[np.float32]


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
        if request.greedy:
            continue
        own = [Stream.COUPLED] * (length + 1)
        if not request.coupled:
            own = [Stream.RESIDUAL] * length + [Stream.TARGET]
        seeds += [request.seed] * (2 * length + 1)
        positions += [
            *range(anchor + 1, anchor + 1 + length),
            *range(anchor + 1, anchor + 2 + length),
        ]
        rounds += [anchor] * length + [0] * (length + 1)
        streams += [Stream.ACCEPT] * length + own
    noise = uniforms(np.array(seeds, np.uint64), positions, streams, rounds)
    result, start = [], 0
    for request, length in zip(requests, lengths, strict=True):
        if request.greedy:
            result.append(RoundNoise(noise[:0], noise[:0]))
            continue
        split, end = start + length, start + 2 * length + 1
        result.append(RoundNoise(noise[start:split], noise[split:end]))
        start = end
    return result
