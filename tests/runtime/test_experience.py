"""What the scheduler learns: typical rounds, how confidences turn out, what drafting costs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.calibration import sigmoid
from runtime.experience import (
    LEANING_STEP,
    MAX_COMPARISON,
    MAX_SLOPE,
    NEIGHBOUR_STEPS,
    OFFSET_STEP,
    RECENT_ROUNDS,
    SLOPE_STEP,
    Experience,
)
from tests.runtime.fakes import BLOCK_SIZE, make_tables

Truth = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # acceptance rates by log-odds


@pytest.fixture
def experience() -> Experience:
    return Experience(make_tables(survival=0.5).calibration)


def test_typical_rounds_are_the_last_ones_of_the_mode_bad_ones_first(
    experience: Experience,
) -> None:
    assert experience.block_size == BLOCK_SIZE
    rounds = list(np.random.default_rng(0).random((RECENT_ROUNDS + 10, BLOCK_SIZE)))
    experience.add_rounds(True, rounds)
    expected = sorted(rounds[10:], key=lambda row: float(row.sum()))
    assert experience.typical_rounds(True) == pytest.approx(np.array(expected))
    assert set(experience.typical_rounds(False).reshape(-1)) == {0.5}


def _live_through(experience: Experience, greedy: bool, count: int, truth: Truth) -> float:
    """Learn from drafts of one request; its signals are random, what is accepted follows `truth`.

    Returns the log loss of the second half, per position that was reached.
    """
    random = np.random.default_rng(0)
    leaning, losses = np.zeros(1), []
    for i in range(count):
        signals = random.normal(size=(1, BLOCK_SIZE, 2)).astype(np.float32)
        log_odds, confidence = experience.judge(signals, np.array([greedy]), leaning)
        happens = random.random(BLOCK_SIZE) < truth(log_odds[0])
        accepted = int(np.logical_and.accumulate(happens).sum())
        leaning += experience.add_outcome(greedy, log_odds[0], confidence[0], BLOCK_SIZE, accepted)
        reached = min(accepted + 1, BLOCK_SIZE)
        if i >= count // 2:
            right = np.where(happens, confidence[0], 1 - confidence[0])[:reached]
            losses += (-np.log(right)).tolist()
    return float(np.mean(losses))


@pytest.mark.parametrize("greedy", [True, False])
def test_corrections_follow_the_outcomes_of_their_mode(
    experience: Experience, greedy: bool
) -> None:
    """The calibration is right about nothing; what is learned comes near the best there is."""
    best = _live_through(experience, greedy, 6000, lambda log_odds: sigmoid(0.4 * log_odds + 1))
    assert best < 0.62  # of always saying sigmoid(1): 0.585, of the calibration: 0.69
    mode, other = (0, 1) if greedy else (1, 0)
    assert experience.slopes[mode, 0] == pytest.approx(0.4, abs=0.3)
    assert (experience.offsets[other] == 0).all()
    assert (experience.slopes[other] == 1).all()


def test_a_request_leans_by_its_own_outcomes(experience: Experience) -> None:
    """After ten rounds without a hit one is thought less of, and others hardly."""
    signals, leaning = np.zeros((1, BLOCK_SIZE, 2), np.float32), 0.0
    for _ in range(10):
        judged = experience.judge(signals, np.array([True]), np.array([leaning]))
        leaning += experience.add_outcome(True, judged[0][0], judged[1][0], BLOCK_SIZE, 0)
    both = experience.judge(np.tile(signals, (2, 1, 1)), np.ones(2, bool), np.array([leaning, 0]))
    assert both[1][:, 0] == pytest.approx([0.33, 0.48], abs=0.02)


def test_slopes_stay_between_forgetting_the_signals_and_doubling_them(
    experience: Experience,
) -> None:
    for log_odds, low_or_high in ((500.0, 0.0), (-500.0, MAX_SLOPE)):
        for _ in range(3):  # surprised each time: sure of what does not happen, or doubting it
            confidence = np.array([0.9, *[0.5] * (BLOCK_SIZE - 1)])
            experience.add_outcome(True, np.full(BLOCK_SIZE, log_odds), confidence, 1, 0)
        assert experience.slopes[0, 0] == low_or_high


def test_only_positions_with_an_outcome_are_learned_from(experience: Experience) -> None:
    half, none = np.full(BLOCK_SIZE, 0.5), np.ones(BLOCK_SIZE)
    step, up, down = LEANING_STEP, 0.5 * OFFSET_STEP, -0.5 * OFFSET_STEP
    # the third was verified, but on a rejected second
    assert experience.add_outcome(True, none, half, 3, 1) == pytest.approx(0)
    assert experience.offsets[0, :3].tolist() == pytest.approx([up, down, 0])
    slopes = 1 + np.array([0.5, -0.5, 0]) * SLOPE_STEP
    assert experience.slopes[0, :3].tolist() == pytest.approx(slopes.tolist())
    assert experience.add_outcome(False, none, half, 2, 2) == pytest.approx(step)  # cut after two
    assert experience.offsets[1, :3].tolist() == pytest.approx([up, up, 0])
    assert experience.add_outcome(False, none, half, 0, 0) == 0
    assert experience.offsets[1, :3].tolist() == pytest.approx([up, up, 0])


def _alternate(experience: Experience, slower: float, rounds: int = 300) -> None:
    """Blocks of either kind on a machine whose speed wanders by a factor of two."""
    for i in range(rounds):
        speed = 1.5 + 0.5 * math.sin(i / 20)
        drafted = i % 8 < 4
        experience.add_step(drafted, 0.1, 0.1 * speed * (slower if drafted else 1.0))


@pytest.mark.parametrize("slower", [0.85, 1.0, 1.15])
def test_the_cost_of_drafting_is_learned_beside_that_of_plain_steps(
    experience: Experience, slower: float
) -> None:
    _alternate(experience, slower)
    assert experience.drafting_factor == pytest.approx(slower, rel=0.02)


def test_one_kind_of_step_alone_says_nothing(experience: Experience) -> None:
    for _ in range(100):
        experience.add_step(True, 0.1, 0.3)
    assert experience.drafting_factor == 1
    for _ in range(NEIGHBOUR_STEPS):
        experience.add_step(False, 0.1, 0.3)
    assert experience.drafting_factor == pytest.approx(1)


def test_steps_far_apart_are_not_compared(experience: Experience) -> None:
    """The machine got three times slower meanwhile, as a run of one kind shows."""
    for _ in range(100):
        experience.add_step(False, 0.1, 0.1)
    experience.add_step(True, 0.1, 0.1)
    for i in range(NEIGHBOUR_STEPS + 20):
        experience.add_step(True, 0.1, 0.1 if i < NEIGHBOUR_STEPS else 0.3)
    assert experience.drafting_factor == pytest.approx(1)


def test_an_outlier_moves_little(experience: Experience) -> None:
    experience.add_step(False, 0.1, 0.1)
    experience.add_step(True, 0.1, 100.0)
    assert 1 < experience.drafting_factor < math.exp(0.1 * MAX_COMPARISON)
