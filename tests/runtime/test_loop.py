"""The loop against plain decoding of a known target: exact whatever the policy, batch or pool."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from runtime.sampling import softmax
from tests.runtime.fakes import (
    BLOCK_SIZE,
    EOS,
    VOCAB,
    Collector,
    greedy_reference,
    make_loop,
    make_request,
    make_tables,
    ruled_logits,
    run_all,
    target_logits,
)

# Each statistical test below fails by chance with this probability at most (seeds are fixed, so
# it either always passes or always fails).
FALSE_ALARM = 1e-6

policies = st.sampled_from(
    [
        *("off", "fixed", *(f"fixed:{k}" for k in range(BLOCK_SIZE + 1))),
        *("threshold", "throughput", "throughput", "lagged", "lagged"),
    ]
)
prompts = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=30).map(tuple)
rules = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 3.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.7, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.3, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-9.0, 1.5, 4])),
        "bad_words": st.lists(st.text("abcdefgh", min_size=1, max_size=3), max_size=4),
        "min_tokens": st.integers(0, 10),
    },
)
greedy_requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.integers(1, 30),
        "ignore_eos": st.booleans(),
        "disable_spec_decode": st.booleans(),
        "num_draft_tokens": st.one_of(st.none(), st.integers(0, BLOCK_SIZE + 2)),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    requests=st.lists(greedy_requests, min_size=1, max_size=10),
    policy=policies,
    draft_s=st.sampled_from([0.0, 0.3, 1.0]),
    agreement=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    slots=st.integers(1, 16),
    chunk=st.sampled_from([1, 3, 8, 64]),
    num_blocks=st.integers(20, 120),
    joins=st.randoms(use_true_random=False),
)
def test_greedy_equals_plain_decoding(
    requests: list[dict],
    policy: str,
    draft_s: float,
    agreement: float,
    slots: int,
    chunk: int,
    num_blocks: int,
    joins: random.Random,
) -> None:
    """Every policy, length, batch, chunk and pool size; requests join while others run.

    Small pools preempt: 20 blocks hold one longest request, 16 at once need far more.
    """
    loop, _ = make_loop(
        num_blocks=num_blocks,
        agreement=agreement,
        tables=make_tables(draft_s=draft_s),
        policy=policy,
        max_batch_requests=slots,
        prefill_chunk_tokens=chunk,
    )
    waiting = [
        (make_request(r["prompt"], **{k: v for k, v in r.items() if k != "prompt"}), Collector())
        for r in requests
    ]
    pending = list(waiting)
    while pending or loop.has_work:
        while pending and joins.random() < 0.5:
            loop.add(*pending.pop())
        if loop.has_work:
            loop.step()
    for request, collector in waiting:
        expected = greedy_reference(request.prompt_ids, request.max_tokens, not request.ignore_eos)
        assert collector.token_ids == expected
        assert collector.final.num_output_tokens == len(expected)
    assert loop.admission.pool.num_free == num_blocks


@settings(max_examples=120, deadline=None)
@given(
    prompts=st.lists(prompts, min_size=1, max_size=4),
    fields=rules,
    stop_at_eos=st.booleans(),
    agreement=st.sampled_from([0.3, 0.8, 1.0]),
    policy=policies,
)
def test_greedy_equals_plain_decoding_with_penalties_bias_and_bans(
    prompts: list[tuple[int, ...]],
    fields: dict,
    stop_at_eos: bool,
    agreement: float,
    policy: str,
) -> None:
    """Each row must look back on the draft tokens before it, and never on those of another round;
    a pool of 30 blocks preempts, which must not count anything twice."""
    loop, _ = make_loop(
        tables=make_tables(),
        num_blocks=30,
        agreement=agreement,
        policy=policy,
        max_batch_requests=4,
    )
    fields["min_tokens"] = min(12, fields.get("min_tokens", 0))
    requests = [
        make_request(prompt, max_tokens=12, ignore_eos=not stop_at_eos, **fields)
        for prompt in prompts
    ]
    for prompt, result in zip(prompts, run_all(loop, requests), strict=True):
        assert result.token_ids == greedy_reference(prompt, 12, stop_at_eos, **fields)


@pytest.mark.parametrize("policy", ["off", "fixed:3", "fixed"])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_the_targets_after_penalties(policy: str, stream: bool) -> None:
    """Whatever was drafted: of every token, and of those alone that the answer keeps."""
    prompt, penalties = (4, 2), {"presence_penalty": 1.0, "repetition_penalty": 1.2}
    loop, _ = make_loop(agreement=0.8, policy=policy)
    (result,) = run_all(
        loop,
        [
            make_request(
                prompt,
                max_tokens=20,
                temperature=0.7,
                top_k=4,
                seed=5,
                ignore_eos=True,
                return_log_probs=True,
                stream=stream,
                **penalties,
            )
        ],
    )
    expected, output = [], []
    for token in result.token_ids:
        logits = target_logits((*prompt, *output)).astype(np.float64)
        logits = ruled_logits(logits, prompt, output, set(), **penalties)
        expected.append(logits[token] - np.log(np.exp(logits).sum()))
        output.append(token)
    got = [value for piece in result.outputs for value in piece.log_probs]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert result.final.cum_log_probs == pytest.approx(sum(expected), abs=1e-4)


def test_min_tokens_holds_back_end_tokens_and_stop_words() -> None:
    prompt = (3, 1, 4)
    plain = greedy_reference(prompt, 30, stop_at_eos=False)
    first = chr(ord("a") + plain[0])
    loop, _ = make_loop(agreement=1.0)
    stopped, held = run_all(
        loop,
        [
            make_request(prompt, max_tokens=30, ignore_eos=True, stop_words=[first], **fields)
            for fields in ({}, {"min_tokens": 5})
        ],
    )
    assert (stopped.final.finish_reason, stopped.final.num_output_tokens) == ("stop", 1)
    assert held.final.num_output_tokens >= 5
    assert held.token_ids == plain[: len(held.token_ids)]


def test_end_id_takes_the_place_of_the_models_own_end_tokens() -> None:
    prompt = (3, 1, 4)
    plain = greedy_reference(prompt, 30, stop_at_eos=False)
    loop, _ = make_loop()
    (result,) = run_all(loop, [make_request(prompt, max_tokens=30, end_id=plain[6])])
    assert result.final.finish_reason == "eos"
    assert result.token_ids == plain[: plain.index(plain[6]) + 1]
    assert len(result.text) == len([i for i in result.token_ids if i != EOS]) - 1


def test_a_drafter_that_always_agrees_gains_a_block_and_one_per_round() -> None:
    loop, verifier = make_loop(agreement=1.0)
    rounds = 4
    tokens = 1 + rounds * (BLOCK_SIZE + 1)
    (result,) = run_all(loop, [make_request((1, 2, 3), max_tokens=tokens, ignore_eos=True)])
    assert result.final.stats["num_rounds"] == rounds
    assert result.final.stats["num_accepted_draft_tokens"] == rounds * BLOCK_SIZE
    assert len(verifier.runs) == 1 + rounds


def test_a_drafter_that_never_agrees_still_gains_one_token_per_round() -> None:
    loop, verifier = make_loop(agreement=0.0)
    (result,) = run_all(loop, [make_request((1, 2, 3), max_tokens=9, ignore_eos=True)])
    assert result.final.stats["num_rounds"] == 8
    assert result.final.stats["num_accepted_draft_tokens"] == 0
    assert len(verifier.runs) == 9


def test_a_prefill_delays_running_requests_by_one_chunk_at_most() -> None:
    loop, verifier = make_loop(policy="off", prefill_chunk_tokens=8)
    first = Collector()
    loop.add(make_request((1, 2), max_tokens=40, stream=True, ignore_eos=True), first)
    loop.step()
    loop.add(make_request(tuple([3] * 60), max_tokens=2), Collector())
    for _ in range(6):
        before, runs = len(first.token_ids), len(verifier.runs)
        loop.step()
        assert len(first.token_ids) == before + 1
        assert max(verifier.runs[runs:]) <= 8


def test_preemption_loses_nothing() -> None:
    """Two requests that fit alone but not together: the younger yields and comes back."""
    loop, _ = make_loop(num_blocks=12, policy="fixed", max_batch_requests=2)
    requests = [make_request((i, i, i), max_tokens=30, ignore_eos=True) for i in (1, 2)]
    results = run_all(loop, requests)
    assert loop.metrics.counts["preemptions"] > 0
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == greedy_reference(request.prompt_ids, 30, False)


@pytest.mark.parametrize("policy", ["off", "fixed:2", "fixed"])
def test_a_stop_inside_an_accepted_block_cuts_text_ids_usage_and_metrics(policy: str) -> None:
    prompt = (3, 1, 4)
    tokens = greedy_reference(prompt, 30, stop_at_eos=False)
    text = "".join(chr(ord("a") + t) for t in tokens)
    end = next(i for i in range(8, 20) if text.find(text[i : i + 2]) == i)
    loop, _ = make_loop(agreement=1.0, policy=policy)
    (result,) = run_all(
        loop,
        [
            make_request(
                prompt,
                max_tokens=30,
                stream=True,
                ignore_eos=True,
                stop_words=[text[end : end + 2]],
            )
        ],
    )
    assert result.final.finish_reason == "stop"
    assert result.text == text[:end]
    assert result.token_ids == tokens[: end + 2]
    assert result.final.num_output_tokens == end + 2
    assert loop.metrics.counts["output_tokens"] == end + 2
    gained = 1 + result.final.stats["num_rounds"] + result.final.stats["num_accepted_draft_tokens"]
    assert gained in (end + 2, end + 3)  # a round cut before its own token has none


@pytest.mark.parametrize("policy", ["off", "fixed"])
def test_eos_ends_the_answer_in_the_ids_but_not_in_the_text(policy: str) -> None:
    prompt = next(
        p
        for p in ((a, b) for a in range(1, VOCAB) for b in range(1, VOCAB))
        if 3 < len(greedy_reference(p, 12, True)) < 12
    )
    loop, _ = make_loop(agreement=1.0, policy=policy)
    (result,) = run_all(loop, [make_request(prompt, max_tokens=12, stream=True)])
    assert result.final.finish_reason == "eos"
    assert result.token_ids[-1] == EOS
    assert len(result.text) == len(result.token_ids) - 1
    assert result.final.num_output_tokens == len(result.token_ids)


def test_one_response_unless_streaming() -> None:
    loop, _ = make_loop()
    once, streamed = run_all(
        loop,
        [
            make_request((1, 2), max_tokens=12, ignore_eos=True, stream=stream)
            for stream in (False, True)
        ],
    )
    assert len(once.outputs) == 1
    assert len(streamed.outputs) > 1
    assert once.text == streamed.text


def test_an_aborted_request_frees_its_blocks_at_once() -> None:
    loop, _ = make_loop()
    collector = Collector()
    sequence = loop.add(make_request((1, 2, 3), max_tokens=50, ignore_eos=True), collector)
    for _ in range(3):
        loop.step()
    loop.abort(sequence, "cancelled")
    assert collector.final.finish_reason == "cancelled"
    assert loop.admission.pool.num_free == loop.admission.pool.num_blocks
    assert not loop.has_work


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_coupled_text_is_a_function_of_the_seed_alone(temperature: float) -> None:
    """The same tokens for every policy, alone and among seven others."""
    fields = {"max_tokens": 24, "temperature": temperature, "top_p": 0.9, "ignore_eos": True}
    seeds = range(8)
    expected: dict[int, list[int]] = {}
    for policy in ["off", *(f"fixed:{k}" for k in range(1, BLOCK_SIZE + 1))]:
        for slots in (1, 8):
            loop, _ = make_loop(agreement=0.7, policy=policy, max_batch_requests=slots)
            results = run_all(loop, [make_request((5, 6), seed=s, **fields) for s in seeds])
            for seed, result in zip(seeds, results, strict=True):
                assert result.token_ids == expected.setdefault(seed, result.token_ids)
    assert len({tuple(tokens) for tokens in expected.values()}) == len(seeds)


@pytest.mark.parametrize(
    ("policy", "acceptance"),
    [
        *[(p, a) for p in ("off", "fixed:1", "fixed") for a in ("rejection", "coupled")],
        *[(p, "rejection") for p in ("throughput", "lagged")],
    ],
)
def test_sampled_tokens_have_the_target_distribution(policy: str, acceptance: str) -> None:
    """First and second token through the whole loop, 4,000 seeds, chi-square on their cells."""
    prompt, count, temperature = (7, 8, 9), 4_000, 0.8
    tables = make_tables(request_s=0.05, token_s=0.04, draft_s=0.0)
    loop, _ = make_loop(agreement=0.4, policy=policy, max_batch_requests=64, tables=tables)
    results = run_all(
        loop,
        [
            make_request(
                prompt,
                max_tokens=3,
                temperature=temperature,
                seed=seed,
                acceptance=acceptance,
                ignore_eos=True,
            )
            for seed in range(count)
        ],
    )
    pairs = Counter(tuple(result.token_ids[1:3]) for result in results)
    first = softmax(target_logits(prompt) / np.float32(temperature))
    expected = np.zeros((VOCAB, VOCAB))
    for token in range(VOCAB):
        second = softmax(target_logits((*prompt, token)) / np.float32(temperature))
        for other in range(VOCAB):
            third = softmax(target_logits((*prompt, token, other)) / np.float32(temperature))
            expected[other] += first[token] * second[other] * third
    observed = np.array([[pairs[a, b] for b in range(VOCAB)] for a in range(VOCAB)], float)
    likely = expected * count >= 5
    observed_cells = [*observed[likely], observed[~likely].sum()]
    expected_cells = [*(expected[likely] * count), expected[~likely].sum() * count]
    expected_cells = np.array(expected_cells) * count / np.sum(expected_cells)  # fp32 rounding
    assert stats.chisquare(observed_cells, expected_cells).pvalue > FALSE_ALARM
