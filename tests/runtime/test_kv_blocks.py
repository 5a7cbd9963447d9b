"""Blocks are free, held or idle, never two of these, and never lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.kv_blocks import BlockPool, blocks_for

NUM_BLOCKS = 7
MAX_IDLE = 4


class BlockPoolMachine(RuleBasedStateMachine):
    """Random holders against a plain count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, MAX_IDLE)
        self.pool.on_evict = self.on_evict
        self.holders: list[list[int]] = []
        self.kept: list[int] = []  # least recently released first; held ones anywhere

    def on_evict(self, block: int) -> None:
        idle = [b for b in self.kept if b not in self.held]
        assert block == idle[0], "not the least recently used block was evicted"
        self.kept.remove(block)

    @property
    def held(self) -> Counter[int]:
        return Counter(block for blocks in self.holders for block in blocks)

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> None:
        free, held = self.pool.num_free, self.held
        blocks = self.pool.allocate(count)
        if count > free:
            assert blocks is None
            assert self.pool.num_free == free
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert not set(blocks) & set(held), "a held block was given out again"
        assert not set(blocks) & set(self.kept), "a kept block was given out without an eviction"
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        for block in blocks:
            self.pool.share(block)
        self.holders.append(list(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        for block in data.draw(st.sampled_from(self.holders)):
            self.pool.keep(block)
            if block not in self.kept:
                self.kept.append(block)

    @precondition(lambda self: set(self.kept) - set(self.held))
    @rule(data=st.data())
    def share_idle(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b in self.kept if b not in self.held]))
        self.pool.share(block)
        self.holders.append([block])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        for block in reversed(blocks):
            if block in self.kept and block not in self.held:  # it becomes the youngest idle one
                self.kept.remove(block)
                self.kept.append(block)
        self.pool.release(blocks)

    @invariant()
    def counts_agree(self) -> None:
        held = self.held
        assert [self.pool.ref_count(b) for b in range(NUM_BLOCKS)] == [
            held[b] for b in range(NUM_BLOCKS)
        ]
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert self.pool.num_blocks == NUM_BLOCKS
        assert self.pool.num_shared == sum(count > 1 for count in held.values())
        assert self.pool.num_kept == len(self.kept)
        assert self.pool.num_idle == len(set(self.kept) - set(held)) <= MAX_IDLE


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_freed_blocks_are_reused_first() -> None:
    """A lightly loaded server must not walk through its whole pool and make it all resident."""
    pool = BlockPool(100)
    touched = set()
    for _ in range(50):
        blocks = pool.allocate(3)
        assert blocks is not None
        touched |= set(blocks)
        pool.release(blocks)
    assert touched == {0, 1, 2}


def test_kept_blocks_are_evicted_last_and_the_tail_before_the_head() -> None:
    pool = BlockPool(6, max_idle=4)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    blocks = pool.allocate(4)
    assert blocks is not None
    for block in blocks:
        pool.keep(block)
    pool.release(blocks)
    assert (pool.num_free, pool.num_idle) == (6, 4)
    assert pool.allocate(2) == [4, 5]
    assert not evicted
    assert pool.allocate(3) == evicted == blocks[:0:-1]
    assert pool.num_evicted == 3


def test_misuse_is_a_bug_that_stops() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        pool.share(1)
    with pytest.raises(AssertionError, match="is not held and cannot be kept"):
        pool.keep(1)
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        BlockPool(0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks
