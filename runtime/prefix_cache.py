"""The prefix cache: blocks of K/V found again by the tokens they were computed from.

A full block is named by a SHA-256 chain over everything its K/V depend on: the model's
fingerprint and the request's salt, then the token ids of every block up to this one. Equal names
therefore mean equal contents, whoever computed them, and requests with different salts can
neither share nor tell by timing what the other sent. Plain bookkeeping over `BlockPool`; engines
are only asked to copy whole blocks to and from the disk tier.

A sequence's tokens, by who may write their K/V:

    [0, num_published * b)      in the cache, or equal to what is: never written again
    [.., num_computed)          written by this sequence alone
    [num_computed, ..)          not written yet

A block enters the cache once all its K/V are written, and the drafter's are written later than the
verifier's. A request without speculation never writes the drafter's; its blocks go by another
name (`BlockKey.drafted`), serve requests of its kind and are never taken for whole ones: a drafter
without its context would accept next to nothing.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Protocol

import numpy as np

from runtime.disk_tier import BlockKey, DiskTier
from runtime.engine import Engines
from runtime.kv_blocks import BlockPool
from runtime.sequence import Sequence


class Found(NamedTuple):
    """What a second look found for a sequence, in tokens; `loaded` of them came from disk."""

    tokens: int
    loaded: int


class PrefixCache(Protocol):
    """What the loop needs of a prefix cache. Every method is called from the loop's thread."""

    pool: BlockPool

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens, each held once more for the caller.

        They end before its last token, whose logits must be computed in any case.
        """

    def extend(self, sequence: Sequence, max_loaded: int) -> Found:
        """Look again for the blocks after `num_computed`, before they are computed.

        Meanwhile another sequence may have computed them, and the disk tier may hold them: blocks
        are read from there until `max_loaded` tokens are. The sequence's own blocks, which it alone
        holds, are replaced or filled, and it counts the tokens as computed.
        """

    def publish(self, sequence: Sequence) -> None:
        """Enter the sequence's full blocks; called after their K/V are written."""

    def lags(self, sequence: Sequence) -> bool:
        """Whether full blocks of the sequence wait for the drafter's K/V to be entered."""

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name; may be called from any thread."""

    def close(self) -> None:
        """Finish what is being written to disk; may be called again."""


class NoPrefixCache:
    """The cache switched off: nothing is found and nothing is kept."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def match(self, sequence: Sequence) -> list[int]:
        """Nothing."""
        return []

    def extend(self, sequence: Sequence, max_loaded: int) -> Found:
        """Nothing."""
        return Found(0, 0)

    def publish(self, sequence: Sequence) -> None:
        """Keep nothing."""

    def lags(self, sequence: Sequence) -> bool:
        """Never."""
        return False

    def metrics(self) -> dict[str, float]:
        """No numbers."""
        return {}

    def close(self) -> None:
        """Nothing to do."""


class BlockPrefixCache:
    """See `PrefixCache`; keeps what `pool` lets it keep."""

    def __init__(
        self,
        pool: BlockPool,
        engines: Engines,
        fingerprint: str,
        block_tokens: int,
        block_bytes: int,
        disk: DiskTier | None = None,
    ) -> None:
        """Start empty.

        Args:
            pool: its `max_idle` is the budget.
            engines: of the pool's K/V; asked only when there is a `disk`.
            fingerprint: of the model (`Manifest.fingerprint`).
            block_tokens: b.
            block_bytes: of a block in both pools, for the metrics.
            disk: the tier behind memory.
        """
        self.pool = pool
        pool.on_evict = self._forget
        self._engines = engines
        self._fingerprint = fingerprint
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._disk = disk
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}  # the other way round

    def match(self, sequence: Sequence) -> list[int]:
        """See `PrefixCache.match`."""
        blocks = []
        for digest in self._wanted(sequence):
            block = self._find(digest, sequence.drafted)
            if block is None:
                break
            blocks.append(block)
        for block in blocks:
            self.pool.share(block)
        return blocks

    def extend(self, sequence: Sequence, max_loaded: int) -> Found:
        """See `PrefixCache.extend`."""
        b, drafted = self._block_tokens, sequence.drafted
        # Blocks that wait for the drafter are as good as uncomputed if all of them are found.
        start = (sequence.num_drafter_computed if drafted else sequence.num_computed) // b
        blocks, loaded = [], 0
        for index, digest in enumerate(self._wanted(sequence)[start:], start):
            block = self._find(digest, drafted)
            own = sequence.blocks[index]
            ahead = index >= sequence.num_computed // b and loaded < max_loaded
            if block is None and ahead and self._load(digest, drafted, own):
                block, loaded = own, loaded + b
            if block is None:
                break
            blocks.append(block)
        end = start + len(blocks)
        gained = end * b - sequence.num_computed
        if gained <= 0:
            return Found(0, 0)
        for index, block in enumerate(blocks, start):
            own = sequence.blocks[index]
            if block != own:
                self.pool.share(block)
                self.pool.release([own])
                sequence.blocks[index] = block
        sequence.take_cached(end, b)
        return Found(gained, loaded)

    def publish(self, sequence: Sequence) -> None:
        """See `PrefixCache.publish`."""
        if sequence.request.disable_prefix_cache:
            return
        written = sequence.num_drafter_computed if sequence.drafted else sequence.num_computed
        count = self._full_blocks(sequence, written)
        if count <= sequence.num_published:
            return
        digests = self._digests(sequence, count)
        for index in range(sequence.num_published, count):
            # Another sequence may have entered the same tokens meanwhile: its block stays, and
            # this one remains the sequence's own.
            if self._find(digests[index], sequence.drafted) is None:
                key = BlockKey(digests[index], sequence.drafted)
                self._enter(key, sequence.blocks[index])
                self._store(key, sequence.blocks[index])
        sequence.num_published = count

    def lags(self, sequence: Sequence) -> bool:
        """See `PrefixCache.lags`."""
        if sequence.request.disable_prefix_cache or not sequence.drafted:
            return False
        return self._full_blocks(sequence, sequence.num_computed) > sequence.num_published

    def metrics(self) -> dict[str, float]:
        """See `PrefixCache.metrics`."""
        values = {
            "prefix_cache_blocks": self.pool.num_kept,
            "prefix_cache_bytes": self.pool.num_kept * self._block_bytes,
            "prefix_cache_evicted_blocks_total": self.pool.num_evicted,
        }
        return values | (self._disk.metrics() if self._disk else {})

    def close(self) -> None:
        """See `PrefixCache.close`."""
        if self._disk is not None:
            self._disk.close()

    def _full_blocks(self, sequence: Sequence, num_written: int) -> int:
        # An answer that ended inside an accepted block leaves K/V of tokens it does not have.
        return min(num_written, len(sequence.token_ids)) // self._block_tokens

    def _wanted(self, sequence: Sequence) -> list[bytes]:
        """Names of the sequence's full blocks without the one that holds its last token."""
        if sequence.request.disable_prefix_cache:
            return []
        count = (len(sequence.token_ids) - 1) // self._block_tokens
        return self._digests(sequence, count)[:count]

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """Names of the first `count` full blocks, and of those after them that are known already.

        Each block is hashed once in a sequence's life, preemptions included.
        """
        digests, b = sequence.block_digests, self._block_tokens
        new = sequence.token_ids[len(digests) * b : count * b]
        if new:
            data, size = np.asarray(new, "<i4").tobytes(), 4 * b
            parent = digests[-1] if digests else self._root(sequence.request.cache_salt)
            for at in range(0, len(data), size):
                parent = hashlib.sha256(parent + data[at : at + size]).digest()
                digests.append(parent)
        return digests

    def _root(self, salt: str) -> bytes:
        return hashlib.sha256(f"{self._fingerprint}\n{salt}".encode()).digest()

    def _find(self, digest: bytes, drafted: bool) -> int | None:
        block = self._blocks.get(BlockKey(digest, True))
        if block is None and not drafted:
            block = self._blocks.get(BlockKey(digest, False))
        return block

    def _enter(self, key: BlockKey, block: int) -> None:
        self._blocks[key] = block
        self._keys[block] = key
        self.pool.keep(block)

    def _forget(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]

    def _store(self, key: BlockKey, block: int) -> None:
        if self._disk is not None and self._disk.wants(key):
            parts = [self._engines.verifier.read_block(block)]
            if key.drafted:
                assert self._engines.drafter is not None
                parts.append(self._engines.drafter.read_block(block))
            self._disk.put(key, np.concatenate(parts))

    def _load(self, digest: bytes, drafted: bool, block: int) -> bool:
        """Fill a block from disk and enter it; False when it is not there in good order."""
        if self._disk is None:
            return False
        key = BlockKey(digest, True)
        if not drafted and key not in self._disk:
            key = BlockKey(digest, False)
        data = self._disk.get(key)
        if data is None:
            return False
        own = self._disk.payload_bytes(BlockKey(digest, False))
        self._engines.verifier.write_block(block, data[:own])
        if key.drafted:
            assert self._engines.drafter is not None
            self._engines.drafter.write_block(block, data[own:])
        self._enter(key, block)
        return True
