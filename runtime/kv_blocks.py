"""KV blocks: who owns which block of the pool. Plain bookkeeping, no memory.

A block holds `block_tokens` tokens of the verifier's and of the drafter's K/V. It is in one of
three states:

    free   nobody holds it and nothing in it matters
    held   reference count above 0; above 1 it is shared, and a shared block is never written
    idle   nobody holds it, but it is kept for its contents; the least recently used one is evicted
           when an allocation finds no free block, or when more than `max_idle` are idle

Idle blocks therefore cost admission nothing: they count as free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1.

    Free blocks are reused last-freed-first, so that the resident part of the pool stays as small
    as the load and what is kept.
    """

    def __init__(self, num_blocks: int, max_idle: int = 0) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.max_idle = max_idle
        self.on_evict: Callable[[int], None] = lambda block: None  # told before the block is reused
        self.num_evicted = 0  # since start
        self.num_shared = 0  # blocks held more than once
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: set[int] = set()  # held or idle
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and whose contents are kept."""
        return len(self._idle)

    @property
    def num_kept(self) -> int:
        """Blocks whose contents are kept, held ones included."""
        return len(self._kept)

    def ref_count(self, block: int) -> int:
        """How many hold this block."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks that nobody holds, free ones before idle ones.

        Returns None (and takes nothing) when there are not that many.
        """
        if count > self.num_free:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Hold a block that somebody holds already or that is idle."""
        assert self._refs[block] > 0 or block in self._idle, (
            f"block {block} is free and cannot be shared"
        )
        self._idle.pop(block, None)
        self._refs[block] += 1
        self.num_shared += self._refs[block] == 2

    def keep(self, block: int) -> None:
        """Keep a held block's contents beyond its last release, until it is evicted."""
        assert self._refs[block] > 0, f"block {block} is not held and cannot be kept"
        self._kept.add(block)

    def release(self, blocks: list[int]) -> None:
        """Give up one hold on each block; a block nobody holds becomes free, or idle when kept.

        Later blocks of the list become idle first and are evicted first: they are of no use
        without the earlier ones.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is released twice"
            self._refs[block] -= 1
            self.num_shared -= self._refs[block] == 1
            if self._refs[block] == 0:
                if block in self._kept:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        while len(self._idle) > self.max_idle:
            self._free.append(self._evict())

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._kept.remove(block)
        self.num_evicted += 1
        self.on_evict(block)
        return block


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)
