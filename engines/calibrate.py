"""Fits what turns the drafter's confidences into probabilities: `engines/calibration`.

Drafts of self-made prompts are verified as a whole and their outcomes recorded. Position by
position, left to right, c_k = sigmoid(z_k / T_k + b_k) is fitted so that the *product* c_1 ... c_k
matches how often k tokens survive, earlier positions held fixed (DSpark section 3.3, sequential
temperature scaling). Two differences: the offset b_k (see `runtime.calibration`), and the log loss
as criterion, because with an offset the calibration error alone is least for a constant.

Censoring: a round says something about position k only if k tokens were verified; then it is known
whether k survived, also after an earlier rejection. How many are verified does not depend on the
outcome, so leaving the others out biases nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from export.publish import content_key, publish
from runtime.calibration import Calibration, Scaling, sigmoid
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

_LOG_TEMPERATURES = np.linspace(np.log(0.2), np.log(20), 21)
_OFFSETS = np.linspace(-4, 4, 21)
_TINY = 1e-6

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rounds:
    """Outcomes of n drafts: logits [n, g], and [n] each: verified, accepted, request number."""

    logits: NDArray[np.float32]
    verified: NDArray[np.int64]
    accepted: NDArray[np.int64]
    request: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.logits)

    def of(self, rows: NDArray[np.bool_]) -> Rounds:
        """The rounds that `rows` [n] selects."""
        return Rounds(
            self.logits[rows], self.verified[rows], self.accepted[rows], self.request[rows]
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
            (row.confidence_logits, row.num_verified, row.num_accepted, row.sequence.request_id)
        )

    def rounds(self, first_request: int = 0) -> Rounds:
        """What was collected, request by request in the order of their rounds.

        `first_request` is the loop's id of the one to be number 0.
        """
        rows = sorted(self._rows, key=lambda row: row[3])
        logits, *numbers = zip(*rows, strict=True)
        verified, accepted, request = (np.array(n, np.int64) for n in numbers)
        return Rounds(np.stack(logits), verified, accepted, request - first_request)


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


def fit(rounds: Rounds) -> Scaling:
    """Temperatures and offsets of one mode from all rounds.

    The errors and areas it reports come from fitting one half of the requests and judging the
    other, both ways round.
    """
    temperatures, offsets = fit_positions(rounds)
    half = rounds.request % 2 == 0
    survival = np.empty(rounds.logits.shape)
    for rows in (half, ~half):
        own = fit_positions(rounds.of(~rows)) if rows.any() and (~rows).any() else None
        survival[rows] = survival_of(rounds.logits[rows], *(own or (temperatures, offsets)))
    raw = np.cumprod(sigmoid(rounds.logits), axis=1)
    positions = range(rounds.logits.shape[1])
    kept = np.linspace(0, len(rounds) - 1, min(NUM_SURVIVALS, len(rounds))).astype(int)
    expected = survival_of(rounds.logits[kept], temperatures, offsets)
    return Scaling(
        temperatures=tuple(temperatures.tolist()),
        offsets=tuple(offsets.tolist()),
        ece_before=errors(rounds, raw),
        ece_after=errors(rounds, survival),
        auc=tuple(_known(auc(*outcomes(rounds, survival, k)), 0.5) for k in positions),
        num_rounds=len(rounds),
        survivals=tuple(map(tuple, np.round(expected, 4).tolist())),
    )


def fit_positions(rounds: Rounds) -> tuple[Floats, Floats]:
    """T [g] and b [g] of sigmoid(z / T + b), fitted from left to right."""
    block = rounds.logits.shape[1]
    temperatures, offsets = np.ones(block), np.zeros(block)
    before = np.ones(len(rounds))
    for k in range(block):
        z = rounds.logits[:, k].astype(np.float64)
        known = rounds.verified > k
        if known.any():
            survived = rounds.accepted[known] > k
            temperatures[k], offsets[k] = _fit_position(z[known], before[known], survived)
        before = before * sigmoid(z / temperatures[k] + offsets[k])
    return temperatures, offsets


def _fit_position(z: Floats, before: Floats, survived: NDArray[np.bool_]) -> tuple[float, float]:
    """Grid search of both, then a finer one around the best."""
    logs, offsets = _LOG_TEMPERATURES, _OFFSETS
    best = (0.0, 0.0)
    for _ in range(3):
        losses = np.array([[_loss(z, before, survived, t, b) for b in offsets] for t in logs])
        i, j = np.unravel_index(losses.argmin(), losses.shape)
        best = (float(logs[i]), float(offsets[j]))
        step_t, step_b = logs[1] - logs[0], offsets[1] - offsets[0]
        logs = np.linspace(best[0] - step_t, best[0] + step_t, 9)
        offsets = np.linspace(best[1] - step_b, best[1] + step_b, 9)
    return float(np.exp(best[0])), best[1]


def _loss(
    z: Floats, before: Floats, survived: NDArray[np.bool_], log_temperature: float, offset: float
) -> float:
    survival = before * sigmoid(z * np.exp(-log_temperature) + offset)
    likelihood = np.where(survived, survival, 1 - survival)
    return float(-np.log(np.maximum(likelihood, _TINY)).mean())


def survival_of(logits: NDArray[np.float32], temperatures: Floats, offsets: Floats) -> Floats:
    """Calibrated survival [n, g] of logits [n, g]."""
    result: Floats = np.cumprod(sigmoid(logits / temperatures + offsets), axis=1)
    return result


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

    block = next(iter(rounds.values())).logits.shape[1]
    size = (2.1 * block, 2.3 * len(rounds))
    figure = Figure(figsize=size, dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rounds), block, squeeze=False, sharex=True, sharey=True)
    for row, (mode, own) in zip(grid, rounds.items(), strict=True):
        scaling = scalings[mode]
        raw = np.cumprod(sigmoid(own.logits), axis=1)
        fitted = survival_of(own.logits, np.array(scaling.temperatures), np.array(scaling.offsets))
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
