"""`dspark bench overhead`: what Triton and the glue add to the decoder they serve.

A server and a decoder in this process, both on the same engines, answer the same prompts one after
the other, in turns of as many prompts as there are clients, so that whatever else the machine does
meets both alike; ratios are medians over the turns. Prompts are computed anew each time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from bench.client import TIMEOUT_S, Client, Timing
from bench.prompts import add_prompt_arguments, read_prompts
from runtime.cli import add_model_arguments, run_guarded
from runtime.config import RuntimeConfig
from runtime.decoder import Decoder
from runtime.request import RequestOutput, validate_request
from triton_repo.server import Address, TritonServer


class Asker(Protocol):
    """Whoever streams one request at a time."""

    def ask(self, **fields: Any) -> Timing:
        """One request to its end."""

    def close(self) -> None:
        """No more requests."""


class Offline:
    """Asks the decoder of this process, as the bridge does."""

    def __init__(self, decoder: Decoder, max_prompt_bytes: int) -> None:
        self._decoder = decoder
        self._max_prompt_bytes = max_prompt_bytes

    def ask(self, **fields: Any) -> Timing:
        """One request to its end, the chat template and the tokenizer included."""
        start = time.perf_counter()
        text = str(fields.pop("text_input"))
        ids = self._decoder.tokenizer.encode_prompt(text, False, self._max_prompt_bytes)
        request = validate_request(
            {**fields, "prompt_ids": ids, "stream": True}, self._decoder.limits
        )
        events: queue.SimpleQueue[tuple[float, RequestOutput]] = queue.SimpleQueue()
        self._decoder.submit(request, lambda out: events.put((time.perf_counter(), out)))
        times, tokens = [], []
        while True:
            at, output = events.get(timeout=TIMEOUT_S)
            times.append(at)
            tokens.append(output.num_output_tokens)
            if output.finish_reason is not None:
                return Timing(start, times, tokens)

    def close(self) -> None:
        """Nothing to end."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench overhead`."""
    parser = subparsers.add_parser(
        "overhead",
        help="times at a client of the server beside those of the decoder without it",
        description="Stream prompts from a server and from the same decoder in turn.",
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    add_prompt_arguments(parser, limit=8, max_new_tokens=48)
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--concurrency", default="1,8", help="comma-separated clients (default: %(default)s)"
    )
    parser.add_argument("--policy", default="fixed", help="default: %(default)s")
    parser.set_defaults(func=_overhead)


@run_guarded
def _overhead(args: argparse.Namespace) -> int:
    prompts = read_prompts(args.prompts, args.limit)
    folder = args.build_dir / args.name
    config = RuntimeConfig(num_threads=args.threads, policy=args.policy, prefix_cache_mb=0)
    report = []
    with TritonServer(folder / "repository", folder, Address(), config):
        decoder = Decoder(folder / "engines", folder / "hf", config)
        address = argparse.Namespace(host=Address().client_host, grpc_port=Address().grpc_port)
        for concurrency in map(int, args.concurrency.split(",")):
            askers: dict[str, Sequence[Asker]] = {
                "decoder": [Offline(decoder, config.max_prompt_bytes) for _ in range(concurrency)],
                "server": [Client(address) for _ in range(concurrency)],
            }
            shares = [prompts[i : i + concurrency] for i in range(0, len(prompts), concurrency)]
            for group in askers.values():
                _run(group, shares[0], args.max_new_tokens)  # warm
            timings: dict[str, list[list[Timing]]] = {name: [] for name in askers}
            for turn, share in enumerate(shares * args.turns):
                for name in sorted(askers, reverse=bool(turn % 2)):
                    timings[name].append(_run(askers[name], share, args.max_new_tokens))
            for asker in itertools.chain(*askers.values()):
                asker.close()
            report += [{"concurrency": concurrency, **row} for row in _compare(timings)]
        decoder.close()
    print("  ".join(f"{name:>18}" for name in report[0]))
    for row in report:
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        print("  ".join(f"{cell:>18}" for cell in cells))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _run(askers: Sequence[Asker], prompts: list[str], max_tokens: int) -> list[Timing]:
    """A prompt for each asker, all at once."""

    def ask(asker: Asker, text: str) -> Timing:
        return asker.ask(text_input=text, max_tokens=max_tokens, ignore_eos=True)

    with ThreadPoolExecutor(len(askers)) as pool:
        return list(pool.map(ask, askers, prompts))


def _compare(timings: dict[str, list[list[Timing]]]) -> list[dict[str, Any]]:
    """A row for each of the two, then how the server's times relate to the decoder's."""
    rows = [
        {"of": name, **_summary(list(itertools.chain(*groups)))} for name, groups in timings.items()
    ]
    pairs = [
        (_summary(offline), _summary(served))
        for offline, served in zip(timings["decoder"], timings["server"], strict=True)
    ]
    ratios = {
        name.removesuffix("_ms"): statistics.median(b[name] / a[name] for a, b in pairs)
        for name in pairs[0][0]
    }
    return [*rows, {"of": "ratio", **ratios}]


def _summary(timings: list[Timing]) -> dict[str, float]:
    """Milliseconds."""
    first_s = [timing.times_s[0] - timing.start_s for timing in timings]
    spans = [
        (timing.times_s[-1] - timing.times_s[0]) / (timing.num_output_tokens - 1)
        for timing in timings
    ]
    gaps = [b - a for timing in timings for a, b in itertools.pairwise(timing.times_s)]
    return {
        "first_token_ms": 1e3 * statistics.median(first_s),
        "inter_token_ms": 1e3 * statistics.mean(spans),
        "response_gap_ms": 1e3 * statistics.mean(gaps),
    }
