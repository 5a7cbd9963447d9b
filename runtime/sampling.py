"""From logits to probabilities, and from noise to a token.

The target's filters are applied here, in the order temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.request import Request

Probs = NDArray[np.float32]


def softmax(logits: NDArray[Any]) -> Probs:
    """Probabilities along the last axis, fp32, without overflow."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=np.float32)
    shifted /= shifted.sum(axis=-1, keepdims=True)
    return shifted


def target_probs(logits: NDArray[np.float32], request: Request) -> Probs:
    """The distribution that the request's next token must have.

    Args:
        logits: [V] fp32, of the verifier.
        request: gives temperature and filters; temperature 0 is one-hot on the argmax (the
            lowest id among equals).

    Returns:
        [V] fp32, summing to 1.
    """
    if request.greedy:
        probs = np.zeros_like(logits)
        probs[logits.argmax()] = 1
        return probs
    scaled = logits / np.float32(request.temperature)
    if 0 < request.top_k < scaled.size:
        kth = np.partition(scaled, scaled.size - request.top_k)[scaled.size - request.top_k]
        scaled = np.where(scaled >= kth, scaled, -np.inf)
    probs = softmax(scaled)
    if request.top_p < 1:
        # Ties with the last token kept are kept too, so that no order of ids decides.
        ordered = np.sort(probs)[::-1]
        last = int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), request.top_p))
        probs = np.where(probs >= ordered[min(last, ordered.size - 1)], probs, 0)
    if request.min_p > 0:
        probs = np.where(probs >= np.float32(request.min_p) * probs.max(), probs, 0)
    if request.top_p < 1 or request.min_p > 0:
        probs /= probs.sum()
    return probs


def race(weights: NDArray[np.float32], exponentials: NDArray[np.float32]) -> int:
    """The first index to arrive, each after its exponential over its weight.

    A sample of the weights when `exponentials` [V] are independent exponential(1) numbers (the
    Gumbel-max trick without logarithms); weights as in `draw`.
    """
    return int((weights / exponentials).argmax())


def draw(weights: NDArray[np.float32], uniform: float) -> int:
    """Inverse CDF: the first index whose cumulative weight exceeds `uniform` of the total.

    Args:
        weights: [V], not negative, at least one positive; need not sum to 1.
        uniform: in [0, 1).
    """
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding can put the product at the total itself: take the last token of positive weight.
    return min(index, int(np.searchsorted(cumulative, cumulative[-1])))
