"""`dspark bench load`: policies against each other on a running server, at several concurrencies.

Closed-loop gRPC clients send the prompts of all sets, mixed, half of them greedy and half at
temperature 1. Every slice of the run gives the same requests to each policy in turn, in an order
that rotates, so that whatever else the machine does meets them all alike. A slice lasts until as
many answers are complete as it has requests, and until then clients that are done go on with
further ones: idle clients, or last prompts whose answers are not waited for, would count against a
policy under which requests differ in speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.client import (
    EXPORT_S,
    Client,
    Timing,
    add_address_arguments,
    gained,
    server_metrics,
)
from bench.prompts import read_prompts
from bench.workload import Item, work_slices
from runtime.cli import run_guarded
from runtime.cost import machine
from runtime.schedule import THRESHOLD_BASE, load_threshold, parse_policy

PHASES = ("admit", "draft", "schedule", "pack", "verify", "accept", "commit", "emit")


@dataclass
class Tally:
    """What one policy did at one concurrency."""

    seconds: float = 0.0  # until as many answers were complete as there were requests
    tokens: int = 0  # that came in this time
    timings: list[tuple[Item, Timing]] = field(default_factory=list)
    change: Counter[str] = field(default_factory=Counter)
    loads: list[float] = field(default_factory=list)


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench load`."""
    parser = kinds.add_parser(
        "load",
        help="policies against each other on a running server, at several concurrencies",
        description="Closed-loop clients run the same requests under each policy in turn. The "
        "server must have the tables that the policies need.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help='prompt sets: JSON lines of {"turns": ["user message", ...]}',
    )
    parser.add_argument("--concurrency", default="1,2,4,8,16", help="default: %(default)s")
    parser.add_argument(
        "--policies",
        default="off,fixed:1,fixed:2,fixed:3,fixed,threshold,throughput,lagged",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens per answer (default: %(default)s)",
    )
    parser.add_argument(
        "--slices",
        type=int,
        default=6,
        metavar="N",
        help="times that all policies take their turn at each concurrency (default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=3,
        metavar="N",
        help="that each client sends in a slice, one after another (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=0,
        metavar="S",
        help="start no further round of slices after this time; 0 (default): never stop early",
    )
    add_address_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report here as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw the report here as PNG")
    parser.set_defaults(func=_load)


@run_guarded
def _load(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    policies = args.policies.split(",")
    concurrencies = [int(c) for c in args.concurrency.split(",")]
    prompts = {path.stem: read_prompts(path, 0) for path in args.prompts}
    sizes = {name: len(texts) for name, texts in prompts.items()}
    slices = list(work_slices(sizes, concurrencies, args.slices, args.requests))
    # Warm up at the highest concurrency: the first to touch memory waits for it.
    most, batch = max(slices, key=lambda own: own[0])
    speculating = next((policy for policy in policies if policy != "off"), "off")
    _slice(args, prompts, speculating, batch[:most], most, Tally())
    tallies: dict[tuple[int, str], Tally] = defaultdict(Tally)
    deadline_s = time.monotonic() + (args.timeout_s or float("inf"))
    for i, (concurrency, batch) in enumerate(tqdm(slices, unit="slice", desc="bench load")):
        if i % len(concurrencies) == 0 and time.monotonic() > deadline_s:
            slices = slices[:i]
            break
        shift = i // len(concurrencies) % len(policies)
        for policy in policies[shift:] + policies[:shift]:
            _slice(args, prompts, policy, batch, concurrency, tallies[concurrency, policy])
    report = {
        "machine": machine(),
        "max_new_tokens": args.max_new_tokens,
        "prompts": list(prompts),
        "slices": len(slices) // len(concurrencies),
        "requests": args.requests,
        "results": [_result(c, p, tallies[c, p]) for c in concurrencies for p in policies],
    }
    _add_ratios(report["results"])
    print_table(report["results"])
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot(report["results"], args.plot)
    return 0


def _slice(
    args: argparse.Namespace,
    prompts: dict[str, list[str]],
    policy: str,
    batch: list[Item],
    concurrency: int,
    tally: Tally,
) -> None:
    """Run a batch under one policy with that many clients, and book it."""
    work = itertools.cycle(batch)
    before = server_metrics(args)
    clients = [Client(args) for _ in range(concurrency)]
    lock, done = threading.Lock(), threading.Event()
    answered_s: list[float] = []

    def run(client: Client) -> list[tuple[Item, Timing]]:
        own: list[tuple[Item, Timing]] = []
        while not done.is_set():
            with lock:
                item = next(work)
            timing = client.ask(
                text_input=prompts[item.prompt_set][item.row],
                max_tokens=args.max_new_tokens,
                temperature=item.temperature,
                seed=item.seed,
                acceptance="rejection",
                policy=policy,
                disable_prefix_cache=True,  # or the first policy's turn would help the others'
            )
            own.append((item, timing))
            with lock:
                answered_s.append(time.perf_counter())
                if len(answered_s) == len(batch):
                    done.set()
                    for other in clients:
                        other.interrupt()
        return own

    def watch() -> None:
        while not done.wait(EXPORT_S):
            tally.loads.append(server_metrics(args, wait_s=0)["load"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        timings = [timing for own in pool.map(run, clients) for timing in own]
    end_s = answered_s[len(batch) - 1]
    tally.seconds += end_s - start
    tally.tokens += sum(timing.tokens_until(end_s) for _, timing in timings)
    watcher.join()
    for client in clients:
        client.close()
    tally.timings += [(item, timing) for item, timing in timings if timing.complete]
    tally.change.update(gained(before, server_metrics(args)))


def _result(concurrency: int, policy: str, tally: Tally) -> dict[str, Any]:
    change, timings = tally.change, tally.timings
    rounds, verified = change["rounds_total"], change["verified_draft_tokens_total"]
    accepted, passes = change["accepted_draft_tokens_total"], change["verifier_passes_total"]
    per_user = [
        (t.num_output_tokens - 1) / (t.times_s[-1] - t.times_s[0])
        for _, t in timings
        if t.num_output_tokens > 1 and t.times_s[-1] > t.times_s[0]
    ]
    return {
        "concurrency": concurrency,
        "policy": policy,
        "tokens_per_s": tally.tokens / tally.seconds,
        "user_tokens_per_s": statistics.mean(per_user) if per_user else 0.0,
        "accepted_length": 1 + accepted / rounds if rounds else 0.0,
        "verified_per_round": verified / rounds if rounds else 0.0,
        "acceptance": accepted / verified if verified else None,
        "drafted_tokens": change["drafted_tokens_total"],
        "requests": len(timings),
        "seconds": tally.seconds,
        "load": statistics.mean(tally.loads) if tally.loads else None,
        "set_tokens_per_s": _by_set(timings),
        "ms_per_step": {
            phase: 1e3 * change[f"step_{phase}_seconds_total"] / passes if passes else 0.0
            for phase in PHASES
        },
        "prefill_s": sum(s for n, s in change.items() if n.startswith("step_prefill_")),
        "predicted_over_measured": (
            change["predicted_decoding_seconds_total"] / change["measured_decoding_seconds_total"]
            if change["measured_decoding_seconds_total"]
            else None
        ),
    }


def _by_set(timings: list[tuple[Item, Timing]]) -> dict[str, float]:
    """Output tokens over the time that requests of each set took."""
    tokens: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for item, timing in timings:
        tokens[item.prompt_set] += timing.num_output_tokens
        seconds[item.prompt_set] += timing.times_s[-1] - timing.start_s
    return {name: tokens[name] / seconds[name] for name in sorted(tokens)}


def _add_ratios(results: list[dict[str, Any]]) -> None:
    """Each result's throughput over the best other policy's at its concurrency."""
    for result in results:
        others = [
            r["tokens_per_s"]
            for r in results
            if r["concurrency"] == result["concurrency"] and r is not result
        ]
        result["over_best_other"] = result["tokens_per_s"] / max(others) if others else None


def print_table(results: list[dict[str, Any]]) -> None:
    """The figures of every policy, concurrency by concurrency."""
    columns = ("clients", "policy", "tokens/s", "per user", "over best", "accepted", "verified")
    print("  ".join(f"{name:>12}" for name in columns) + "   (per round)")
    for r in results:
        ratio = r.get("over_best_other")
        cells = [r["concurrency"], r["policy"], f"{r['tokens_per_s']:.1f}"]
        cells += [f"{r['user_tokens_per_s']:.1f}", "-" if ratio is None else f"{ratio:.3f}"]
        cells += [f"{r['accepted_length']:.3f}", f"{r['verified_per_round']:.2f}"]
        print("  ".join(f"{cell:>12}" for cell in cells))


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Throughput, tokens/s of a user and verified length against concurrency; acceptance."""
    # The plain Agg canvas: no display, no global pyplot state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2).reshape(-1)
    names = {
        "tokens_per_s": "tokens/s, all users",
        "user_tokens_per_s": "tokens/s of a user",
        "verified_per_round": "draft tokens verified in a round",
    }
    for axes, (name, title) in zip(panels, names.items(), strict=False):
        for policy in dict.fromkeys(r["policy"] for r in results):
            own = [r for r in results if r["policy"] == policy]
            axes.plot(
                [r["concurrency"] for r in own], [r[name] for r in own], marker=".", label=policy
            )
        axes.set(title=title, xlabel="concurrency", xscale="log", ylim=(0, None))
    panels[0].legend(fontsize=7)
    for concurrency in dict.fromkeys(r["concurrency"] for r in results):
        points = sorted(
            (_threshold(r), r["acceptance"])
            for r in results
            if r["concurrency"] == concurrency
            and r["policy"].startswith("threshold")
            and r.get("acceptance") is not None
        )
        if points:
            label = f"concurrency {concurrency}"
            panels[3].plot(*zip(*points, strict=True), marker=".", label=label)
    panels[3].set(title="accepted of the verified", xlabel="confidence threshold", ylim=(0, 1))
    if panels[3].lines:
        panels[3].legend(fontsize=7)
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.savefig(path)


def _threshold(result: dict[str, Any]) -> float:
    argument = parse_policy(result["policy"], 0).argument
    return load_threshold(result["load"] or 0.0, THRESHOLD_BASE if argument is None else argument)
