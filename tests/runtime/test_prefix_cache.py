"""Shared prefixes: the same tokens warm as cold, the drafter's context restored, nothing leaked."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.admission import Admission
from runtime.engine import Engines
from runtime.kv_blocks import BlockPool, blocks_for
from runtime.loop import Loop
from runtime.prefix_cache import BlockPrefixCache
from runtime.sequence import Sequence
from tests.runtime.fakes import (
    BLOCK_SIZE,
    BLOCK_TOKENS,
    VOCAB,
    Collector,
    FakeTokenizer,
    greedy_reference,
    make_loop,
    make_request,
    run_all,
)

NO_ENGINES: Any = Engines(None, None)  # type: ignore[arg-type]  # nothing is read without a disk

OPERATIONS = 100_000 if "DSPARK_SOAK" in os.environ else 2_000  # `make soak`
NUM_BLOCKS = 9
MAX_IDLE = 5
MAX_RUNNING = 3
MOST_TOKENS = NUM_BLOCKS * BLOCK_TOKENS

Written = tuple[str, tuple[int, ...]]  # salt and whole history: what a token's K/V depend on


class PrefixCacheMachine(RuleBasedStateMachine):
    """What the loop does with the cache, over a memory that knows what was written where.

    Two salts and a vocabulary of two make equal prefixes frequent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, MAX_IDLE)
        self.cache = BlockPrefixCache(self.pool, NO_ENGINES, "model", BLOCK_TOKENS, 1)
        self.admission = Admission(self.cache, BLOCK_TOKENS, MAX_RUNNING)
        self.alive: list[Sequence] = []
        self.verifier: dict[int, Written] = {}  # by pool slot
        self.drafter: dict[int, Written] = {}
        self.next_id = 0

    @rule(
        tokens=st.lists(st.integers(1, 2), min_size=1, max_size=MOST_TOKENS - 8),
        salt=st.sampled_from(["", "a"]),
        drafted=st.booleans(),
        disable=st.sampled_from([False] * 5 + [True]),
    )
    def arrive(self, tokens: list[int], salt: str, drafted: bool, disable: bool) -> None:
        self.next_id += 1
        request = make_request(
            tuple(tokens), max_tokens=100, cache_salt=salt, disable_prefix_cache=disable
        )
        tokenizer: Any = FakeTokenizer()
        sequence = Sequence(self.next_id, request, tokenizer, frozenset(), lambda _: None)
        sequence.drafted = drafted
        self.alive.append(sequence)
        self.admission.waiting.append(sequence)

    @rule()
    def admit(self) -> None:
        for sequence in self.admission.admit():
            assert sequence.num_computed < len(sequence.token_ids)
            if sequence.request.disable_prefix_cache:
                assert sequence.num_computed == 0
        if self.alive:
            assert self.admission.running, "requests wait although nothing runs: a deadlock"

    @precondition(lambda self: self.admission.running)
    @rule(data=st.data(), count=st.integers(1, 9), found=st.booleans(), fed=st.booleans())
    def step(self, data: st.DataObject, count: int, found: bool, fed: bool) -> None:
        """A prefill chunk, or one round of decoding that gains up to `count` tokens."""
        sequence = data.draw(st.sampled_from(self.admission.running))
        if sequence.is_decoding:
            if len(sequence.token_ids) + count > MOST_TOKENS:
                return
            while not self.admission.reserve(sequence, count):
                if self.admission.preempt_youngest() is sequence:
                    return
            if fed:
                self.draft(sequence)
            accepted = data.draw(st.lists(st.integers(1, 2), min_size=count, max_size=count))
            sequence.token_ids += accepted
            self.write(sequence, count)
        else:
            if fed:
                self.draft(sequence)
            if found:
                self.cache.extend(sequence, max_loaded=8)
            left = len(sequence.token_ids) - sequence.num_computed
            assert left > 0
            self.write(sequence, min(count, left))
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(data.draw(st.integers(1, 2)))

    def draft(self, sequence: Sequence) -> None:
        """The drafter catches up with what the verifier has computed."""
        if sequence.drafted:
            for position in range(sequence.num_drafter_computed, sequence.num_computed):
                self.drafter[self.slot(sequence, position)] = written(sequence, position)
            sequence.num_drafter_computed = sequence.num_computed
            self.cache.publish(sequence)

    def write(self, sequence: Sequence, count: int) -> None:
        for position in range(sequence.num_computed, sequence.num_computed + count):
            slot = self.slot(sequence, position)
            self.drafter.pop(slot, None)
            self.verifier[slot] = written(sequence, position)
        sequence.num_computed += count
        self.cache.publish(sequence)

    def slot(self, sequence: Sequence, position: int) -> int:
        """Where a token's K/V are about to be written, which nobody else may be reading."""
        block = sequence.blocks[position // BLOCK_TOKENS]
        assert self.pool.ref_count(block) == 1, "a shared block was written"
        assert block not in self.cache._keys, "a cached block was written"
        return block * BLOCK_TOKENS + position % BLOCK_TOKENS

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        self.alive.remove(sequence)
        self.admission.remove(sequence)

    @invariant()
    def every_block_is_free_idle_or_held(self) -> None:
        held = Counter(block for s in self.alive for block in s.blocks)
        assert [self.pool.ref_count(b) for b in range(NUM_BLOCKS)] == [
            held[b] for b in range(NUM_BLOCKS)
        ]
        free, idle = self.pool._free, list(self.pool._idle)
        assert sorted([*free, *idle, *held]) == list(range(NUM_BLOCKS))
        assert self.pool.num_free == len(free) + len(idle)
        assert self.pool.num_shared == sum(n > 1 for n in held.values())
        assert len(idle) <= MAX_IDLE

    @invariant()
    def names_say_what_the_blocks_hold(self) -> None:
        assert self.cache._keys == {block: key for key, block in self.cache._blocks.items()}
        assert set(self.cache._keys) == self.pool._kept
        assert set(self.pool._idle) <= self.pool._kept
        for block, key in self.cache._keys.items():
            last_slot = (block + 1) * BLOCK_TOKENS - 1
            salt, history = self.verifier[last_slot]
            assert len(history) % BLOCK_TOKENS == 0
            for before_end in range(BLOCK_TOKENS):
                slot, tokens = last_slot - before_end, history[: len(history) - before_end]
                assert self.verifier[slot] == (salt, tokens)
                if key.drafted:
                    assert self.drafter[slot] == (salt, tokens)
            request = make_request((*history, 1), max_tokens=1, cache_salt=salt)
            tokenizer: Any = FakeTokenizer()
            alone = Sequence(0, request, tokenizer, frozenset(), lambda _: None)
            fresh = BlockPrefixCache(BlockPool(1), NO_ENGINES, "model", BLOCK_TOKENS, 1)
            assert fresh._wanted(alone)[-1] == key.digest

    @invariant()
    def every_sequence_reads_its_own_history(self) -> None:
        for sequence in self.admission.running:
            assert len(sequence.blocks) >= blocks_for(sequence.num_computed, BLOCK_TOKENS)
            for memory, count in (
                (self.verifier, sequence.num_computed),
                (self.drafter, sequence.num_drafter_computed),
            ):
                for position in range(count):
                    block = sequence.blocks[position // BLOCK_TOKENS]
                    slot = block * BLOCK_TOKENS + position % BLOCK_TOKENS
                    assert memory[slot] == written(sequence, position)
        for sequence in self.admission.waiting:
            assert sequence.blocks == []
            assert sequence.num_computed == sequence.num_published == 0

    def teardown(self) -> None:
        for sequence in self.alive:
            self.admission.remove(sequence)
        assert self.pool.num_free == NUM_BLOCKS


def written(sequence: Sequence, position: int) -> Written:
    return sequence.request.cache_salt, tuple(sequence.token_ids[: position + 1])


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(
    max_examples=OPERATIONS // 50, stateful_step_count=50, deadline=None
)


turns = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=14)
conversations = st.fixed_dictionaries(
    {
        "system": st.integers(0, 2),  # which system prompt
        "turns": st.lists(turns, min_size=1, max_size=3),
        "max_tokens": st.integers(1, 14),
        "seed": st.one_of(st.none(), st.integers(0, 3)),  # None: greedy
        "disable_spec_decode": st.booleans(),
        "disable_prefix_cache": st.sampled_from([False, False, False, True]),
        "cache_salt": st.sampled_from(["", "", "b"]),
        "cancelled": st.booleans(),
    }
)
SYSTEM_PROMPTS = [
    tuple(random.Random(length).choices(range(1, VOCAB), k=length)) for length in (8, 21, 40)
]


@settings(max_examples=50, deadline=None)
@given(
    talks=st.lists(conversations, min_size=1, max_size=8),
    policy=st.sampled_from(["off", "fixed:2", "fixed"]),
    agreement=st.sampled_from([0.0, 0.7, 1.0]),
    slots=st.integers(1, 6),
    chunk=st.sampled_from([3, 8, 64]),
    num_blocks=st.integers(50, 120),
    max_cached=st.integers(1, 120),
    joins=st.randoms(use_true_random=False),
)
def test_cold_and_warm_give_the_same_tokens(
    talks: list[dict[str, Any]],
    policy: str,
    agreement: float,
    slots: int,
    chunk: int,
    num_blocks: int,
    max_cached: int,
    joins: random.Random,
) -> None:
    """Shared system prompts, several turns, eviction, preemption, cancellation, mixed requests.

    The fakes read every token back from the pool, the drafter's too, so a wrong or stale block
    fails at once; the tokens are compared with those of plain decoding.
    """
    loop, _ = make_loop(
        num_blocks=num_blocks,
        agreement=agreement,
        max_cached=max_cached,
        policy=policy,
        max_batch_requests=slots,
        prefill_chunk_tokens=chunk,
    )
    running: list[tuple[dict[str, Any], tuple[int, ...], Any, Collector]] = []
    waiting = [(talk, SYSTEM_PROMPTS[talk["system"]], 0) for talk in talks]
    while waiting or running:
        while waiting and (not running or joins.random() < 0.5):
            talk, history, turn = waiting.pop()
            prompt = (*history, *talk["turns"][turn])
            collector = Collector()
            sequence = loop.add(request_of(talk, prompt), collector)
            running.append(({**talk, "turn": turn}, prompt, sequence, collector))
        loop.step()
        if running[0][0]["cancelled"] and joins.random() < 0.1 and not running[0][3].done:
            loop.abort(running[0][2], "cancelled")
        for item in [r for r in running if r[3].done]:
            running.remove(item)
            talk, prompt, _, collector = item
            if collector.final.finish_reason == "cancelled":
                continue
            assert collector.token_ids == expected_tokens(talk, prompt)
            if talk["turn"] + 1 < len(talk["turns"]):
                history = (*prompt, *collector.token_ids)
                waiting.append((talk, history, talk["turn"] + 1))
    pool = loop.admission.pool
    assert pool.num_free == num_blocks
    assert pool.num_idle == pool.num_kept <= max_cached


def request_of(talk: dict[str, Any], prompt: tuple[int, ...]) -> Any:
    sampling = {} if talk["seed"] is None else {"temperature": 0.9, "seed": talk["seed"]}
    names = ("max_tokens", "disable_spec_decode", "disable_prefix_cache", "cache_salt")
    return make_request(prompt, ignore_eos=True, **{n: talk[n] for n in names}, **sampling)


def expected_tokens(talk: dict[str, Any], prompt: tuple[int, ...]) -> list[int]:
    if talk["seed"] is None:
        return greedy_reference(prompt, talk["max_tokens"], False)
    loop, _ = make_loop(policy="off")  # coupled: a function of prompt and seed alone
    (result,) = run_all(loop, [request_of(talk, prompt)])
    return result.token_ids


def computed(loop: Loop) -> int:
    """Tokens that the verifier was given so far."""
    counts = loop.metrics.counts
    return counts["verifier_tokens"] + counts["prefill_verifier_tokens"]


@pytest.mark.parametrize(
    ("length", "cached"),
    [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (40, 36), (41, 40)],
)
def test_the_last_prompt_token_is_always_computed(length: int, cached: int) -> None:
    """Also at a full hit: its logits are where the answer begins."""
    loop, _ = make_loop(agreement=1.0, max_cached=100)
    prompt = (*SYSTEM_PROMPTS[2], 7)
    request = make_request(prompt[:length], max_tokens=12, ignore_eos=True)
    run_all(loop, [make_request(prompt, max_tokens=12, ignore_eos=True)])
    before = computed(loop)
    (warm,) = run_all(loop, [request])
    assert warm.final.stats["num_cached_tokens"] == cached
    assert warm.token_ids == greedy_reference(prompt[:length], 12, False)
    (cold,) = run_all(make_loop(agreement=1.0)[0], [request])
    assert warm.final.stats["num_rounds"] == cold.final.stats["num_rounds"]
    assert computed(loop) - before < length - cached + 12 * (BLOCK_SIZE + 1)


def test_the_drafter_gets_its_context_back() -> None:
    """Without it the accepted length falls to 1; a drafter that always agrees stays perfect."""
    prompt, rounds = SYSTEM_PROMPTS[2], 4
    request = make_request(prompt, max_tokens=1 + rounds * (BLOCK_SIZE + 1), ignore_eos=True)
    loop, verifier = make_loop(agreement=1.0, max_cached=100)
    for cached in (0, 36):
        before = len(verifier.runs)
        (result,) = run_all(loop, [request])
        assert result.final.stats["num_cached_tokens"] == cached
        assert result.final.stats["num_accepted_draft_tokens"] == rounds * BLOCK_SIZE
        assert len(verifier.runs) == before + 1 + rounds


def test_the_next_turn_finds_the_answer_before_it() -> None:
    loop, _ = make_loop(max_cached=100, agreement=1.0)
    prompt = SYSTEM_PROMPTS[1]
    (first,) = run_all(loop, [make_request(prompt, max_tokens=30, ignore_eos=True)])
    history = (*prompt, *first.token_ids)
    (second,) = run_all(loop, [make_request((*history, 5, 6), max_tokens=8, ignore_eos=True)])
    computed_before = len(history) - 1  # the last token of an answer is no context yet
    assert second.final.stats["num_cached_tokens"] == computed_before // BLOCK_TOKENS * BLOCK_TOKENS


def test_requests_that_arrive_together_compute_their_prefix_once() -> None:
    loop, _ = make_loop(max_cached=200, prefill_chunk_tokens=8)
    prompts = [(*SYSTEM_PROMPTS[2], i, i, i) for i in range(1, 6)]
    results = run_all(loop, [make_request(p, max_tokens=4, ignore_eos=True) for p in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy_reference(prompt, 4, False)
    assert loop.metrics.counts["prefill_verifier_tokens"] < 40 + 5 * (3 + BLOCK_TOKENS)


def test_requests_with_another_salt_or_without_the_cache_share_nothing() -> None:
    loop, _ = make_loop(max_cached=200)
    prompt = SYSTEM_PROMPTS[2]

    def cached(**fields: Any) -> float:
        (result,) = run_all(loop, [make_request(prompt, max_tokens=4, ignore_eos=True, **fields)])
        return result.final.stats["num_cached_tokens"]

    assert cached(disable_prefix_cache=True) == 0
    assert cached(cache_salt="tenant 1") == 0  # the one before has left nothing either
    assert cached(cache_salt="tenant 2") == 0
    assert cached() == 0
    assert cached(cache_salt="tenant 1") == cached() == 36
    assert cached(disable_prefix_cache=True) == 0


def test_blocks_without_the_drafters_half_serve_plain_requests_alone() -> None:
    loop, _ = make_loop(max_cached=200)
    prompt = SYSTEM_PROMPTS[2]

    def cached(plain: bool) -> float:
        request = make_request(prompt, max_tokens=6, ignore_eos=True, disable_spec_decode=plain)
        (result,) = run_all(loop, [request])
        assert result.token_ids == greedy_reference(prompt, 6, False)
        return result.final.stats["num_cached_tokens"]

    assert [cached(True), cached(False), cached(False), cached(True)] == [0, 0, 36, 36]


def test_a_preempted_request_finds_its_own_blocks() -> None:
    loop, _ = make_loop(num_blocks=12, max_cached=12, policy="fixed", max_batch_requests=2)
    requests = [make_request((i, i, i), max_tokens=30, ignore_eos=True) for i in (1, 2)]
    results = run_all(loop, requests)
    assert loop.metrics.counts["preemptions"] > 0
    assert loop.metrics.counts["prefix_cache_hit_tokens"] > 0
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == greedy_reference(request.prompt_ids, 30, False)


def test_counters_tell_what_was_asked_found_kept_and_evicted() -> None:
    loop, _ = make_loop(num_blocks=60, max_cached=12)
    prompt = SYSTEM_PROMPTS[2]
    for _ in range(3):
        run_all(loop, [make_request(prompt, max_tokens=2, ignore_eos=True)])
    assert loop.metrics.counts["prefix_cache_queried_tokens"] == 120
    assert loop.metrics.counts["prefix_cache_hit_tokens"] == 72
    run_all(loop, [make_request(tuple(reversed(prompt)), max_tokens=2, ignore_eos=True)])
    metrics = loop.cache.metrics()
    assert metrics["prefix_cache_blocks"] == 12
    assert metrics["prefix_cache_bytes"] == 12 * 2 * BLOCK_TOKENS * 16
    assert metrics["prefix_cache_evicted_blocks_total"] == 10 + 10 - 12
