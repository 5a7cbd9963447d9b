"""Calibrated confidences: what `dspark calibrate` fitted, and how the loop applies it.

The drafter's confidence c_k = sigmoid(z_k) estimates that draft token x_k is accepted if all before
it are. Trained heads are overconfident, and greedy decoding accepts at other rates than sampling,
so each position has a temperature and an offset for either. A temperature alone, as in DSpark's
sequential temperature scaling, cannot move a confidence across one half, which a head that says .64
where .48 is true needs.

A second signal joins the head's: the log-odds s_k of the likeliest token that x_k could be. It is
known before x_k is drawn, too, and tells more about greedy drafts than the head, which learned from
sampled ones: c_k = sigmoid(z_k / T_k + w_k s_k + b_k).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.cost import TableError, as_tuples
from runtime.manifest import Manifest

FORMAT = 2
PATH = "calibration/calibration.json"  # in the engine folder
COMMAND = "dspark calibrate"
MODES = ("greedy", "sampling")


@dataclass(frozen=True)
class Scaling:
    """For one mode: the parameters T, w and b, and what held-out rounds say about them.

    The lists have one entry for each position of the block; `ece` is the expected calibration
    error of the survival a_k = c_1 ... c_k, `auc` how well it ranks rounds by surviving.
    """

    temperatures: tuple[float, ...]
    certainty_weights: tuple[float, ...]
    offsets: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    auc: tuple[float, ...]
    num_rounds: int
    survivals: tuple[tuple[float, ...], ...]  # [n, g] calibrated, of n rounds: what to expect


@dataclass(frozen=True)
class Calibration:
    """Contents of calibration.json."""

    engine: str  # fingerprint
    greedy: Scaling
    sampling: Scaling
    format: int = FORMAT

    def log_odds(
        self, signals: NDArray[np.float32], greedy: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Log-odds of calibrated c_k [R, g] from the drafter's signals [R, g, 2].

        `greedy` [R] tells the mode.
        """
        mode = np.where(greedy, 0, 1)
        return scaled(signals, *(values[mode] for values in self._arrays))

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.float64], ...]:
        """T, w and b, [2, g] each: greedy, then sampling."""
        both = (self.greedy, self.sampling)
        columns = ((s.temperatures, s.certainty_weights, s.offsets) for s in both)
        return tuple(np.array(column) for column in zip(*columns, strict=True))

    def to_json(self) -> str:
        """The calibration as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def signals_of(outputs: Mapping[str, NDArray]) -> NDArray[np.float32] | None:
    """z and s [R, g, 2] from the drafter's outputs; None without a confidence head."""
    if "confidence_logits" not in outputs:
        return None
    return np.stack([outputs["confidence_logits"], outputs["certainty_logits"]], axis=-1)


def head_confidence(signals: NDArray[np.float32]) -> NDArray[np.float64]:
    """What the confidence head itself says, c_k [...] of signals [..., 2]."""
    return sigmoid(signals[..., 0])


def scaled(
    signals: NDArray, temperatures: NDArray, weights: NDArray, offsets: NDArray
) -> NDArray[np.float64]:
    """z / T + w s + b [..., g] of signals [..., g, 2]; parameters [..., g]."""
    result: NDArray[np.float64] = (
        signals[..., 0] / temperatures + signals[..., 1] * weights + offsets
    )
    return result


def sigmoid(logits: NDArray) -> NDArray[np.float64]:
    """1 / (1 + exp(-z)) in float64, without overflow."""
    result: NDArray[np.float64] = 0.5 * (1 + np.tanh(0.5 * np.asarray(logits, np.float64)))
    return result


def parse_calibration(text: str) -> Calibration:
    """A calibration from its JSON; raises TableError when this version did not write it."""
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise TableError(f"this version reads format {FORMAT}: run `{COMMAND}`")
        greedy, sampling = (Scaling(**as_tuples(data.pop(mode))) for mode in MODES)
        return Calibration(greedy=greedy, sampling=sampling, **data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TableError(f"the calibration cannot be read ({error!r}): run `{COMMAND}`") from error


def load_calibration(engine_dir: Path, manifest: Manifest) -> Calibration:
    """The calibration of this pair. Raises TableError naming the command that makes one."""
    path = engine_dir / (manifest.calibration or PATH)
    if not path.is_file():
        raise TableError(f"the confidences are not calibrated: run `{COMMAND}`")
    calibration = parse_calibration(path.read_text())
    if calibration.engine != manifest.fingerprint:
        raise TableError(f"the calibration is of another pair of models: run `{COMMAND}`")
    return calibration
