"""What a step costs on this machine: the table that `dspark profile` measured.

Two costs, in seconds: of drafting for D requests, and of verifying N packed tokens of R requests.
Both depend on the context too (its pages are gathered for every request), and verifying depends on
R beside N, so the table has those axes; between its points costs are interpolated. They are of
requests with equally many tokens: attention pads the others to the longest, which costs extra.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.manifest import Manifest

FORMAT = 2
PATH = "cost/cost.json"  # in the engine folder
COMMAND = "dspark profile"
_CONTEXT_STEP = 64  # costs are worked out anew when the context has moved by so many tokens


class TableError(Exception):
    """Something measured is missing, damaged or of something else; names the command to run."""


@dataclass(frozen=True, eq=False)
class CostTable:
    """Contents of cost.json; every axis ascends, and no cost falls along one.

    K context lengths, Q request counts, S tokens per request (an anchor and 0 .. g draft tokens).
    """

    identity: dict[str, Any]  # see `identity_of`
    context_lens: tuple[int, ...]  # [K] tokens of each request in the pool
    requests: tuple[int, ...]  # [Q]
    segment_lens: tuple[int, ...]  # [S]
    verify_s: tuple[tuple[tuple[float, ...], ...], ...]  # [K, Q, S]
    padding_s: tuple[float, ...]  # [K] for each token by which a request is short of the longest
    draft_s: tuple[tuple[float, ...], ...]  # [K, Q], one new context token each; [K, 0] if none
    context_token_s: float  # of drafting, for each further token of new context
    prefill_token_s: float  # of a verifier pass, for each token of a long prompt
    repeats: int
    format: int = FORMAT

    def verify_cost(self, requests: int, num_tokens: int, context_len: float) -> NDArray:
        """Seconds to verify 0 .. `num_tokens` draft tokens of `requests` requests, [n + 1].

        At most g for each request; beyond the last context length costs go on as they rose.
        """
        return _verify_cost(self, requests, num_tokens, _rounded(context_len))

    def padding_cost(self, num_tokens: NDArray | int, context_len: float) -> NDArray:
        """Seconds that attention takes beyond `verify_cost` to pad by `num_tokens` tokens."""
        return np.asarray(num_tokens) * _padding_cost(self, _rounded(context_len))

    def draft_cost(self, requests: int, context_len: float) -> float:
        """Seconds to draft for `requests` requests."""
        return _draft_cost(self, requests, _rounded(context_len))

    def to_json(self) -> str:
        """The table as indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def identity_of(manifest: Manifest, threads: int) -> dict[str, Any]:
    """What a table is bound to: the engine, its runner and threads, and the machine."""
    return {
        "engine": manifest.fingerprint,
        "builder": f"{manifest.builder.name} {manifest.builder.version}",
        "threads": threads,
        "machine": machine(),
        "gpu": None if manifest.on_cpu else _gpu(),
    }


def parse_cost(text: str) -> CostTable:
    """A table from its JSON; raises TableError when that is not what this version writes."""
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise TableError(f"this version reads cost tables of format {FORMAT}: run `{COMMAND}`")
        identity = data.pop("identity")
        return CostTable(identity, **as_tuples(data))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TableError(f"the cost table cannot be read ({error!r}): run `{COMMAND}`") from error


def load_cost(engine_dir: Path, manifest: Manifest, threads: int, max_requests: int) -> CostTable:
    """The table of this engine on this machine, good for `max_requests` at once.

    Raises TableError naming what differs and the command that measures.
    """
    path = engine_dir / (manifest.cost or PATH)
    if not path.is_file():
        raise TableError(f"there is no cost table of this engine: run `{COMMAND}`")
    table = parse_cost(path.read_text())
    here = identity_of(manifest, threads)
    for name, value in here.items():
        if table.identity.get(name) != value:
            raise TableError(
                f"the cost table is of another {name} ({_shown(table.identity.get(name))}, here "
                f"{_shown(value)}): run `{COMMAND}`"
            )
    if table.requests[-1] < max_requests:
        raise TableError(
            f"the cost table ends at {table.requests[-1]} requests, and {max_requests} may run at "
            f"once: run `{COMMAND} --max-requests {max_requests}`"
        )
    return table


@lru_cache(maxsize=4096)
def _verify_cost(table: CostTable, requests: int, num_tokens: int, context: int) -> NDArray:
    costs = np.asarray(table.verify_s)
    # [K, Q, S] -> [Q, S] -> [S] -> [n + 1]; tokens per request are a mean here, not a whole number.
    by_requests = _interpolate(context, table.context_lens, costs)
    by_tokens = _interpolate(requests, table.requests, by_requests)
    wanted = 1 + np.arange(num_tokens + 1) / requests
    return np.interp(wanted, table.segment_lens, by_tokens)


@lru_cache(maxsize=4096)
def _padding_cost(table: CostTable, context: int) -> float:
    return float(_interpolate(context, table.context_lens, np.asarray(table.padding_s)))


@lru_cache(maxsize=4096)
def _draft_cost(table: CostTable, requests: int, context: int) -> float:
    by_requests = _interpolate(context, table.context_lens, np.asarray(table.draft_s))
    return float(_interpolate(requests, table.requests, by_requests))


def _interpolate(at: float, points: tuple[int, ...], values: NDArray) -> NDArray:
    """`values` [len(points), ...] at `at`: linear, constant below and as steep above the ends."""
    if len(points) == 1 or at <= points[0]:
        return np.asarray(values[0])
    i = min(int(np.searchsorted(points, at)), len(points) - 1)
    share = (at - points[i - 1]) / (points[i] - points[i - 1])
    return np.asarray(values[i - 1] + share * (values[i] - values[i - 1]))


def _rounded(context_len: float) -> int:
    return round(context_len / _CONTEXT_STEP) * _CONTEXT_STEP


def as_tuples(value: Any) -> Any:
    """JSON's lists as tuples, all the way down."""
    if isinstance(value, dict):
        return {name: as_tuples(v) for name, v in value.items()}
    return tuple(as_tuples(v) for v in value) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:12] + "..."


def machine() -> str:
    """Processor and number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _gpu() -> str:
    """Names of the NVIDIA GPUs, as their driver gives them."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        names += [
            line.partition(":")[2].strip()
            for line in path.read_text().splitlines()
            if line.startswith("Model")
        ]
    return ", ".join(names)
