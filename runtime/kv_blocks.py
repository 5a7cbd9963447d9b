"""KV blocks: who owns which block of the pool. Plain bookkeeping, no memory.

A block holds `block_tokens` tokens of the verifier's and of the drafter's K/V. It is free
(reference count 0) or held; a block held more than once is shared and never written.
"""

from __future__ import annotations


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1.

    Free blocks are reused last-freed-first, so that the resident part of the pool stays as small
    as the load.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def ref_count(self, block: int) -> int:
        """How many hold this block."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks, or None (and nothing taken) when there are not that many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Hold a block that somebody holds already."""
        assert self._refs[block] > 0, f"block {block} is free and cannot be shared"
        self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Give up one hold on each block; a block nobody holds becomes free."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)
