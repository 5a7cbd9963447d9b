"""`dspark bench transformers`: this runtime beside Hugging Face `generate`, in one run.

Also the exactness check against an implementation that shares none of our code: greedy tokens of
every prompt must equal transformers', alone and in batches that requests join and leave.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.prompts import add_prompt_arguments, read_prompts, run_requests
from runtime.cli import add_model_arguments, open_model, run_guarded
from runtime.loop import Loop
from runtime.request import Request, validate_request


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench transformers`."""
    parser = subparsers.add_parser(
        "transformers",
        help="speed and greedy tokens beside Hugging Face generate",
        description="Greedy decoding, prompt by prompt: transformers and our policies take turns.",
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    add_prompt_arguments(parser, limit=20, max_new_tokens=64)
    parser.add_argument(
        "--policies", default="off,fixed", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--batched-rounds",
        type=int,
        default=2,
        metavar="N",
        help="times all prompts run again in random batches of up to 8 (default: %(default)s)",
    )
    parser.set_defaults(func=_compare)


@run_guarded
def _compare(args: argparse.Namespace) -> int:
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM

    model = open_model(args, max_batch_requests=8)
    policies = args.policies.split(",")
    loops = {policy: model.make_loop(policy) for policy in policies}
    torch.set_num_threads(model.config.engine_threads)
    peer = AutoModelForCausalLM.from_pretrained(
        args.build_dir / args.name / "hf", dtype=torch.float32, local_files_only=True
    ).eval()

    prompts = [
        model.tokenizer.encode_prompt(text, False, model.config.max_prompt_bytes)
        for text in read_prompts(args.prompts, args.limit)
    ]
    requests = [
        validate_request({"prompt_ids": ids, "max_tokens": args.max_new_tokens}, model.limits)
        for ids in prompts
    ]

    def peer_tokens(request: Request) -> list[int]:
        ids = torch.tensor([request.prompt_ids])
        with torch.inference_mode():
            out = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_tokens,
                do_sample=False,
            )
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return tokens

    contenders: dict[str, Callable[[Request], list[int]]] = {"transformers": peer_tokens}
    for policy, loop in loops.items():
        contenders[policy] = partial(_own_tokens, loop)
    tokens: dict[str, list[list[int]]] = {name: [] for name in contenders}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():  # warm up
        run(requests[0])
    for request in tqdm(requests, unit="prompt", desc="bench transformers"):
        for name, run in contenders.items():
            start = time.perf_counter()
            tokens[name].append(run(request))
            rates[name].append(len(tokens[name][-1]) / (time.perf_counter() - start))

    expected = tokens.pop("transformers")
    same_alone = {name: own == expected for name, own in tokens.items()}
    same_batched = {
        policy: all(
            run_requests(loop, requests, random.Random(seed)) == expected
            for seed in range(args.batched_rounds)
        )
        for policy, loop in loops.items()
    }
    model.close()
    report = {
        name: {
            "tokens_per_s": statistics.median(rates[name]),
            "times_transformers": statistics.median(
                own / other for own, other in zip(rates[name], rates["transformers"], strict=True)
            ),
            "same_tokens_alone": same_alone.get(name),
            "same_tokens_batched": same_batched.get(name),
        }
        for name in contenders
    }
    _print_table(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if not all([*same_alone.values(), *same_batched.values()]):
        print("dspark: greedy tokens differ from transformers'", file=sys.stderr)
        return 1
    return 0


def _own_tokens(loop: Loop, request: Request) -> list[int]:
    return run_requests(loop, [request])[0]


def _print_table(report: dict[str, Any]) -> None:
    print(f"{'':>14}  {'tokens/s':>9}  {'ratio':>6}  {'alone':>6}  {'batched':>7}")
    for name, r in report.items():
        same = [
            {True: "same", False: "DIFFER", None: "-"}[r[f"same_tokens_{how}"]]
            for how in ("alone", "batched")
        ]
        print(
            f"{name:>14}  {r['tokens_per_s']:>9.1f}  {r['times_transformers']:>6.2f}  "
            f"{same[0]:>6}  {same[1]:>7}"
        )
