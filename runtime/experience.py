"""What the scheduler has seen since start, and how that corrects what was measured beforehand.

The calibration was fitted on other prompts and the cost table measured on an engine alone. Both are
good to some percent, which is as much as a decision between drafting and plain decoding may hang
on. Everything here is of past rounds and steps, so that using it leaks nothing about a draft.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from runtime.calibration import Calibration, sigmoid

RECENT_ROUNDS = 64  # of all requests of a mode, whose survivals say what to expect of new ones
OFFSET_STEP = 0.02  # by which an outcome moves its offset; about 200 outcomes count
SLOPE_STEP = 0.005
MAX_SLOPE = 2.0  # and 0 at least, or very large log-odds would turn the ranking round
LEANING_STEP = 0.15  # a request is short
NEIGHBOUR_STEPS = 8  # steps of the two kinds that are at most so far apart are compared
STEP_WEIGHT = 0.3  # of the newest step of a kind in its moving average
COMPARISON_WEIGHT = 0.05  # of the newest comparison of the two kinds
MAX_COMPARISON = 0.25  # of the logarithm: a step that met something else says nothing

Floats = NDArray[np.float64]


class Experience:
    """Of one loop; "greedy" is a request's mode, the other one being sampling."""

    def __init__(self, calibration: Calibration) -> None:
        """Start with the calibration's own rounds."""
        self._calibration = calibration
        self._recent = {  # survivals [g] by mode
            greedy: deque(np.array(scaling.survivals, np.float64), maxlen=RECENT_ROUNDS)
            for greedy, scaling in ((True, calibration.greedy), (False, calibration.sampling))
        }
        # Of the calibration's log-odds, [2, g]: greedy, then sampling.
        self.offsets = np.zeros((2, self.block_size))
        self.slopes = np.ones((2, self.block_size))
        # By whether anything was drafted: log of measured over predicted seconds, and its age.
        self._slowness = {False: 0.0, True: 0.0}
        self._steps_since = {False: NEIGHBOUR_STEPS + 1, True: NEIGHBOUR_STEPS + 1}
        self._log_drafting_factor = 0.0

    @property
    def block_size(self) -> int:
        """Draft tokens per block, g."""
        return len(self._recent[True][0])

    def judge(
        self, signals: NDArray[np.float32], greedy: NDArray[np.bool_], leanings: Floats
    ) -> tuple[Floats, Floats]:
        """Log-odds as calibrated and c_k as corrected since, [R, g] each.

        Args:
            signals: [R, g, 2] of the drafter.
            greedy: [R] modes.
            leanings: [R] by how much each request does better than others, see `add_outcome`.
        """
        mode = np.where(greedy, 0, 1)
        log_odds = self._calibration.log_odds(signals, greedy)
        corrected = self.slopes[mode] * log_odds + self.offsets[mode] + leanings[:, None]
        return log_odds, sigmoid(corrected)

    def add_rounds(self, greedy: bool, survivals: list[Floats]) -> None:
        """Take in survivals [g] of a request's rounds."""
        self._recent[greedy].extend(survivals)

    def typical_rounds(self, greedy: bool) -> Floats:
        """Survivals [n, g] of recent rounds, from bad ones to good ones."""
        recent = np.array(self._recent[greedy])
        return recent[np.argsort(recent.sum(axis=1))]

    def add_outcome(
        self,
        greedy: bool,
        log_odds: Floats,
        confidence: Floats,
        num_verified: int,
        num_accepted: int,
    ) -> float:
        """Take in what `judge` said of a draft, [g] each, and what came of it.

        A step down the gradient of the log loss, for each position whose predecessors survived.
        Returns by how much the leaning of its request moves.
        """
        known = min(num_accepted + 1, num_verified)
        surprise = (np.arange(known) < num_accepted) - confidence[:known]
        mode = 0 if greedy else 1
        self.offsets[mode, :known] += OFFSET_STEP * surprise
        slopes = self.slopes[mode, :known]
        slopes += SLOPE_STEP * surprise * log_odds[:known]
        np.clip(slopes, 0, MAX_SLOPE, out=slopes)
        return LEANING_STEP * float(surprise.sum())

    def add_step(self, drafted: bool, predicted_s: float, measured_s: float) -> None:
        """Take in a decoding step's seconds; near a step of the other kind the two are compared.

        Comparing neighbours leaves out what slows both kinds alike, such as other load.
        """
        now = math.log(measured_s / predicted_s)
        fresh = self._steps_since[drafted] <= NEIGHBOUR_STEPS
        self._slowness[drafted] += (STEP_WEIGHT if fresh else 1.0) * (now - self._slowness[drafted])
        self._steps_since[drafted] = 0
        self._steps_since[not drafted] += 1
        if self._steps_since[not drafted] <= NEIGHBOUR_STEPS:
            difference = self._slowness[True] - self._slowness[False]
            difference = min(MAX_COMPARISON, max(-MAX_COMPARISON, difference))
            self._log_drafting_factor += COMPARISON_WEIGHT * (
                difference - self._log_drafting_factor
            )

    @property
    def drafting_factor(self) -> float:
        """By how much steps with drafts are slower than predicted where plain ones are not."""
        return math.exp(self._log_drafting_factor)
