"""Optimisation profiles: between which sizes every dynamic dimension may lie, for whom to serve.

One serving configuration decides, the one that the runtime then runs with. Both engines get two
profiles: `decode` for rounds of at most one block per request, `prefill` for everything else.
Dimensions are the symbols of `runtime.spec`; equal symbols are equal numbers in every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from runtime.config import MIB, RuntimeConfig
from runtime.kv_blocks import blocks_for
from runtime.loop import MAX_PENDING_TOKENS
from runtime.manifest import Manifest
from runtime.spec import KvDims, TensorSpec

MAX_ELEMENTS = 2**31 - 1  # of one tensor in TensorRT


class Range(NamedTuple):
    """Least, most likely and greatest size of a dimension."""

    min: int
    opt: int
    max: int


Profile = Mapping[str, Range]  # by symbol


class ProfileError(ValueError):
    """A range is empty, negative or lacks its symbol."""


def between(low: int, high: int) -> Range:
    """Sizes from `low` to `high`, tuned for their geometric mean: loads differ by factors."""
    return Range(low, round(math.sqrt(max(low, 1) * high)), high)


def serving_limits(manifest: Manifest, config: RuntimeConfig) -> dict[str, int]:
    """What engines for `config` can serve, under the names of RuntimeConfig's fields."""
    limit = config.max_model_tokens or manifest.verifier.max_positions
    return {
        "max_batch_requests": config.max_batch_requests,
        "prefill_chunk_tokens": config.prefill_chunk_tokens,
        "max_model_tokens": min(limit, manifest.verifier.max_positions),
        "kv_cache_mb": config.kv_cache_mb,
        "prefix_cache_mb": config.prefix_cache_mb,
    }


def profiles(manifest: Manifest, limits: Mapping[str, int]) -> dict[str, dict[str, Profile]]:
    """Profiles by graph (`verifier`, `drafter`) and phase (`decode`, `prefill`)."""
    requests, chunk = limits["max_batch_requests"], limits["prefill_chunk_tokens"]
    draft = manifest.drafter
    block = 0 if draft is None else draft.block_size
    kv = manifest.verifier.kv
    table = blocks_for(limits["max_model_tokens"] + block, kv.block_tokens)
    token_bytes = kv.token_bytes + (0 if draft is None else draft.kv.token_bytes)
    block_bytes = token_bytes * kv.block_tokens
    running = min(requests * table, limits["kv_cache_mb"] * MIB // block_bytes)
    blocks = max(1, running + limits["prefix_cache_mb"] * MIB // block_bytes)
    step, rows = block + 1, requests * (block + 1)
    shared = {"R": between(1, requests), "M": between(1, table)}

    def pool(dims: KvDims) -> Range:
        row = dims.block_tokens * dims.num_kv_heads * dims.head_dim
        return between(1, min(blocks, MAX_ELEMENTS // row))

    verifier = shared | {"P": pool(kv)}
    result: dict[str, dict[str, Profile]] = {
        "verifier": {
            "decode": verifier
            | {"S": between(1, step), "N": between(1, rows), "L": between(1, rows)},
            "prefill": verifier
            | {"S": between(1, chunk), "N": between(1, chunk), "L": between(0, requests)},
        }
    }
    if draft is not None:
        # Noise for every token of the draft vocabulary, or a single column where nobody wants it.
        noise = Range(1, 1, draft.draft_vocab_size)
        drafter = shared | {"P": pool(draft.kv), "W": noise}
        # A request owes the drafter at most this much before the loop makes it catch up.
        owed = MAX_PENDING_TOKENS + step + chunk
        context = {"S": between(1, owed), "C": between(1, requests * owed)}
        result["drafter"] = {
            "decode": drafter | {"S": between(1, step), "C": between(1, rows)},
            "prefill": drafter | context,
        }
    return result


def shapes(spec: TensorSpec, profile: Profile) -> tuple[tuple[int, ...], ...]:
    """Minimum, optimum and maximum shape of one input.

    Raises ProfileError when the profile lacks a dimension or its range is not ascending.
    """
    for dim in spec.dims:
        if isinstance(dim, int):
            continue
        if dim not in profile:
            raise ProfileError(
                f"the profile lacks {dim}, a dimension of {spec.name}: it has {sorted(profile)}"
            )
        low, opt, high = profile[dim]
        if not 0 <= low <= opt <= high:
            raise ProfileError(
                f"{dim}, a dimension of {spec.name}, must have 0 <= min <= opt <= max, "
                f"got {low}, {opt}, {high}"
            )
    return tuple(
        tuple(d if isinstance(d, int) else profile[d][i] for d in spec.dims) for i in range(3)
    )


def dynamic(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The specs with a dimension that is not fixed."""
    return [spec for spec in specs if any(isinstance(d, str) for d in spec.dims)]
