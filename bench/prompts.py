"""Prompts for measurements, and running them through a loop without a server."""

from __future__ import annotations

import argparse
import json
import random
from functools import partial
from pathlib import Path

from runtime.config import ConfigError
from runtime.loop import Loop
from runtime.request import Request, RequestOutput


def add_prompt_arguments(
    parser: argparse.ArgumentParser, *, limit: int, max_new_tokens: int
) -> None:
    """Which prompts to run, how far, and where the report goes; shared by every measurement."""
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help='JSON lines of {"turns": ["user message", ...]}; the first turn is used',
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=limit,
        metavar="N",
        help="first N prompts, 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help="tokens per answer (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report here as JSON")


def read_prompts(path: Path, limit: int) -> list[str]:
    """First turns of a JSON-lines file; raises ConfigError naming the line that is not one."""
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            prompts.append(json.loads(line)["turns"][0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f'{path}:{number} is not a JSON object {{"turns": ["user message"]}}'
            ) from error
    return prompts[:limit] if limit else prompts


def run_requests(
    loop: Loop, requests: list[Request], joins: random.Random | None = None
) -> list[list[int]]:
    """Output tokens of each request; with `joins` they arrive at random steps, in random order."""
    finals: dict[int, RequestOutput] = {}
    arrivals = list(enumerate(requests))
    if joins is not None:
        joins.shuffle(arrivals)
    while arrivals or loop.has_work:
        while arrivals and (joins is None or joins.random() < 0.3):
            index, request = arrivals.pop()
            loop.add(request, partial(finals.__setitem__, index))
        if loop.has_work:
            loop.step()
    return [finals[index].token_ids for index in range(len(requests))]
