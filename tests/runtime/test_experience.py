"""What the scheduler learns: typical rounds, how confidences turn out, what drafting costs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runtime.calibration import sigmoid
from runtime.experience import (
    MAX_COMPARISON,
    NEIGHBOUR_STEPS,
    OFFSET_STEP,
    RECENT_ROUNDS,
    Experience,
)
from tests.runtime.fakes import BLOCK_SIZE, make_tables


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


def test_offsets_follow_the_outcomes_of_their_mode(experience: Experience) -> None:
    """Confidences of one half; of greedy drafts 30 % survive at each position, of others 80 %."""
    random = np.random.default_rng(0)
    late = np.zeros((2, BLOCK_SIZE))
    for i in range(4000):
        for mode, rate in ((0, 0.3), (1, 0.8)):
            survived = np.logical_and.accumulate(random.random(BLOCK_SIZE) < rate)
            confidence = sigmoid(experience.offsets[mode])
            experience.add_outcome(mode == 0, confidence, BLOCK_SIZE, int(survived.sum()))
            late[mode] += (i >= 2000) * confidence / 2000
    assert late[0, :2] == pytest.approx([0.3, 0.3], abs=0.04)  # few get further
    assert late[1] == pytest.approx(np.full(BLOCK_SIZE, 0.8), abs=0.04)


def test_only_positions_with_an_outcome_are_learned_from(experience: Experience) -> None:
    half = np.full(BLOCK_SIZE, 0.5)
    experience.add_outcome(True, half, 3, 1)  # the third was verified, but on a rejected second
    up, down = 0.5 * OFFSET_STEP, -0.5 * OFFSET_STEP
    assert experience.offsets[0, :3].tolist() == pytest.approx([up, down, 0])
    experience.add_outcome(False, half, 2, 2)  # cut after the second
    assert experience.offsets[1, :3].tolist() == pytest.approx([up, up, 0])
    experience.add_outcome(False, half, 0, 0)
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
