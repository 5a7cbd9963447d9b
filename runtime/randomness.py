"""Counter-based uniforms: a pure function of (seed, position, stream, round), never a state.

Replaying, preempting or reordering requests cannot shift anybody's random numbers, and a request
that drafts nothing consumes nothing. The generator is Philox4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011), vectorised over counters because numpy's own Philox
object costs more to seed than a whole step's uniforms here.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
