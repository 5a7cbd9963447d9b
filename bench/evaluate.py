"""`dspark eval`: accepted length, speed and exactness of policies on a file of prompts.

The policies take turns prompt by prompt, in one process on one engine, so that whatever else the
machine does meets them all alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from bench.prompts import add_prompt_arguments, read_prompts, run_requests
from runtime.cli import add_model_arguments, open_model, run_guarded
from runtime.loop import Loop
from runtime.request import Request, validate_request

# Phases of a decoding round as `Loop.step` books them; prefill steps are left out.
_ROUND_PHASES = {
    "draft": ("draft",),
    "schedule": ("schedule",),
    "verify": ("verify",),
    "accept": ("accept",),
    "rest": ("admit", "pack", "commit", "emit"),
}


@dataclass
class _Run:
    """One policy's loop and what it has produced, prompt by prompt."""

    loop: Loop
    seconds: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `eval`."""
    parser = subparsers.add_parser(
        "eval",
        help="accepted length, speed and exactness of policies on a file of prompts",
        description="Run prompts under several policies, interleaved, and compare them.",
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    add_prompt_arguments(parser, limit=0, max_new_tokens=128)
    parser.add_argument(
        "--policies", default="off,fixed", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--acceptance", default="rejection", choices=("rejection", "coupled"))
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="requests at once (default: %(default)s)"
    )
    parser.set_defaults(func=_evaluate)


@run_guarded
def _evaluate(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    policies = args.policies.split(",")
    prompts = read_prompts(args.prompts, args.limit)
    model = open_model(args, max_batch_requests=args.batch)
    runs = {policy: _Run(model.make_loop(policy)) for policy in policies}
    requests = [_request(model, args, seed, text) for seed, text in enumerate(prompts)]
    _run_batch(_Run(model.make_loop("off")), requests[:1])  # warm up
    for start in tqdm(range(0, len(requests), args.batch), unit="batch", desc="eval"):
        for run in runs.values():
            _run_batch(run, requests[start : start + args.batch])
    model.close()

    exact = args.temperature == 0 or args.acceptance == "coupled"
    report = {
        "model": model.manifest.name,
        "prompts": str(args.prompts),
        "num_prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "acceptance": args.acceptance,
        "batch": args.batch,
        "threads": model.config.engine_threads,
        "machine": platform.processor() or platform.machine(),
        "policies": {p: _summary(run, runs.get("off"), exact) for p, run in runs.items()},
    }
    _print_table(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    differing = [p for p, r in report["policies"].items() if r["identical_to_off"] is False]
    if differing:
        print(f"dspark: outputs differ from plain decoding under {differing}", file=sys.stderr)
    return 1 if differing else 0


def _request(model: Any, args: argparse.Namespace, seed: int, text: str) -> Request:
    prompt_ids = model.tokenizer.encode_prompt(text, False, model.config.max_prompt_bytes)
    return validate_request(
        {
            "prompt_ids": prompt_ids,
            "max_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "acceptance": args.acceptance,
            "seed": seed,
        },
        model.limits,
    )


def _run_batch(run: _Run, requests: list[Request]) -> None:
    start = time.perf_counter()
    outputs = run_requests(run.loop, requests)
    run.seconds += time.perf_counter() - start
    run.outputs += outputs


def _summary(run: _Run, off: _Run | None, exact: bool) -> dict[str, Any]:
    metrics = run.loop.metrics
    rounds, seconds = metrics.counts["rounds"], metrics.seconds
    tokens = metrics.counts["output_tokens"]
    prefill_s = sum(s for phase, s in seconds.items() if phase.startswith("prefill_"))
    accepted = metrics.counts["accepted_draft_tokens"]
    split = {name: sum(seconds[p] for p in phases) for name, phases in _ROUND_PHASES.items()}
    steps = metrics.counts["verifier_passes"]
    outside = split["schedule"] + split["accept"] + split["rest"]
    return {
        "accepted_length": 1 + accepted / rounds if rounds else 0.0,
        "acceptance_at_position": {
            str(k): metrics.accepted_at[k] / n for k, n in sorted(metrics.verified_at.items())
        },
        "output_tokens": tokens,
        "tokens_per_s": tokens / run.seconds,
        "decode_tokens_per_s": tokens / (run.seconds - prefill_s),
        "ms_per_step": {name: 1e3 * s / steps if steps else 0.0 for name, s in split.items()},
        "overhead_share": outside / sum(split.values()),
        "identical_to_off": run.outputs == off.outputs if off is not None and exact else None,
    }


def _print_table(report: dict[str, Any]) -> None:
    columns = ["policy", "acc. length", "tok/s", "decode tok/s", *_ROUND_PHASES, "identical"]
    print("  ".join(f"{name:>12}" for name in columns) + "   (ms per step)")
    for name, r in report["policies"].items():
        cells = [name, f"{r['accepted_length']:.3f}", f"{r['tokens_per_s']:.1f}"]
        cells += [f"{r['decode_tokens_per_s']:.1f}"]
        cells += [f"{r['ms_per_step'][phase]:.2f}" for phase in _ROUND_PHASES]
        cells += [{True: "yes", False: "NO", None: "-"}[r["identical_to_off"]]]
        print("  ".join(f"{cell:>12}" for cell in cells))
