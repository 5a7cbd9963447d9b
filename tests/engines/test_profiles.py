"""Profiles hold every step that the loop can make under the same configuration, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.profiles import (
    MAX_ELEMENTS,
    ProfileError,
    Range,
    between,
    profiles,
    serving_limits,
    shapes,
)
from runtime.config import RuntimeConfig
from runtime.loop import MAX_PENDING_TOKENS
from runtime.spec import TensorSpec, drafter_inputs, verifier_inputs
from tests.runtime.fakes import BLOCK_SIZE, BLOCK_TOKENS, manifest

CONFIG = RuntimeConfig(max_batch_requests=3, prefill_chunk_tokens=7, max_model_tokens=40)


def of(config: RuntimeConfig = CONFIG) -> dict:
    return profiles(manifest(), serving_limits(manifest(), config))


def test_decode_holds_a_block_of_every_request() -> None:
    decode = of()["verifier"]["decode"]
    rows = 3 * (BLOCK_SIZE + 1)
    assert {symbol: (r.min, r.max) for symbol, r in decode.items() if symbol != "P"} == {
        "R": (1, 3),
        "S": (1, BLOCK_SIZE + 1),
        "N": (1, rows),
        "L": (1, rows),
        "M": (1, -(-(40 + BLOCK_SIZE) // BLOCK_TOKENS)),
    }


def test_prefill_may_want_no_logits() -> None:
    prefill = of()["verifier"]["prefill"]
    assert (prefill["N"].max, prefill["S"].max) == (7, 7)
    assert (prefill["L"].min, prefill["L"].max) == (0, 3)


def test_drafter_takes_all_that_is_owed() -> None:
    owed = MAX_PENDING_TOKENS + BLOCK_SIZE + 1 + 7
    prefill = of()["drafter"]["prefill"]
    assert (prefill["S"].max, prefill["C"].max) == (owed, 3 * owed)


def test_noise_is_one_column_or_the_whole_draft_vocabulary() -> None:
    m = manifest()
    assert m.drafter is not None
    assert of()["drafter"]["decode"]["W"] == Range(1, 1, m.drafter.draft_vocab_size)


def test_without_a_drafter_a_step_is_one_token() -> None:
    plain = manifest(with_drafter=False)
    by_graph = profiles(plain, serving_limits(plain, CONFIG))
    assert by_graph.keys() == {"verifier"}
    assert by_graph["verifier"]["decode"]["S"] == Range(1, 1, 1)


def test_the_models_context_is_the_default() -> None:
    limits = serving_limits(manifest(), RuntimeConfig())
    assert limits["max_model_tokens"] == manifest().verifier.max_positions
    assert limits.keys() <= vars(RuntimeConfig()).keys()


def test_a_pool_stays_within_what_one_tensor_holds() -> None:
    wide = manifest()
    kv = replace(wide.verifier.kv, num_kv_heads=1024, head_dim=1024)
    wide = replace(wide, verifier=replace(wide.verifier, kv=kv))
    limits = serving_limits(wide, RuntimeConfig(kv_cache_mb=1 << 30))
    pool = profiles(wide, limits)["verifier"]["decode"]["P"]
    row = kv.block_tokens * kv.num_kv_heads * kv.head_dim
    assert pool.max == MAX_ELEMENTS // row
    assert profiles(wide, limits)["drafter"]["decode"]["P"].max > pool.max


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_optimum_lies_between(low: int, more: int) -> None:
    r = between(low, low + more)
    assert r.min == low <= r.opt <= r.max == low + more


@given(st.integers(1, 64), st.integers(1, 512), st.integers(0, 200), st.integers(1, 10**5))
def test_every_input_has_its_dimensions(
    requests: int, chunk: int, tokens: int, kv_cache_mb: int
) -> None:
    config = RuntimeConfig(
        max_batch_requests=requests,
        prefill_chunk_tokens=chunk,
        max_model_tokens=tokens,
        kv_cache_mb=kv_cache_mb,
    )
    m = manifest()
    assert m.drafter is not None
    inputs = {"verifier": verifier_inputs(m.verifier), "drafter": drafter_inputs(m.drafter)}
    for graph, phases in of(config).items():
        for profile in phases.values():
            for spec in inputs[graph]:
                low, opt, high = shapes(spec, profile)
                assert all(0 <= a <= b <= c for a, b, c in zip(low, opt, high, strict=True))


def test_what_does_not_fit_is_named() -> None:
    spec = TensorSpec("token_ids", "int64", ("N",))
    with pytest.raises(ProfileError, match=r"lacks N, a dimension of token_ids: it has \['R'\]"):
        shapes(spec, {"R": Range(1, 1, 1)})
    with pytest.raises(ProfileError, match=r"N, .* 0 <= min <= opt <= max, got 8, 4, 2"):
        shapes(spec, {"N": Range(8, 4, 2)})
