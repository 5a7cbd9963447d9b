"""Training batches: which sequences, which anchors, and the packing of both.

The order of the sequences is drawn once an epoch and kept in ``SamplerState``; the anchors of a
step are a function of (seed, step). So a run continues exactly from the state alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.drafter import PackedContext
from training.features import CachedSequence, FeatureCache

ANCHOR_STREAM, ORDER_STREAM = 1, 2  # keep the two kinds of draws independent


class Batch(NamedTuple):
    """Packed anchors with what their blocks should predict.

    ``previous_ids`` [A, g] int64: target id before each predicted one; ``label_ids`` [A, g] int64:
    the token that follows in the text; ``top_ids`` [A, g, K] int64 and ``top_probs`` [A, g, K]
    float: the target's distribution there; ``keep`` [A, g] bool: positions that exist and can be
    reached.
    """

    packed: PackedContext
    previous_ids: Tensor
    label_ids: Tensor
    top_ids: Tensor
    top_probs: Tensor
    keep: Tensor


@dataclass
class SamplerState:
    """Where the run is in its data; plain data, saved in every checkpoint."""

    epoch: int = -1
    cursor: int = 0
    order: list[int] = field(default_factory=list)


def split_sequences(num_sequences: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Training and validation indices, in a fixed random order; validation gets ``fraction``."""
    order = np.random.default_rng((seed, 0)).permutation(num_sequences).tolist()
    held_out = round(num_sequences * fraction)
    return order[held_out:], order[:held_out]


def next_sequences(state: SamplerState, count: int, pool: Sequence[int], seed: int) -> list[int]:
    """Take the next ``count`` indices, going through ``pool`` once an epoch in random order.

    ``pool`` is looked at when an epoch begins only, so it may grow while a cache is being filled.
    """
    taken: list[int] = []
    while len(taken) < count:
        if state.cursor >= len(state.order):
            if not pool:
                raise ValueError("there are no training sequences")
            state.epoch += 1
            state.cursor = 0
            shuffle = np.random.default_rng((seed, ORDER_STREAM, state.epoch))
            state.order = shuffle.permutation(np.asarray(sorted(pool))).tolist()
        piece = state.order[state.cursor : state.cursor + count - len(taken)]
        taken += piece
        state.cursor += len(piece)
    return taken


def anchor_candidates(sequence: CachedSequence) -> npt.NDArray[np.int64]:
    """Positions that can be anchors: answer tokens that are followed by one."""
    return np.arange(sequence.answer_start, len(sequence.token_ids) - 1)


def draw_anchors(
    sequence: CachedSequence, fraction: float, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw ``fraction`` of a sequence's anchors (at least one), ascending; none if it has none."""
    candidates = anchor_candidates(sequence)
    if not len(candidates):
        return candidates
    count = max(1, round(fraction * len(candidates)))
    return np.sort(generator.choice(candidates, size=count, replace=False))


def make_batch(
    pieces: Sequence[tuple[CachedSequence, npt.NDArray[np.int64]]],
    block_size: int,
    to_draft: Tensor,
    device: str = "cpu",
) -> Batch:
    """Pack (sequence, anchor positions) pairs; ``to_draft`` [V] maps target ids to draft ids or -1.

    Positions past the end of the text are not kept. Nor are those after a token that the draft
    vocabulary lacks: such a token is always rejected, so what follows in its block is never used.
    """
    pieces = [piece for piece in pieces if len(piece[1])]
    if not pieces:
        raise ValueError("no sequence of the batch has an anchor")
    features, lens, positions, counts = [], [], [], []
    rows_ids, previous, labels, tops, probs, keeps = [], [], [], [], [], []
    steps = np.arange(block_size)
    for sequence, anchors in pieces:
        length = int(anchors[-1])  # tokens after the last anchor are context of nobody
        last = len(sequence.token_ids) - 1
        at = anchors[:, None] + steps  # the target's row for predicted position k + 1
        exists = at < last
        at = np.minimum(at, last - 1)
        features.append(torch.from_numpy(sequence.features[:length]))
        lens.append(length)
        positions.append(torch.from_numpy(anchors))
        counts.append(len(anchors))
        rows_ids.append(torch.from_numpy(sequence.token_ids[anchors]))
        previous.append(torch.from_numpy(sequence.token_ids[at]))
        labels.append(torch.from_numpy(sequence.token_ids[at + 1]))
        tops.append(torch.from_numpy(sequence.top_ids[at]))
        probs.append(torch.from_numpy(sequence.top_logprobs[at]))
        keeps.append(torch.from_numpy(exists))
    label_ids = torch.cat(labels).to(device)
    drafted = (to_draft[label_ids] >= 0).long()
    reachable = torch.ones_like(drafted)
    reachable[:, 1:] = drafted.cumprod(dim=1)[:, :-1]
    packed = PackedContext(
        features=torch.cat(features).to(device).float(),
        context_lens=tuple(lens),
        anchor_positions=torch.cat(positions).to(device),
        anchor_counts=tuple(counts),
        anchor_ids=torch.cat(rows_ids).to(device),
    )
    return Batch(
        packed=packed,
        previous_ids=torch.cat(previous).to(device),
        label_ids=label_ids,
        top_ids=torch.cat(tops).to(device),
        top_probs=torch.cat(probs).to(device).float().exp(),
        keep=torch.cat(keeps).to(device) & (reachable == 1),
    )


class BatchSource:
    """Draws the batches of a run from a cache."""

    def __init__(
        self,
        cache: FeatureCache,
        pool: Sequence[int],
        sequences_per_step: int,
        anchor_fraction: float,
        block_size: int,
        seed: int,
        to_draft: Tensor,
        device: str = "cpu",
    ) -> None:
        self.cache = cache
        self.pool = tuple(pool)
        self.sequences_per_step = sequences_per_step
        self.anchor_fraction = anchor_fraction
        self.block_size = block_size
        self.seed = seed
        self.to_draft = to_draft
        self.device = device

    def batch(self, state: SamplerState, step: int) -> Batch:
        """The batch of ``step``; moves ``state`` on."""
        generator = np.random.default_rng((self.seed, ANCHOR_STREAM, step))
        while True:
            ready = self.cache.ready()
            pool = [index for index in self.pool if ready[index]]
            chosen = next_sequences(state, self.sequences_per_step, pool, self.seed)
            sequences = [self.cache.read(index) for index in chosen]
            pieces = [(s, draw_anchors(s, self.anchor_fraction, generator)) for s in sequences]
            if any(len(anchors) for _, anchors in pieces):
                return make_batch(pieces, self.block_size, self.to_draft, self.device)
