"""What the scheduler has seen since start, and how that corrects what was measured beforehand.

The calibration was fitted on other prompts and the cost table measured on an engine alone. Both are
good to a few percent, which is as much as a decision between drafting and plain decoding may hang
on. Everything here is of past rounds and steps, so that using it leaks nothing about a draft.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from runtime.calibration import Calibration

RECENT_ROUNDS = 64  # of all requests of a mode, whose survivals say what to expect of new ones
OUTCOME_ROUNDS = 512  # over which what was accepted is compared with what was promised
OUTCOME_PRIOR_TOKENS = 50.0  # promised and accepted, before any outcome is known
NEIGHBOUR_STEPS = 8  # steps of the two kinds that are at most so far apart are compared
STEP_WEIGHT = 0.3  # of the newest step of a kind in its moving average
COMPARISON_WEIGHT = 0.05  # of the newest comparison of the two kinds
MAX_COMPARISON = 0.25  # of the logarithm: a step that met something else says nothing

Floats = NDArray[np.float64]


class Experience:
    """Of one loop; "greedy" is a request's mode, the other one being sampling."""

    def __init__(self, calibration: Calibration) -> None:
        """Start with the calibration's own rounds."""
        self._recent = {  # [n, g] survivals
            True: np.array(calibration.greedy.survivals, np.float64)[-RECENT_ROUNDS:],
            False: np.array(calibration.sampling.survivals, np.float64)[-RECENT_ROUNDS:],
        }
        # Draft tokens accepted and promised of late.
        self._outcomes = {greedy: np.full(2, OUTCOME_PRIOR_TOKENS) for greedy in (True, False)}
        # By whether anything was drafted: log of measured over predicted seconds, and its age.
        self._slowness = {False: 0.0, True: 0.0}
        self._steps_since = {False: NEIGHBOUR_STEPS + 1, True: NEIGHBOUR_STEPS + 1}
        self._log_drafting_factor = 0.0

    @property
    def block_size(self) -> int:
        """Draft tokens per block, g."""
        return int(self._recent[True].shape[1])

    def add_rounds(self, greedy: bool, survivals: list[Floats]) -> None:
        """Take in survivals [g] of a request's rounds."""
        self._recent[greedy] = np.concatenate([self._recent[greedy], survivals])[-RECENT_ROUNDS:]

    def typical_rounds(self, greedy: bool, count: int, shift: int) -> list[Floats]:
        """`count` survivals [g] from bad rounds to good ones, beginning elsewhere by `shift`."""
        recent = self._recent[greedy]
        places = ((np.arange(count) + shift) % count + 0.5) * len(recent) / count
        return list(recent[np.argsort(recent.sum(axis=1))[places.astype(int)]])

    def add_outcome(self, greedy: bool, promised: float, accepted: int) -> None:
        """Take in how many tokens of a draft were expected to survive and how many did."""
        outcomes = self._outcomes[greedy]
        outcomes *= 1 - 1 / OUTCOME_ROUNDS
        outcomes += (accepted, promised)

    def corrected(self, survival: Floats, greedy: NDArray[np.bool_] | bool) -> Floats:
        """Survivals [..., g], at most 1, by how promises of that mode [...] were kept of late."""
        kept = [float(np.divide(*self._outcomes[mode])) for mode in (True, False)]
        return np.minimum(1.0, survival * np.asarray(np.where(greedy, *kept))[..., None])

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
