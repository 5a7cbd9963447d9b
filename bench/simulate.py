"""`dspark simulate`: the curves of `dspark bench load` from a cost table and recorded rounds.

The scheduler that serves decides here too, step by step; only engines and clock are replaced. A
round comes from the recording: as many draft tokens are accepted as were then, or as many as are
verified now if that is fewer. Steps take what the cost table says, which is of the engines alone;
what clients, Triton and bookkeeping add on the same cores is learned from plain decoding in a
report of `dspark bench load` (`--serving`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.load import plot, print_table
from bench.record import Recording, load_recording
from bench.workload import work_slices
from runtime.calibration import load_calibration
from runtime.cli import add_folder_arguments, run_guarded
from runtime.config import RuntimeConfig
from runtime.cost import parse_cost
from runtime.load import LoadGauge
from runtime.manifest import load_manifest
from runtime.metrics import Metrics
from runtime.schedule import HISTORY_ROUNDS, Policy, parse_policy
from runtime.scheduler import Scheduler, Tables


class _Mode(NamedTuple):
    """What the scheduler asks of a request."""

    greedy: bool
    policy: Policy | None = None


@dataclass(eq=False)
class SimulatedSequence:
    """A request as the scheduler sees it, with the rounds that it will go through."""

    request: _Mode
    num_prompt: int
    max_tokens: int
    rounds: Iterator[tuple[NDArray[np.float32], int]]  # signals [g, 2], accepted
    speculates: bool = True
    num_computed: int = 0
    num_drafter_computed: int = 0
    num_output: int = 0
    survivals: deque[NDArray[np.float64]] = field(
        default_factory=lambda: deque(maxlen=HISTORY_ROUNDS)
    )
    leaning: float = 0.0
    first_s: float = 0.0

    @property
    def num_pending(self) -> int:
        """Tokens that the drafter does not have in its context."""
        return self.num_computed - self.num_drafter_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is through."""
        return self.num_output > 0

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return self.num_output >= self.max_tokens


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `simulate`."""
    parser = subparsers.add_parser(
        "simulate",
        help="predict the load benchmark from a cost table and recorded confidences",
        description="Simulate closed-loop clients under several policies, on this machine's cost "
        "table or another's, up to thousands of requests at once.",
        allow_abbrev=False,
    )
    add_folder_arguments(parser)
    parser.add_argument(
        "--rounds", type=Path, required=True, metavar="FILE", help="from `dspark bench record`"
    )
    parser.add_argument(
        "--cost", type=Path, metavar="FILE", help="a cost.json (default: the built model's)"
    )
    parser.add_argument(
        "--serving",
        type=Path,
        metavar="FILE",
        help="report of `dspark bench load`, whose plain decoding says by how much serving slows "
        "steps (default: not at all)",
    )
    parser.add_argument("--concurrency", default="1,2,4,8,16", help="default: %(default)s")
    parser.add_argument(
        "--policies",
        default="off,fixed:1,fixed:2,fixed:3,fixed,threshold,throughput,lagged",
        help="default: %(default)s",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument(
        "--slices",
        type=int,
        default=6,
        metavar="N",
        help="as many times the clients start with an idle server (default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=3,
        metavar="N",
        help="that each client sends in a slice, one after another (default: %(default)s)",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="report of `dspark bench load`: simulate its requests and compare",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report here as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw the report here as PNG")
    parser.set_defaults(func=_simulate)


@run_guarded
def _simulate(args: argparse.Namespace) -> int:
    engine_dir = args.build_dir / args.name / "engines"
    manifest = load_manifest(engine_dir)
    cost_path = args.cost or engine_dir / (manifest.cost or "")
    tables = Tables(parse_cost(cost_path.read_text()), load_calibration(engine_dir, manifest))
    recording = load_recording(args.rounds)
    served = _report(args.serving)["results"] if args.serving else []
    measured = _report(args.compare) if args.compare else None
    if measured:
        concurrencies = list(dict.fromkeys(r["concurrency"] for r in measured["results"]))
        policies = list(dict.fromkeys(r["policy"] for r in measured["results"]))
        slices, requests = measured["slices"], measured["requests"]
        max_new_tokens = measured["max_new_tokens"]
    else:
        concurrencies = [int(c) for c in args.concurrency.split(",")]
        policies = args.policies.split(",")
        slices, requests, max_new_tokens = args.slices, args.requests, args.max_new_tokens
    work: dict[int, list[list[int]]] = {c: [] for c in concurrencies}
    for concurrency, items in work_slices(recording.sizes(), concurrencies, slices, requests):
        work[concurrency].append([recording.find(item) for item in items])
    results = [
        simulate(tables, recording, policy, c, max_new_tokens, numbers, slowdown(served, c))
        for c, numbers in work.items()
        for policy in policies
    ]
    report: dict[str, Any] = {"machine": tables.cost.identity["machine"], "results": results}
    print_table(results)
    if measured:
        report["compared"] = compare(results, measured["results"])
        _print_comparison(report["compared"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot(results, args.plot)
    return 0


def _report(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def slowdown(served: list[dict[str, Any]], concurrency: int) -> float:
    """By how much steps of plain decoding took longer than the cost table says; 1 if unknown.

    Between the measured concurrencies it is interpolated, beyond them that of the nearest.
    """
    ratios = {
        r["concurrency"]: 1 / r["predicted_over_measured"]
        for r in served
        if r["policy"] == "off" and r["predicted_over_measured"]
    }
    if not ratios:
        return 1.0
    return float(np.interp(concurrency, sorted(ratios), [ratios[c] for c in sorted(ratios)]))


def simulate(
    tables: Tables,
    recording: Recording,
    policy: str,
    concurrency: int,
    max_new_tokens: int,
    slices: list[list[int]],
    slower: float = 1.0,
) -> dict[str, Any]:
    """Closed-loop clients under one policy; the fields that `dspark bench load` reports too.

    They share the recorded requests of each slice by their numbers, again and again. As there, it
    lasts until as many answers are complete. Steps take `slower` times what the cost table says.
    """
    block = recording.rounds.signals.shape[1]
    config = RuntimeConfig()
    config = replace(config, max_batch_requests=max(concurrency, config.max_batch_requests))
    gauge = LoadGauge(config)
    scheduler: Scheduler[SimulatedSequence] = Scheduler(
        parse_policy(policy, block), config, Metrics(), tables, gauge
    )
    lengths = 1 + np.bincount(recording.rounds.request, recording.rounds.accepted + 1).astype(int)
    totals, per_user = Counter[str](), list[float]()
    now = 0.0
    for numbers in slices:
        work = itertools.cycle(numbers)
        running: list[SimulatedSequence] = []
        left = len(numbers)
        answered = 0  # in the last step: their clients' next requests arrive during this one
        while left > 0:
            free = concurrency - len(running) - (answered if running else 0)
            own = itertools.islice(work, free)
            running += [_sequence(recording, lengths, n, max_new_tokens) for n in own]
            decoding = [s for s in running if s.is_decoding]
            scheduler.plan(decoding)
            step_s, outcome = _decode(scheduler, decoding, block)
            step_s = slower * (step_s + _prefill(tables, running, config.prefill_chunk_tokens))
            now += step_s
            gauge.update(step_s, len(running), 0)
            for sequence, (verified, accepted) in outcome.items():
                gained = min(accepted + 1, sequence.max_tokens - sequence.num_output)
                sequence.num_output += gained
                sequence.num_computed += gained
                totals.update(
                    rounds=1, tokens=gained, verified=verified, accepted=min(accepted, gained)
                )
                scheduler.end_round(sequence, verified, accepted)
                if not scheduler.speculates(sequence):
                    sequence.num_drafter_computed = sequence.num_computed
            for sequence in running:
                if sequence.is_decoding and not sequence.first_s:
                    sequence.first_s = now
                    totals.update(tokens=1)
                if sequence.is_finished and sequence.num_output > 1:
                    per_user.append((sequence.num_output - 1) / (now - sequence.first_s))
            answered = sum(s.is_finished for s in running)
            left -= answered
            running = [s for s in running if not s.is_finished]
    rounds, verified, accepted = (totals[name] for name in ("rounds", "verified", "accepted"))
    return {
        "concurrency": concurrency,
        "policy": policy,
        "tokens_per_s": totals["tokens"] / now,
        "user_tokens_per_s": statistics.mean(per_user) if per_user else 0.0,
        "accepted_length": 1 + accepted / rounds if rounds else 0.0,
        "verified_per_round": verified / rounds if rounds else 0.0,
        "acceptance": accepted / verified if verified else None,
        "load": gauge.value,
    }


def _decode(
    scheduler: Scheduler[SimulatedSequence], decoding: list[SimulatedSequence], block: int
) -> tuple[float, dict[SimulatedSequence, tuple[int, int]]]:
    """One decoding pass: its seconds, and verified and accepted draft tokens of each sequence."""
    outcome = dict.fromkeys(decoding, (0, 0))
    drafted = [s for s in decoding if scheduler.drafts_for(s) and s.max_tokens - s.num_output > 1]
    new_context = 0
    if drafted:
        caps = np.array([min(block, s.max_tokens - s.num_output - 1) for s in drafted])
        drafts = [next(s.rounds) for s in drafted]
        lengths = scheduler.lengths(drafted, caps, np.stack([signals for signals, _ in drafts]))
        for s, (_, accepted), length in zip(drafted, drafts, lengths.tolist(), strict=True):
            outcome[s] = (length, min(accepted, length))
            new_context += s.num_pending
            s.num_drafter_computed = s.num_computed
    verified = [outcome[s][0] for s in drafted]
    return scheduler.predicted_s(verified, new_context) or 0.0, outcome


def _prefill(tables: Tables, running: list[SimulatedSequence], budget: int) -> float:
    """Advance prompts by one chunk between them; a prompt's last chunk yields its first token."""
    done = 0
    for sequence in running:
        if not sequence.is_decoding and done < budget:
            chunk = min(budget - done, sequence.num_prompt - sequence.num_computed)
            done += chunk
            sequence.num_computed += chunk
            if sequence.num_computed == sequence.num_prompt:
                sequence.num_output = 1
    return tables.cost.prefill_token_s * done


def _sequence(
    recording: Recording, lengths: NDArray[np.int64], number: int, max_tokens: int
) -> SimulatedSequence:
    """A recorded request; `lengths` [q] are those of all recorded answers.

    An answer that was shorter than the longest by more than a block had ended, and ends here too.
    """
    rows = np.nonzero(recording.rounds.request == number)[0]
    length, limit = int(lengths[number]), lengths.max() - recording.rounds.signals.shape[1]
    return SimulatedSequence(
        _Mode(bool(recording.greedy[number])),
        int(recording.prompt_tokens[number]),
        min(max_tokens, length) if length < limit else max_tokens,
        _rounds_of(recording, rows),
    )


def _rounds_of(
    recording: Recording, rows: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.float32], int]]:
    """A request's rounds in their order, from the beginning again when they run out."""
    while True:
        for row in rows:
            yield recording.rounds.signals[row], int(recording.rounds.accepted[row])


def compare(
    simulated: list[dict[str, Any]], measured: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Simulated over measured throughput, for what both have."""
    by_key = {(r["concurrency"], r["policy"]): r["tokens_per_s"] for r in measured}
    return [
        {
            "concurrency": r["concurrency"],
            "policy": r["policy"],
            "simulated_over_measured": r["tokens_per_s"] / by_key[key],
        }
        for r in simulated
        if (key := (r["concurrency"], r["policy"])) in by_key
    ]


def _print_comparison(rows: list[dict[str, Any]]) -> None:
    print("\nsimulated / measured tokens per second")
    for concurrency in dict.fromkeys(r["concurrency"] for r in rows):
        own = [r for r in rows if r["concurrency"] == concurrency]
        ratios = "  ".join(f"{r['policy']} {r['simulated_over_measured']:.2f}" for r in own)
        print(f"{concurrency:>4}  {ratios}")
