"""Admission: which requests run, and which blocks they hold. Plain bookkeeping, no device code.

First come, first served. A request enters when a slot is free and the blocks of all its tokens
are; it grows a block at a time, and when none is left the youngest running request gives its
blocks back and is recomputed later. The oldest one therefore always proceeds: nothing deadlocks.
What the prefix cache holds of a request is neither allocated nor computed again.
"""

from __future__ import annotations

import time
from collections import deque

from runtime.kv_blocks import blocks_for
from runtime.prefix_cache import PrefixCache
from runtime.sequence import Sequence


class Admission:
    """Waiting and running sequences over one block pool and the cache that keeps its blocks."""

    def __init__(self, cache: PrefixCache, block_tokens: int, max_running: int) -> None:
        self.pool = cache.pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self._cache = cache
        self._block_tokens = block_tokens
        self._max_running = max_running

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to the running ones while slots and blocks allow; returns them."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            cached = self._cache.match(sequence)
            needed = blocks_for(len(sequence.token_ids), self._block_tokens) - len(cached)
            # A block to grow for each running sequence, or the newcomer is preempted at once.
            if needed + len(self.running) > self.pool.num_free:
                self.pool.release(cached)
                break
            blocks = self.pool.allocate(needed)
            assert blocks is not None
            self.waiting.popleft()
            sequence.blocks = cached + blocks
            if sequence.admitted_s is None:
                sequence.admitted_s = time.monotonic()
            sequence.take_cached(len(cached), self._block_tokens)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the sequence's next `num_tokens` tokens; False when there is none."""
        wanted = blocks_for(sequence.num_computed + num_tokens, self._block_tokens)
        blocks = self.pool.allocate(max(0, wanted - len(sequence.blocks)))
        if blocks is None:
            return False
        sequence.blocks += blocks
        return True

    def preempt_youngest(self) -> Sequence:
        """Take the blocks of the youngest running sequence and queue it first in line."""
        sequence = self.running[-1]
        self._leave(sequence)
        sequence.num_computed = sequence.num_drafter_computed = sequence.num_published = 0
        sequence.pending_features.clear()
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished or aborted sequence, waiting or running, and free its blocks."""
        if sequence in self.running:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
