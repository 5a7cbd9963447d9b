"""`dspark bench stream`: what a streaming gRPC client of a running server sees.

The time between responses at the client beside the engine's own steps in the same period, which
the server's metrics tell; their ratio is what Triton and the glue cost.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import queue
import statistics
import threading
import time

from bench.client import Client, Timing, add_address_arguments, gained, server_metrics
from bench.prompts import add_prompt_arguments, read_prompts
from runtime.cli import run_guarded


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench stream`."""
    parser = subparsers.add_parser(
        "stream",
        help="time to first token and between tokens at a gRPC client of a running server",
        description="Stream prompts from a running server with a number of closed-loop clients.",
        allow_abbrev=False,
    )
    add_prompt_arguments(parser, limit=8, max_new_tokens=64)
    add_address_arguments(parser)
    parser.add_argument(
        "--concurrency", type=int, default=1, metavar="N", help="clients (default: %(default)s)"
    )
    parser.set_defaults(func=_stream)


@run_guarded
def _stream(args: argparse.Namespace) -> int:
    prompts = read_prompts(args.prompts, args.limit)
    work: queue.SimpleQueue[str] = queue.SimpleQueue()
    work.put(prompts[0])
    _drain(args, work, [])  # warm up
    for prompt in prompts:
        work.put(prompt)
    before, timings = server_metrics(args), list[Timing]()
    threads = [
        threading.Thread(target=_drain, args=(args, work, timings)) for _ in range(args.concurrency)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    change = gained(before, server_metrics(args))

    first_s = [timing.times_s[0] - timing.start_s for timing in timings]
    gaps = [b - a for timing in timings for a, b in itertools.pairwise(timing.times_s)]
    step_s = sum(v for n, v in change.items() if n.startswith("step_"))
    report = {
        "concurrency": args.concurrency,
        "requests": len(prompts),
        "tokens_per_s": change["output_tokens_total"] / seconds,
        "time_to_first_token_ms": 1e3 * statistics.median(first_s),
        "between_responses_ms": 1e3 * statistics.mean(gaps),
        "step_ms": 1e3 * step_s / change["steps_total"],
    }
    report["between_responses_over_step"] = report["between_responses_ms"] / report["step_ms"]
    for name, value in report.items():
        print(f"{name:>30}  {value:.4g}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _drain(args: argparse.Namespace, work: queue.SimpleQueue[str], timings: list[Timing]) -> None:
    """Ask one prompt after another until none is left."""
    client = Client(args)
    with contextlib.suppress(queue.Empty):
        while True:
            timings.append(client.ask(text_input=work.get_nowait(), max_tokens=args.max_new_tokens))
    client.close()
