"""Fits what turns the drafter's confidences into probabilities: `engines/calibration`.

Drafts of self-made prompts are verified as a whole and their outcomes recorded. Position by
position, left to right, c_k = sigmoid(z_k / T_k + w_k s_k + b_k) is fitted so that the *product*
c_1 ... c_k matches how often k tokens survive, earlier positions held fixed (DSpark section 3.3,
sequential temperature scaling). Two differences: w_k and b_k (see `runtime.calibration`), and the
log loss as criterion, because with an offset the calibration error alone is least for a constant.

Censoring: a round says something about position k only if k tokens were verified; then it is known
whether k survived, also after an earlier rejection. How many are verified does not depend on the
outcome, so leaving the others out biases nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from tqdm import tqdm

from export.publish import content_key, publish
from runtime.calibration import Calibration, Scaling, head_confidence, scaled, sigmoid
from runtime.config import RuntimeConfig
from runtime.decoder import Model, within_limits
from runtime.loop import Loop, Round
from runtime.manifest import hash_file, load_manifest
from runtime.request import InvalidRequest, Request, validate_request
from training.prompts import template_prompt
from training.scores import NUM_BINS, auc, expected_calibration_error

ROUNDS = 1200  # for each mode
BATCH = 8
MAX_NEW_TOKENS = 96
TEMPERATURES = {"greedy": 0.0, "sampling": 1.0}
PROMPT_SEED = 20_240_607  # another than training's, or the drafter would have seen the answers
NUM_SURVIVALS = 64  # rounds kept as what to expect

# Of log T, w and b. Being surer never counts against a draft.
_BOUNDS = ((np.log(0.2), np.log(20)), (0, 4), (-6, 6))
_TINY = 1e-6

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rounds:
    """Outcomes of n drafts: signals [n, g, 2], and [n] each: verified, accepted, request number."""

    signals: NDArray[np.float32]
    verified: NDArray[np.int64]
    accepted: NDArray[np.int64]
    request: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.signals)

    def of(self, rows: NDArray[np.bool_]) -> Rounds:
        """The rounds that `rows` [n] selects."""
        return Rounds(
            self.signals[rows], self.verified[rows], self.accepted[rows], self.request[rows]
        )


class RoundLog:
    """Collects a loop's rounds; give it to `Loop.on_round`."""

    def __init__(self) -> None:
        self._rows: list[tuple[NDArray[np.float32], int, int, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __call__(self, row: Round) -> None:
        """Take one round."""
        self._rows.append(
            (row.signals, row.num_verified, row.num_accepted, row.sequence.request_id)
        )

    def rounds(self, first_request: int = 0) -> Rounds:
        """What was collected, request by request in the order of their rounds.

        `first_request` is the loop's id of the one to be number 0.
        """
        rows = sorted(self._rows, key=lambda row: row[3])
        signals, *numbers = zip(*rows, strict=True)
        verified, accepted, request = (np.array(n, np.int64) for n in numbers)
        return Rounds(np.stack(signals), verified, accepted, request - first_request)


def calibrate(
    folder: Path, threads: int, num_rounds: int = ROUNDS, prompts: list[str] | None = None
) -> bool:
    """Fit the confidences of the pair in `folder` and publish `engines/calibration`.

    Returns False when that is up to date: same engines, prompts, rounds and code; also when the
    drafter has no confidence head. `prompts` None takes self-made ones. Raises ManifestError and
    EngineError when the engines cannot run, PublishError when the disk is full.
    """
    engine_dir = folder / "engines"
    manifest = load_manifest(engine_dir)
    if manifest.drafter is None or not manifest.drafter.has_confidence:
        return False
    key = content_key(manifest.fingerprint, num_rounds, prompts, hash_file(Path(__file__)))

    def make(partial: Path) -> None:
        config = RuntimeConfig(
            num_threads=threads, max_batch_requests=BATCH, policy="fixed", prefix_cache_mb=0
        )
        model = Model(engine_dir, folder / "hf", within_limits(manifest, config))
        rounds = {
            mode: record(model, temperature, num_rounds, prompts, mode)
            for mode, temperature in TEMPERATURES.items()
        }
        model.close()
        scalings = {mode: fit(own) for mode, own in rounds.items()}
        calibration = Calibration(manifest.fingerprint, scalings["greedy"], scalings["sampling"])
        (partial / "calibration.json").write_text(calibration.to_json())
        plot(rounds, scalings, partial / "reliability.png")

    return publish(engine_dir / "calibration", key, make)


def record(
    model: Model, temperature: float, num_rounds: int, prompts: list[str] | None, name: str
) -> Rounds:
    """At least `num_rounds` rounds with the whole block verified."""
    loop, log = model.make_loop("fixed"), RoundLog()
    loop.on_round = log
    requests = _requests(model, temperature, prompts)
    with tqdm(total=num_rounds, unit="round", desc=f"calibrate {name}") as bar:
        while len(log) < num_rounds:
            _fill(loop, requests)
            before = len(log)
            loop.step()
            bar.update(len(log) - before)
    return log.rounds()


def _fill(loop: Loop, requests: Iterator[Request]) -> None:
    while len(loop.admission.running) + len(loop.admission.waiting) < BATCH:
        loop.add(next(requests), lambda output: None)


def _requests(model: Model, temperature: float, prompts: list[str] | None) -> Iterator[Request]:
    """Requests without end; prompts that leave no room for an answer are passed over."""
    random = np.random.default_rng(PROMPT_SEED)
    seed = 0
    while True:
        for text in prompts or [template_prompt(random)]:
            seed += 1
            ids = model.tokenizer.encode_prompt(
                text, not model.tokenizer.has_chat_template, model.config.max_prompt_bytes
            )
            fields = {"temperature": temperature, "acceptance": "rejection", "seed": seed}
            room = model.limits.max_model_tokens - len(ids)
            try:
                yield validate_request(
                    {"prompt_ids": ids, "max_tokens": min(MAX_NEW_TOKENS, room), **fields},
                    model.limits,
                )
            except InvalidRequest:
                continue


class Fit(NamedTuple):
    """T, w and b of sigmoid(z / T + w s + b), [g] each."""

    temperatures: Floats
    weights: Floats
    offsets: Floats

    def survival(self, signals: NDArray[np.float32]) -> Floats:
        """Calibrated a_k [n, g] of signals [n, g, 2]."""
        result: Floats = np.cumprod(sigmoid(scaled(signals, *self)), axis=1)
        return result


def fit(rounds: Rounds) -> Scaling:
    """The scaling of one mode from all rounds.

    The errors and areas it reports come from fitting one half of the requests and judging the
    other, both ways round.
    """
    fitted = fit_positions(rounds)
    half = rounds.request % 2 == 0
    survival = np.empty(rounds.signals.shape[:2])
    for rows in (half, ~half):
        own = fit_positions(rounds.of(~rows)) if rows.any() and (~rows).any() else fitted
        survival[rows] = own.survival(rounds.signals[rows])
    raw = np.cumprod(head_confidence(rounds.signals), axis=1)
    positions = range(survival.shape[1])
    kept = np.linspace(0, len(rounds) - 1, min(NUM_SURVIVALS, len(rounds))).astype(int)
    temperatures, weights, offsets = (tuple(values.tolist()) for values in fitted)
    return Scaling(
        temperatures=temperatures,
        certainty_weights=weights,
        offsets=offsets,
        ece_before=errors(rounds, raw),
        ece_after=errors(rounds, survival),
        auc=tuple(_known(auc(*outcomes(rounds, survival, k)), 0.5) for k in positions),
        num_rounds=len(rounds),
        survivals=tuple(map(tuple, np.round(fitted.survival(rounds.signals[kept]), 4).tolist())),
    )


def fit_positions(rounds: Rounds) -> Fit:
    """Fitted from left to right."""
    block = rounds.signals.shape[1]
    result = Fit(np.ones(block), np.zeros(block), np.zeros(block))
    before = np.ones(len(rounds))
    for k in range(block):
        known = rounds.verified > k
        if known.any():
            survived = rounds.accepted[known] > k
            found = _fit_position(rounds.signals[known, k], before[known], survived)
            for values, value in zip(result, found, strict=True):
                values[k] = value
        before = before * sigmoid(scaled(rounds.signals, *result)[:, k])
    return result


def _fit_position(
    signals: NDArray[np.float32], before: Floats, survived: NDArray[np.bool_]
) -> tuple[float, float, float]:
    """T, w and b of least log loss within `_BOUNDS`; survivals so far are `before` [n]."""
    exact = signals.astype(np.float64)  # fp32 would drown the search's small differences

    def loss(parameters: Floats) -> float:
        log_temperature, weight, offset = parameters
        survival = before * sigmoid(scaled(exact, np.exp(log_temperature), weight, offset))
        likelihood = np.where(survived, survival, 1 - survival)
        return float(-np.log(np.maximum(likelihood, _TINY)).mean())

    log_temperature, weight, offset = minimize(loss, np.zeros(3), bounds=_BOUNDS).x.tolist()
    return float(np.exp(log_temperature)), weight, offset


def outcomes(rounds: Rounds, survival: Floats, k: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Predicted survival and whether it came true, of the rounds that tell about position k."""
    known = rounds.verified > k
    return survival[known, k], rounds.accepted[known] > k


def errors(rounds: Rounds, survival: Floats) -> tuple[float, ...]:
    """Expected calibration error of survivals [n, g] at each position; 0 without a sample."""
    positions = range(survival.shape[1])
    return tuple(
        _known(expected_calibration_error(*outcomes(rounds, survival, k)), 0.0) for k in positions
    )


def _known(value: float, otherwise: float) -> float:
    return otherwise if np.isnan(value) else value


def plot(rounds: dict[str, Rounds], scalings: dict[str, Scaling], path: Path) -> None:
    """Reliability of the survival at each position, before and after, for each mode."""
    # The plain Agg canvas: no display, no global pyplot state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    block = next(iter(rounds.values())).signals.shape[1]
    size = (2.1 * block, 2.3 * len(rounds))
    figure = Figure(figsize=size, dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rounds), block, squeeze=False, sharex=True, sharey=True)
    for row, (mode, own) in zip(grid, rounds.items(), strict=True):
        scaling = scalings[mode]
        parameters = (scaling.temperatures, scaling.certainty_weights, scaling.offsets)
        raw = np.cumprod(head_confidence(own.signals), axis=1)
        fitted = Fit(*map(np.array, parameters)).survival(own.signals)
        for k, axes in enumerate(row):
            axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
            for survival, label in ((raw, "before"), (fitted, "after")):
                axes.plot(*_reliability(*outcomes(own, survival, k)), marker=".", label=label)
            axes.set_title(f"{mode}, position {k + 1}", fontsize=8)
            axes.grid(alpha=0.3)
    grid[0, 0].legend(fontsize=7)
    figure.supxlabel("predicted survival", fontsize=8)
    figure.supylabel("survived", fontsize=8)
    figure.savefig(path)


def _reliability(predicted: Floats, happened: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    bins = np.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    filled = counts > 0
    return tuple(  # type: ignore[return-value]
        np.bincount(bins, values, minlength=NUM_BINS)[filled] / counts[filled]
        for values in (predicted, happened)
    )
