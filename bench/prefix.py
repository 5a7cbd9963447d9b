"""`dspark bench prefix`: what the prefix cache saves, and what it costs where nothing is shared.

Every figure compares requests that take turns on one engine: cold ones come under a salt of their
own or with the cache disabled, warm ones find what an earlier request has left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.prompts import add_prompt_arguments, read_prompts
from runtime.cli import accepted_length, add_model_arguments, open_model, run_guarded
from runtime.loop import Loop
from runtime.prefix_cache import Found, PrefixCache
from runtime.request import RequestOutput, validate_request
from runtime.sequence import Sequence

SHARED_TOKENS, PROMPT_TOKENS = 960, 1024
SYSTEM_PROMPT_TOKENS = (256, 512, 1024)
QUESTION_TOKENS = PROMPT_TOKENS - SHARED_TOKENS


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench prefix`."""
    parser = subparsers.add_parser(
        "prefix",
        help="time to first token with and without cached prefixes",
        description=(
            f"Prompts of {PROMPT_TOKENS} tokens whose first {SHARED_TOKENS} are cached beside cold "
            "ones; then a workload in which every other request shares one of three system prompts."
        ),
        allow_abbrev=False,
    )
    add_model_arguments(parser)
    add_prompt_arguments(parser, limit=0, max_new_tokens=32)
    parser.add_argument(
        "--pairs", type=int, default=5, metavar="N", help="cold and warm (default: %(default)s)"
    )
    parser.add_argument(
        "--requests", type=int, default=24, metavar="N", help="in the workload (default: 24)"
    )
    parser.add_argument("--policy", default="fixed", help="default: %(default)s")
    parser.add_argument(
        "--prefix-cache-dir",
        type=Path,
        metavar="DIR",
        help="measure prefixes read back from disk after a restart, too",
    )
    parser.set_defaults(func=_prefix)


@run_guarded
def _prefix(args: argparse.Namespace) -> int:
    with _open(args) as bench:
        report: dict[str, Any] = {
            "model": bench.model.manifest.name,
            "machine": platform.processor() or platform.machine(),
            "threads": bench.model.config.engine_threads,
            "policy": args.policy,
            **_pairs(bench, args.pairs),
            "workload": _workload(bench, args.requests),
        }
    if args.prefix_cache_dir:
        report |= _restarted(args)
    _print(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["same_tokens"] and report["workload"]["same_tokens"] else 1


@dataclass(frozen=True)
class _Answer:
    """What one request got and cost."""

    token_ids: list[int]
    first_token_s: float
    total_s: float
    cached_tokens: int
    prefill_tokens: int  # that the verifier computed
    cache_s: float  # inside the prefix cache
    stats: dict[str, float]


@contextlib.contextmanager
def _open(args: argparse.Namespace, **options: Any) -> Iterator[_Bench]:
    """A warmed-up engine with an empty cache."""
    options |= {"policy": args.policy, "max_batch_requests": 1, "prefix_cache_mb": 4096}
    model = open_model(args, **options)
    bench = _Bench(model, args)
    bench.run(bench.document(0, PROMPT_TOKENS), disable=True)
    yield bench
    model.close()


class _Bench:
    """A loop with a timed cache, and texts that begin alike only when they are meant to."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model = model
        self._texts = read_prompts(args.prompts, args.limit)
        self._max_tokens = args.max_new_tokens
        self._cache = model.cache = _TimedCache(model.cache)
        self._loop: Loop = model.make_loop()

    def document(self, number: int, length: int) -> list[int]:
        """`length` tokens of text, different from the first block on for each number."""
        texts = list(self._texts)
        random.Random(number).shuffle(texts)
        ids: list[int] = []
        while len(ids) < length:
            text = f"Notes, part {number}.\n\n" + "\n\n".join(texts)
            ids += self.model.tokenizer.encode_prompt(text, True, len(text.encode()))
        return ids[:length]

    def question(self, number: int, length: int) -> list[int]:
        """The last `length` tokens of a document that ends in a question to the assistant."""
        text = self._texts[number % len(self._texts)]
        asked = self.model.tokenizer.encode_prompt(text, False, len(text.encode()))
        return [*self.document(1_000_000 + number, length), *asked][-length:]

    def run(
        self, prompt_ids: list[int], salt: str = "", max_tokens: int = 0, disable: bool = False
    ) -> _Answer:
        """One request, alone."""
        fields = {
            "prompt_ids": prompt_ids,
            "max_tokens": max_tokens or self._max_tokens,
            "ignore_eos": True,
            "cache_salt": salt,
            "disable_prefix_cache": disable,
        }
        request = validate_request(fields, self.model.limits)
        outputs: list[RequestOutput] = []
        counts = self._loop.metrics.counts
        prefilled, cache_s = counts["prefill_verifier_tokens"], self._cache.seconds
        start = time.perf_counter()
        self._loop.add(request, outputs.append)
        while self._loop.has_work:
            self._loop.step()
        (output,) = outputs
        return _Answer(
            output.token_ids,
            output.stats["time_to_first_token_s"],
            time.perf_counter() - start,
            int(output.stats["num_cached_tokens"]),
            counts["prefill_verifier_tokens"] - prefilled,
            self._cache.seconds - cache_s,
            output.stats,
        )


class _TimedCache:
    """A prefix cache that adds up the time spent in it."""

    def __init__(self, cache: PrefixCache) -> None:
        self.pool = cache.pool
        self.seconds = 0.0
        self._cache = cache

    def _timed(self, method: Any, *args: Any) -> Any:
        start = time.perf_counter()
        result = method(*args)
        self.seconds += time.perf_counter() - start
        return result

    def match(self, sequence: Sequence) -> list[int]:
        blocks: list[int] = self._timed(self._cache.match, sequence)
        return blocks

    def extend(self, sequence: Sequence, max_loaded: int) -> Found:
        found: Found = self._timed(self._cache.extend, sequence, max_loaded)
        return found

    def publish(self, sequence: Sequence) -> None:
        self._timed(self._cache.publish, sequence)

    def lags(self, sequence: Sequence) -> bool:
        lags: bool = self._timed(self._cache.lags, sequence)
        return lags

    def metrics(self) -> dict[str, float]:
        return self._cache.metrics()

    def close(self) -> None:
        self._cache.close()


def _prompt(bench: _Bench, number: int, question: int = 0) -> list[int]:
    tail = bench.question(2 * number + question, QUESTION_TOKENS)
    return bench.document(number, SHARED_TOKENS) + tail


def _pairs(bench: _Bench, count: int) -> dict[str, Any]:
    """Prompts whose shared part is cached beside the same prompts under a fresh salt."""
    cold: list[_Answer] = []
    warm: list[_Answer] = []
    for i in range(count):
        bench.run(_prompt(bench, i, question=1), salt=f"warm {i}", max_tokens=3)
        runs = [(cold, f"cold {i}"), (warm, f"warm {i}")]
        for answers, salt in runs if i % 2 else runs[::-1]:
            answers.append(bench.run(_prompt(bench, i), salt=salt))
    shared = [a.prefill_tokens - QUESTION_TOKENS for a in warm]
    result = {
        "ttft_cold_s": median(a.first_token_s for a in cold),
        "ttft_warm_s": median(a.first_token_s for a in warm),
        "same_tokens": [a.token_ids for a in cold] == [a.token_ids for a in warm],
        "accepted_length_cold": accepted_length(_sum(cold)),
        "accepted_length_warm": accepted_length(_sum(warm)),
        "shared_prefill_saved": 1 - sum(shared) / (count * SHARED_TOKENS),
    }
    return result | {"ttft_ratio": result["ttft_cold_s"] / result["ttft_warm_s"]}


def _restarted(args: argparse.Namespace) -> dict[str, Any]:
    """The same prompts once more, their shared part computed by an engine that was closed."""
    folder = str(args.prefix_cache_dir)
    with _open(args, prefix_cache_dir=folder) as bench:
        for i in range(args.pairs):
            bench.run(_prompt(bench, i, question=1), max_tokens=3)
    with _open(args, prefix_cache_dir=folder) as bench:
        answers = [bench.run(_prompt(bench, i)) for i in range(args.pairs)]
    return {
        "ttft_disk_s": median(a.first_token_s for a in answers),
        "disk_cached_tokens": min(a.cached_tokens for a in answers),
    }


def _sum(answers: list[_Answer]) -> dict[str, float]:
    names = ("num_rounds", "num_accepted_draft_tokens")
    return {name: sum(a.stats[name] for a in answers) for name in names}


@dataclass
class _Group:
    """Requests of the workload, each run with the cache and without it."""

    cached: list[_Answer] = field(default_factory=list)
    plain: list[_Answer] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        cached_s, plain_s = sum(a.total_s for a in self.cached), sum(a.total_s for a in self.plain)
        return {
            "requests": len(self.cached),
            "ttft_s": median(a.first_token_s for a in self.cached),
            "ttft_without_cache_s": median(a.first_token_s for a in self.plain),
            "prefill_tokens": sum(a.prefill_tokens for a in self.cached),
            "prefill_tokens_without_cache": sum(a.prefill_tokens for a in self.plain),
            "total_s": cached_s,
            "total_without_cache_s": plain_s,
            "time_in_cache": sum(a.cache_s for a in self.cached) / cached_s,
        }


def _workload(bench: _Bench, count: int) -> dict[str, Any]:
    """Every other request shares one of a few system prompts; the rest share nothing."""
    shared, unique = _Group(), _Group()
    for i in range(count):
        length = SYSTEM_PROMPT_TOKENS[i // 2 % len(SYSTEM_PROMPT_TOKENS)]
        group, number = (unique, 3000 + i) if i % 2 else (shared, 2000 + length)
        prompt = bench.document(number, length) + bench.question(4000 + i, QUESTION_TOKENS)
        for disable in (False, True) if i // 2 % 2 else (True, False):
            answer = bench.run(prompt, salt="workload", disable=disable)
            (group.plain if disable else group.cached).append(answer)
    same = [
        [a.token_ids for a in group.cached] == [a.token_ids for a in group.plain]
        for group in (shared, unique)
    ]
    return {
        "same_tokens": all(same),
        "sharing": shared.summary(),
        "not_sharing": unique.summary(),
    }


def _print(report: dict[str, Any]) -> None:
    for name, value in report.items():
        if isinstance(value, dict):
            for group in ("sharing", "not_sharing"):
                print(f"{name}, {group.replace('_', ' ')}:")
                _print(value[group])
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{name:>30}  {shown}")
