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
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.load import plot, print_table
from bench.record import Recording, load_recording
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
    end_s: float = 0.0

    @property
    def num_pending(self) -> int:
        """Tokens that the drafter does not have in its context."""
        return self.num_computed - self.num_drafter_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is through."""
        return self.num_output > 0


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
        "--requests",
        type=int,
        default=12,
        metavar="N",
        help="that each client sends, one after another (default: %(default)s)",
    )
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="report of `dspark bench load` to compare with"
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
    served = _results(args.serving) if args.serving else []
    results = [
        simulate(
            tables,
            recording,
            policy,
            concurrency,
            args.max_new_tokens,
            concurrency * args.requests,
            slowdown(served, concurrency),
        )
        for concurrency in map(int, args.concurrency.split(","))
        for policy in args.policies.split(",")
    ]
    report: dict[str, Any] = {"machine": tables.cost.identity["machine"], "results": results}
    print_table(results)
    if args.compare:
        report["compared"] = compare(results, _results(args.compare))
        _print_comparison(report["compared"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot(results, args.plot)
    return 0


def _results(path: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return results


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
    num_requests: int,
    slower: float = 1.0,
) -> dict[str, Any]:
    """Closed-loop clients under one policy; the fields that `dspark bench load` reports too.

    As there, it ends once the first client finds no more work. Steps take `slower` times what the
    cost table says.
    """
    block = recording.rounds.signals.shape[1]
    config = RuntimeConfig(max_batch_requests=concurrency)
    metrics, gauge = Metrics(), LoadGauge(config)
    scheduler: Scheduler[SimulatedSequence] = Scheduler(
        parse_policy(policy, block), config, metrics, tables, gauge
    )
    arrivals = _requests(recording, max_new_tokens, num_requests)
    running: list[SimulatedSequence] = []
    finished: list[SimulatedSequence] = []
    now, verified_tokens, rounds, accepted_tokens = 0.0, 0, 0, 0
    while True:
        running += itertools.islice(arrivals, concurrency - len(running))
        if len(running) < concurrency:
            break
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
            rounds, verified_tokens = rounds + 1, verified_tokens + verified
            accepted_tokens += min(accepted, gained)
            scheduler.end_round(sequence, verified, accepted)
            if not scheduler.speculates(sequence):
                sequence.num_drafter_computed = sequence.num_computed
        for sequence in running:
            if sequence.is_decoding and not sequence.first_s:
                sequence.first_s = now
            if sequence.num_output >= sequence.max_tokens:
                sequence.end_s = now
                finished.append(sequence)
        running = [s for s in running if s.num_output < s.max_tokens]
    tokens = sum(s.num_output for s in running + finished)
    per_user = [(s.num_output - 1) / (s.end_s - s.first_s) for s in finished if s.num_output > 1]
    return {
        "concurrency": concurrency,
        "policy": policy,
        "tokens_per_s": tokens / now,
        "user_tokens_per_s": statistics.mean(per_user) if per_user else 0.0,
        "accepted_length": 1 + accepted_tokens / rounds if rounds else 0.0,
        "verified_per_round": verified_tokens / rounds if rounds else 0.0,
        "acceptance": accepted_tokens / verified_tokens if verified_tokens else None,
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
    num_verified = sum(verified for verified, _ in outcome.values())
    return scheduler.predicted_s(len(drafted), num_verified, new_context) or 0.0, outcome


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


def _requests(recording: Recording, max_tokens: int, count: int) -> Iterator[SimulatedSequence]:
    """The recorded requests in an order that mixes them, again and again.

    Answers that were shorter than the longest by more than a block had ended, and end here too.
    """
    rounds = recording.rounds
    numbers = np.unique(rounds.request)
    lengths = 1 + np.bincount(rounds.request, rounds.accepted + 1).astype(int)
    limit = lengths.max() - rounds.signals.shape[1]
    order = np.random.default_rng(0).permutation(numbers)
    for i in range(count):
        number = order[i % len(order)]
        rows = np.nonzero(rounds.request == number)[0]
        length = int(lengths[number])
        yield SimulatedSequence(
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
