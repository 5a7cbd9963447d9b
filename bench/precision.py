"""`dspark bench precision`: what half precision changes, beside fp32 on the same text.

Contenders are other builds of the model, and twins (`bench/twins.py`) of it in another dtype.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from bench.prompts import add_prompt_arguments, read_prompts, run_requests
from runtime.batch import VerifySegment, pack_verify, slots
from runtime.cli import add_model_arguments, open_model, run_guarded
from runtime.config import ConfigError
from runtime.kv_blocks import blocks_for
from runtime.request import Request, validate_request
from runtime.sampling import softmax
from runtime.spec import Dtype

DTYPES = [dtype for dtype in get_args(Dtype) if dtype != "int64"]


@dataclass(frozen=True)
class Deviation:
    """Of one contender from the reference, over all positions of all answers."""

    positions: int
    logits_max: float  # largest absolute difference
    logits_mean: float
    argmax_agreement: float
    total_variation: float  # mean distance of the distributions at temperature 1
    accepted_length: float | None  # greedy, whole blocks; None without a drafter
    same_answers: float  # share of greedy answers that are the reference's to the last token


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench precision`."""
    parser = subparsers.add_parser(
        "precision",
        help="what half precision changes: logits, argmax, accepted length",
        description="Put the reference's greedy answers through other builds of the model and "
        "through twins of another dtype, and compare the logits of every position.",
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    add_prompt_arguments(parser, limit=10, max_new_tokens=48)
    parser.add_argument(
        "--twins",
        default="fp16,bf16",
        metavar="DTYPES",
        help=f"of {', '.join(DTYPES)}, or empty (default: %(default)s)",
    )
    parser.add_argument("--drafter", type=Path, help="the built drafter's folder, for the twins")
    parser.add_argument(
        "--builds", default="", metavar="NAMES", help="other builds of the same model"
    )
    parser.set_defaults(func=_compare)


@run_guarded
def _compare(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from bench.twins import load_twins

    twins, builds = ([n for n in text.split(",") if n] for text in (args.twins, args.builds))
    unknown = [dtype for dtype in twins if dtype not in DTYPES]
    if unknown:
        raise ConfigError(f"--twins takes {', '.join(DTYPES)}, got {', '.join(unknown)}")
    reference = open_model(args, max_batch_requests=1)
    requests = [_request(reference, args, t) for t in read_prompts(args.prompts, args.limit)]
    answers = [run_requests(reference.make_loop("off"), [r])[0] for r in tqdm(requests, "answers")]
    logits = [forced_logits(reference, r, a) for r, a in zip(requests, answers, strict=True)]

    contenders: dict[str, Callable[[], Any]] = {args.name: lambda: reference}
    for name in builds:
        named = argparse.Namespace(**{**vars(args), "name": name})
        contenders[name] = partial(open_model, named, max_batch_requests=1)
    for dtype in twins:
        load = partial(load_twins, args.drafter, dtype)
        contenders[f"twin {dtype}"] = partial(open_model, args, load=load, max_batch_requests=1)
    report = {}
    for name, make in contenders.items():
        model = make()
        report[name] = deviation(model, requests, answers, logits, name)
        model.close()
    _print_table(report)
    if args.json:
        data = {name: asdict(row) for name, row in report.items()}
        args.json.write_text(json.dumps(data, indent=2) + "\n")
    return 0


def _request(model: Any, args: argparse.Namespace, text: str) -> Request:
    ids = model.tokenizer.encode_prompt(text, False, model.config.max_prompt_bytes)
    return validate_request({"prompt_ids": ids, "max_tokens": args.max_new_tokens}, model.limits)


def forced_logits(model: Any, request: Request, answer: Sequence[int]) -> NDArray[np.float32]:
    """[len(answer), V] logits before each token of `answer`, as rounds of whole blocks see them."""
    block_tokens, draft = model.manifest.verifier.kv.block_tokens, model.manifest.drafter
    length = 1 if draft is None else draft.block_size + 1
    tokens, first = [*request.prompt_ids, *answer[:-1]], len(request.prompt_ids) - 1
    blocks = list(range(blocks_for(len(tokens), block_tokens)))
    rows, start = [], 0
    while start < len(tokens):
        chunk = min(model.config.prefill_chunk_tokens, first - start) if start < first else length
        ids = tokens[start : start + chunk]
        segment = VerifySegment(ids, start, blocks, len(ids) if start >= first else 0)
        outputs = model.engines.verifier.run(pack_verify([segment], block_tokens).inputs)
        rows.append(outputs["logits"].copy())
        into = slots(blocks, start, len(ids), block_tokens)
        model.engines.verifier.commit(np.arange(len(ids)), into)
        start += len(ids)
    return np.concatenate(rows)


def deviation(
    model: Any,
    requests: Sequence[Request],
    answers: Sequence[Sequence[int]],
    logits: Sequence[NDArray[np.float32]],
    name: str,
) -> Deviation:
    """Of `model` from the reference, whose greedy answers and their logits are given."""
    from tqdm import tqdm

    largest, rows = 0.0, []
    for request, answer, expected in zip(tqdm(requests, name), answers, logits, strict=True):
        actual = forced_logits(model, request, answer)
        delta = np.abs(actual - expected)
        largest = max(largest, float(delta.max()))
        agree = actual.argmax(-1) == expected.argmax(-1)
        distance = np.abs(softmax(actual) - softmax(expected)).sum(-1) / 2
        rows.append(np.stack([delta.mean(-1), agree, distance]))
    mean, agreement, variation = np.concatenate(rows, axis=1).mean(axis=1).tolist()
    loop = model.make_loop("fixed" if model.manifest.drafter else "off")
    own = [run_requests(loop, [request])[0] for request in requests]
    counts = loop.metrics.counts
    drafted = counts["rounds"] if model.manifest.drafter else 0
    return Deviation(
        positions=sum(map(len, answers)),
        logits_max=largest,
        logits_mean=mean,
        argmax_agreement=agreement,
        total_variation=variation,
        accepted_length=1 + counts["accepted_draft_tokens"] / drafted if drafted else None,
        same_answers=statistics.mean(a == b for a, b in zip(own, answers, strict=True)),
    )


def _print_table(report: Mapping[str, Deviation]) -> None:
    columns = ("positions", "logits max", "mean", "argmax", "tot. var.", "acc. length", "same")
    print(f"{'':>16}" + "".join(f"  {name:>11}" for name in columns))
    for name, row in report.items():
        length = "-" if row.accepted_length is None else f"{row.accepted_length:.3f}"
        cells = [str(row.positions), f"{row.logits_max:.4f}", f"{row.logits_mean:.5f}"]
        cells += [f"{row.argmax_agreement:.2%}", f"{row.total_variation:.5f}", length]
        cells += [f"{row.same_answers:.0%}"]
        print(f"{name:>16}" + "".join(f"  {cell:>11}" for cell in cells))
