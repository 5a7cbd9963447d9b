"""`dspark bench record`: confidences and outcomes of whole drafts, for judging and simulating.

Every prompt is decoded greedily and at temperature 1 with the whole block verified. The report says
how long accepted prefixes are and how well the calibration in use predicts them on these prompts;
the file keeps the rounds for `dspark simulate`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.prompts import read_prompts
from bench.workload import TEMPERATURES, Item
from engines.calibrate import RoundLog, Rounds, errors, outcomes
from runtime.calibration import Calibration, head_confidence, load_calibration, sigmoid
from runtime.cli import add_model_arguments, open_model, run_guarded
from runtime.config import ConfigError
from runtime.cost import TableError
from runtime.experience import Experience
from runtime.request import RequestOutput, validate_request
from training.scores import auc

BATCH = 8


@dataclass(frozen=True)
class Recording:
    """Rounds of both modes, and the requests [q] they belong to by `rounds.request`."""

    rounds: Rounds
    greedy: NDArray[np.bool_]  # [q]
    prompt_tokens: NDArray[np.int64]  # [q]
    prompt_set: NDArray[np.str_]  # [q]
    row: NDArray[np.int64]  # [q] of the prompt in its set

    def sizes(self) -> dict[str, int]:
        """Rows of each prompt set, in the order of recording."""
        names = dict.fromkeys(self.prompt_set.tolist())
        return {name: 1 + int(self.row[self.prompt_set == name].max()) for name in names}

    def find(self, item: Item) -> int:
        """Number of the recorded request that an item of the load benchmark asks for."""
        same_mode = self.greedy == (item.temperature == 0)
        found = same_mode & (self.prompt_set == item.prompt_set) & (self.row == item.row)
        return int(np.nonzero(found)[0][0])

    def of_mode(self, greedy: bool) -> Rounds:
        """The rounds of one mode."""
        return self.rounds.of(self.greedy[self.rounds.request] == greedy)

    def survival(self, calibration: Calibration | None) -> NDArray[np.float64]:
        """a_k [n, g] of all rounds, calibrated if there is a calibration."""
        if calibration is None:
            return np.cumprod(head_confidence(self.rounds.signals), axis=1)
        greedy = self.greedy[self.rounds.request]
        return np.cumprod(sigmoid(calibration.log_odds(self.rounds.signals, greedy)), axis=1)

    def learned_survival(self, calibration: Calibration) -> NDArray[np.float64]:
        """a_k [n, g] as a server that starts with this calibration comes to see them.

        It meets the requests BATCH at a time in an order that mixes them, and learns from outcomes.
        """
        experience = Experience(calibration)
        result = np.empty(self.rounds.signals.shape[:2])
        leanings = np.zeros(len(self.greedy))
        arrivals = np.random.default_rng(0).permutation(len(self.greedy)).tolist()
        running: list[list[int]] = []  # rows of each request that are still to come
        while arrivals or running:
            while arrivals and len(running) < BATCH:
                running.append(np.nonzero(self.rounds.request == arrivals.pop())[0].tolist()[::-1])
            running = [rows for rows in running if rows]
            for row in [rows.pop() for rows in running]:
                own = self.rounds.request[row : row + 1]
                greedy, signals = self.greedy[own], self.rounds.signals[row : row + 1]
                log_odds, confidence = experience.judge(signals, greedy, leanings[own])
                result[row] = np.cumprod(confidence)
                outcome = int(self.rounds.verified[row]), int(self.rounds.accepted[row])
                leanings[own] += experience.add_outcome(
                    bool(greedy[0]), log_odds[0], confidence[0], *outcome
                )
        return result

    def save(self, path: Path) -> None:
        """Write an .npz file."""
        np.savez_compressed(
            path,
            **vars(self.rounds),
            **{name: getattr(self, name) for name in _REQUEST_FIELDS},
        )


_REQUEST_FIELDS = ("greedy", "prompt_tokens", "prompt_set", "row")


def load_recording(path: Path) -> Recording:
    """Read what `Recording.save` wrote. Raises ConfigError when the file is something else."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = ("signals", "verified", "accepted", "request")
            rounds = Rounds(*(arrays[name] for name in names))
            return Recording(rounds, *(arrays[name] for name in _REQUEST_FIELDS))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path} holds no recorded rounds: run `dspark bench record`") from error


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench record`."""
    parser = kinds.add_parser(
        "record",
        help="confidences and outcomes of whole drafts, and how well calibrated they are",
        description="Decode prompts with the whole block verified and record every round.",
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N", help="first N of each file; 0 (default): all"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--rounds", type=Path, metavar="OUT", help="write the rounds here (.npz)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report here as JSON")
    parser.set_defaults(func=_record)


@run_guarded
def _record(args: argparse.Namespace) -> int:
    model = open_model(args, max_batch_requests=BATCH, policy="fixed", prefix_cache_mb=0)
    prompts = {path.stem: read_prompts(path, args.limit) for path in args.prompts}
    recording = record(model, prompts, args.max_new_tokens)
    model.close()
    try:
        calibration = load_calibration(args.build_dir / args.name / "engines", model.manifest)
    except TableError as error:
        print(f"dspark bench record: judged without a calibration: {error}", file=sys.stderr)
        calibration = None
    report = judge(recording, calibration)
    for name, values in report.items():
        print(name)
        for key, value in values.items():
            values_shown = value if isinstance(value, list) else [value]
            print(f"  {key:>20}  {' '.join(f'{v:.4g}' for v in values_shown)}")
    if args.rounds:
        recording.save(args.rounds)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def record(model: Any, prompts: dict[str, list[str]], max_new_tokens: int) -> Recording:
    """Decode all prompts of all sets in both modes, several at once."""
    from tqdm import tqdm

    loop, log = model.make_loop(), RoundLog()
    texts = [(name, row, text) for name, texts in prompts.items() for row, text in enumerate(texts)]
    loop.on_round = log
    bar = tqdm(total=len(texts) * len(TEMPERATURES), unit="request", desc="bench record")

    def on_output(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            bar.update()

    kept: list[tuple[bool, int, str, int]] = []
    for temperature in TEMPERATURES:
        for seed, (name, row, text) in enumerate(texts):
            ids = model.tokenizer.encode_prompt(text, False, model.config.max_prompt_bytes)
            fields = {"temperature": temperature, "seed": seed, "acceptance": "rejection"}
            request = validate_request(
                {"prompt_ids": ids, "max_tokens": max_new_tokens, **fields}, model.limits
            )
            loop.add(request, on_output)
            kept.append((temperature == 0, len(ids), name, row))
    while loop.has_work:
        loop.step()
    bar.close()
    return Recording(log.rounds(first_request=1), *map(np.array, zip(*kept, strict=True)))


def judge(recording: Recording, calibration: Calibration | None) -> dict[str, dict[str, Any]]:
    """Accepted length, and error and area under curve of the survival, for each mode.

    The survival before and after calibration, and as a server learns it from outcomes.
    """
    report: dict[str, dict[str, Any]] = {}
    raw, fitted = recording.survival(None), recording.survival(calibration)
    learned = fitted if calibration is None else recording.learned_survival(calibration)
    modes = recording.greedy[recording.rounds.request]
    for name, greedy in (("greedy", True), ("sampling", False)):
        rounds, rows = recording.of_mode(greedy), modes == greedy
        report[name] = {
            "rounds": len(rounds),
            "accepted_length": 1 + float(rounds.accepted.mean()),
            "ece_before": list(errors(rounds, raw[rows])),
        }
        if calibration is not None:
            for key, survival in (("after", fitted), ("learned", learned)):
                ece = errors(rounds, survival[rows])
                report[name] |= {f"ece_{key}": list(ece), f"mean_ece_{key}": float(np.mean(ece))}
            report[name]["auc"] = [
                auc(*outcomes(rounds, learned[rows], k)) for k in range(learned.shape[1])
            ]
    return report
