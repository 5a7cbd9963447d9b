"""Filters against a brute-force reference in fp64, and the ends of the inverse CDF."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.request import MIN_TEMPERATURE, Request
from runtime.sampling import draw, softmax, target_probs
from tests.runtime.fakes import make_request

ALMOST_ONE = float(np.float32(1 - 2**-24))  # the largest uniform there is


def request(**fields: Any) -> Request:
    return make_request((1,), **{"temperature": 1.0, **fields})


def reference(logits: NDArray[np.float32], r: Request) -> NDArray[np.float64]:
    """Temperature, then top-k, top-p and min-p, each by its definition over sorted tokens."""
    scaled = (logits / np.float32(r.temperature)).astype(np.float64)
    probs = np.exp(scaled - scaled.max())
    order = np.argsort(-scaled, kind="stable").tolist()
    if r.top_k:
        order = order[: r.top_k]
    total, mass, kept = sum(probs[i] for i in order), 0.0, []
    for i in order:
        if mass >= r.top_p:
            break
        kept.append(i)
        mass += probs[i] / total
    result = np.zeros(len(logits))
    for i in kept:
        if probs[i] >= r.min_p * probs[order[0]]:
            result[i] = probs[i]
    return result / result.sum()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 40),
    temperature=st.sampled_from([0.1, 0.3, 0.7, 1.0, 2.0, 100.0]),
    top_k=st.integers(0, 45),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.99)),
)
def test_filters_equal_the_reference(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3
    r = request(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = target_probs(logits, r)
    assert probs.dtype == np.float32
    np.testing.assert_allclose(probs, reference(logits, r), atol=2e-6)


def test_filters_apply_in_their_order() -> None:
    """top-p counts the mass that top-k left: the other order would keep token 1 too."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    probs = target_probs(logits, request(top_k=2, top_p=0.55))
    np.testing.assert_allclose(probs, [1, 0, 0, 0])
    probs = target_probs(logits, request(top_p=0.55))
    np.testing.assert_allclose(probs, [4 / 7, 3 / 7, 0, 0], rtol=1e-6)


def test_the_temperature_is_applied_before_the_filters() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.25], np.float32))
    assert (target_probs(logits, request(min_p=0.4)) > 0).all()
    assert target_probs(logits, request(min_p=0.4, temperature=0.5)).tolist() == [1, 0, 0]


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.5}, {"top_p": 1e-9}, {"top_k": 1}])
def test_ties_with_the_last_token_kept_are_kept(fields: dict[str, Any]) -> None:
    """Which of two equal tokens survives must not depend on their ids."""
    logits = np.array([1, 1, 0, 1], np.float32)
    np.testing.assert_allclose(target_probs(logits, request(**fields)), [1 / 3, 1 / 3, 0, 1 / 3])


def test_the_most_likely_token_survives_the_strictest_filters() -> None:
    logits = np.array([0.5, 3, 2.99], np.float32)
    strict = request(top_k=1, top_p=1e-30, min_p=1.0, temperature=100.0)
    assert target_probs(logits, strict).tolist() == [0, 1, 0]


def test_greedy_is_one_hot_on_the_lowest_id_among_equals() -> None:
    logits = np.array([0, 5, 5], np.float32)
    assert target_probs(logits, request(temperature=0.0)).tolist() == [0, 1, 0]


def test_the_lowest_temperature_keeps_numbers_finite() -> None:
    """Below it the fp32 division overflows and probabilities become NaN."""
    logits = np.array([-3e4, 3e4, 2.9e4], np.float32)
    assert target_probs(logits, request(temperature=MIN_TEMPERATURE)).tolist() == [0, 1, 0]


def test_softmax_survives_large_and_absent_logits() -> None:
    np.testing.assert_allclose(softmax(np.array([1e4, 1e4], np.float32)), [0.5, 0.5])
    assert softmax(np.array([0, -np.inf], np.float32)).tolist() == [1, 0]
    rows = softmax(np.zeros((3, 4), np.float32))
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, 0.25)


def test_softmax_leaves_its_input_alone() -> None:
    logits = np.array([1, 2], np.float32)
    softmax(logits)
    assert logits.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("weights", "uniform", "index"),
    [
        ([1, 1], 0.0, 0),
        ([1, 1], 0.5, 1),  # intervals are closed on the left
        ([1, 1], 0.5 - 2**-24, 0),
        ([1, 1], ALMOST_ONE, 1),
        ([0, 0, 1], 0.0, 2),  # never a token of weight 0 in front
        ([1, 0, 0], ALMOST_ONE, 0),  # nor behind
        ([0, 1, 0, 1, 0], 0.5, 3),
        ([0, 1, 0, 1, 0], ALMOST_ONE, 3),
        ([3, 1], 0.7, 0),  # weights need not sum to 1
        ([1e-30, 0], ALMOST_ONE, 0),
        ([1e-45, 1e-45], ALMOST_ONE, 1),
    ],
)
def test_draw_is_the_inverse_cdf(weights: list[float], uniform: float, index: int) -> None:
    assert draw(np.array(weights, np.float32), uniform) == index
    assert draw(np.array(weights, np.float32), np.float32(uniform)) == index  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-7, 0.25, 1.0, 3.0]), min_size=1).filter(any),
    uniform=st.one_of(st.just(0.0), st.just(ALMOST_ONE), st.floats(0, ALMOST_ONE, width=32)),
)
def test_a_token_of_weight_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    array = np.array(weights, np.float32)
    index = draw(array, uniform)
    assert array[index] > 0
    before, total = float(array[:index].sum(dtype=float)), float(array.sum(dtype=float))
    assert before <= uniform * total * (1 + 1e-12)


def test_drawing_over_a_grid_of_uniforms_gives_the_weights() -> None:
    weights = np.array([0.1, 0, 0.6, 0.3], np.float32)
    drawn = [draw(weights, (i + 0.5) / 2000) for i in range(2000)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 2000, weights, atol=1e-3)
