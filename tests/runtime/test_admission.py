"""First come, first served, over too few blocks: nobody is lost or starved."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.admission import Admission
from runtime.kv_blocks import BlockPool, blocks_for
from runtime.prefix_cache import NoPrefixCache
from runtime.sequence import Sequence
from tests.runtime.fakes import FakeTokenizer, make_request

NUM_BLOCKS = 9
BLOCK_TOKENS = 4
MAX_RUNNING = 3
MOST_TOKENS = NUM_BLOCKS * BLOCK_TOKENS  # the door refuses requests that could grow beyond


def make_sequence(request_id: int, num_prompt: int, num_output: int = 50) -> Sequence:
    request = make_request((1,) * num_prompt, max_tokens=num_output)
    tokenizer: Any = FakeTokenizer()
    return Sequence(request_id, request, tokenizer, frozenset(), lambda _: None)


def decode_one(admission: Admission, sequence: Sequence, num_tokens: int = 1) -> bool:
    """What the loop does for one sequence in one step; whether the sequence gained its tokens."""
    if not sequence.is_decoding:  # a prefill: its blocks came with the admission
        sequence.num_computed = len(sequence.token_ids)
        sequence.token_ids.append(1)
        return True
    while not admission.reserve(sequence, num_tokens):
        if admission.preempt_youngest() is sequence:
            return False
    sequence.num_computed += num_tokens
    sequence.token_ids += [1] * num_tokens
    return True


class AdmissionMachine(RuleBasedStateMachine):
    """Arrivals, steps and cancellations in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.admission = Admission(NoPrefixCache(self.pool), BLOCK_TOKENS, MAX_RUNNING)
        self.alive: list[Sequence] = []  # in order of arrival
        self.next_id = 0

    @rule(num_prompt=st.integers(1, MOST_TOKENS - 2))
    def arrive(self, num_prompt: int) -> None:
        self.next_id += 1
        sequence = make_sequence(self.next_id, num_prompt)
        self.alive.append(sequence)
        self.admission.waiting.append(sequence)

    @rule()
    def admit(self) -> None:
        before = list(self.admission.running)
        self.admission.admit()
        running = self.admission.running
        assert running[: len(before)] == before
        if self.alive:
            assert running, "requests wait although nothing runs: a deadlock"

    @precondition(lambda self: self.admission.running)
    @rule(num_tokens=st.integers(1, 3))
    def step(self, num_tokens: int) -> None:
        for position, sequence in enumerate(list(self.admission.running)):
            if sequence not in self.admission.running:
                continue  # preempted for an older one
            if len(sequence.token_ids) + num_tokens > MOST_TOKENS:
                self.alive.remove(sequence)
                self.admission.remove(sequence)
                continue
            gained = decode_one(self.admission, sequence, num_tokens)
            oldest = sequence is self.alive[0]
            assert gained or not oldest, "the oldest sequence was preempted"
            assert gained or position > 0

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        self.alive.remove(sequence)
        self.admission.remove(sequence)
        assert sequence.blocks == []

    @invariant()
    def every_request_is_in_one_place_and_in_order(self) -> None:
        queued = [*self.admission.running, *self.admission.waiting]
        assert queued == self.alive  # oldest first, running before waiting
        assert len(self.admission.running) <= MAX_RUNNING
        assert self.admission.has_work == bool(self.alive)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        owned = [block for s in self.alive for block in s.blocks]
        assert len(owned) == len(set(owned))
        assert all(self.pool.ref_count(block) == 1 for block in owned)
        assert self.pool.num_free == NUM_BLOCKS - len(owned)

    @invariant()
    def blocks_are_where_they_are_needed(self) -> None:
        for sequence in self.admission.running:
            assert len(sequence.blocks) >= blocks_for(sequence.num_computed, BLOCK_TOKENS)
        for sequence in self.admission.waiting:
            assert sequence.blocks == []
            assert sequence.num_computed == sequence.num_drafter_computed == 0
            assert sequence.pending_features == []

    def teardown(self) -> None:
        for sequence in self.alive:
            self.admission.remove(sequence)
        assert self.pool.num_free == NUM_BLOCKS
        assert not self.admission.has_work


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_all_requests_finish_over_a_pool_that_holds_one_of_them() -> None:
    """Exhaustion deadlocks others: here everybody ends, and in order of arrival among equals."""
    admission = Admission(NoPrefixCache(BlockPool(5)), BLOCK_TOKENS, 8)
    for i in range(6):
        admission.waiting.append(make_sequence(i, num_prompt=3))
    finished, steps = [], 0
    while admission.has_work:
        admission.admit()
        for sequence in list(admission.running):
            if sequence in admission.running:
                decode_one(admission, sequence)
            if sequence.num_output == 17:  # 20 tokens: the whole pool
                admission.remove(sequence)
                finished.append(sequence.request_id)
        steps += 1
        assert steps < 500
    assert finished == list(range(6))


def test_a_newcomer_leaves_a_block_for_each_running_sequence() -> None:
    """Otherwise it is admitted, preempted and recomputed in every single step."""
    admission = Admission(NoPrefixCache(BlockPool(4)), BLOCK_TOKENS, 8)
    first, second = make_sequence(1, 4), make_sequence(2, 9)  # blocks: 1 and 3
    admission.waiting.extend([first, second])
    admission.admit()
    assert admission.running == [first]


def test_nobody_overtakes_a_large_request_at_the_head() -> None:
    admission = Admission(NoPrefixCache(BlockPool(4)), BLOCK_TOKENS, 8)
    running, large, small = make_sequence(1, 4), make_sequence(2, 16), make_sequence(3, 1)
    admission.waiting.extend([running, large, small])
    admission.admit()
    assert admission.running == [running]
    assert list(admission.waiting) == [large, small]


def test_a_reservation_that_fails_takes_nothing() -> None:
    admission = Admission(NoPrefixCache(BlockPool(2)), BLOCK_TOKENS, 8)
    sequence = make_sequence(1, 4)
    admission.waiting.append(sequence)
    admission.admit()
    sequence.num_computed = 4
    assert not admission.reserve(sequence, 5)
    assert (len(sequence.blocks), admission.pool.num_free) == (1, 1)
    assert admission.reserve(sequence, 4)
    assert admission.reserve(sequence, 1)  # room is there already
    assert (len(sequence.blocks), admission.pool.num_free) == (2, 0)


def test_removing_a_stranger_changes_nothing() -> None:
    """A request cancelled twice, or after its end, must not free a block twice."""
    admission = Admission(NoPrefixCache(BlockPool(2)), BLOCK_TOKENS, 8)
    sequence = make_sequence(1, 4)
    admission.waiting.append(sequence)
    admission.admit()
    admission.remove(sequence)
    admission.remove(sequence)
    assert admission.pool.num_free == 2
