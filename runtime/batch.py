"""Packing: segments of several requests into the arrays that the graphs take.

Pure numpy; `runtime.spec` says what each array means.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.kv_blocks import blocks_for
from runtime.randomness import DraftNoise

Int = NDArray[np.int64]


class Grid(NamedTuple):
    """How N packed rows lie in an [R, S] grid: both ways, and each row's request and column."""

    pad_index: Int  # [R, S] packed row of each cell, 0 where the cell is padding
    unpad_index: Int  # [N] flat cell of each packed row
    request: Int  # [N]
    column: Int  # [N]


def grid(lens: Seq[int]) -> Grid:
    """Lay out segments of the given lengths; S is the longest, at least 1."""
    counts = np.asarray(lens, np.int64)
    width = max(1, int(counts.max()))
    starts = np.cumsum(counts) - counts
    request = np.repeat(np.arange(len(lens)), counts)
    column = np.arange(counts.sum()) - starts[request]
    columns = np.arange(width)
    pad_index = np.where(columns < counts[:, None], starts[:, None] + columns, 0)
    return Grid(pad_index, request * width + column, request, column)


def table(blocks: Seq[list[int]], context_lens: Seq[int], block_tokens: int) -> Int:
    """Block tables [R, M] that cover each context; M is at least 1, padding is block 0."""
    counts = [blocks_for(n, block_tokens) for n in context_lens]
    rows = np.zeros((len(counts), max(1, *counts)), np.int64)
    for row, own, count in zip(rows, blocks, counts, strict=True):
        row[:count] = own[:count]
    return rows


def slots(blocks: list[int], start: int, count: int, block_tokens: int) -> Int:
    """Flat pool slots (block * b + offset) of `count` tokens from position `start` on."""
    positions = np.arange(start, start + count)
    return np.asarray(blocks, np.int64)[positions // block_tokens] * block_tokens + (
        positions % block_tokens
    )


@dataclass(frozen=True)
class VerifySegment:
    """Tokens of one request in a verifier pass, and for how many of the last ones logits matter."""

    token_ids: list[int]
    context_len: int
    blocks: list[int]
    num_logits: int


class VerifyBatch(NamedTuple):
    """Graph inputs, and where each request's rows begin among packed tokens and logits."""

    inputs: dict[str, Int]
    token_starts: list[int]
    logits_starts: list[int]


def pack_verify(segments: Seq[VerifySegment], block_tokens: int) -> VerifyBatch:
    """Build the verifier's inputs for one step."""
    lens = [len(s.token_ids) for s in segments]
    contexts = [s.context_len for s in segments]
    layout = grid(lens)
    ends = np.cumsum(lens)
    wanted = [s.num_logits for s in segments]
    logits_index = [np.arange(end - n, end) for end, n in zip(ends, wanted, strict=True)]
    inputs = {
        "token_ids": np.concatenate([np.asarray(s.token_ids, np.int64) for s in segments]),
        "position_ids": np.asarray(contexts, np.int64)[layout.request] + layout.column,
        "pad_index": layout.pad_index,
        "unpad_index": layout.unpad_index,
        "segment_lens": np.asarray(lens, np.int64),
        "context_lens": np.asarray(contexts, np.int64),
        "block_table": table([s.blocks for s in segments], contexts, block_tokens),
        "logits_index": np.concatenate(logits_index),
    }
    return VerifyBatch(inputs, _starts(lens), _starts(wanted))


@dataclass(frozen=True)
class DraftSegment:
    """One request in a drafter pass: its new context tokens, its anchor and how to sample."""

    features: NDArray[np.float32]  # [c, m*d] of the c tokens before the anchor
    context_len: int  # drafter tokens already in the pool
    blocks: list[int]
    anchor_id: int
    noise: DraftNoise
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class DraftBatch(NamedTuple):
    """Graph inputs, and the flat pool slot of each packed context token."""

    inputs: dict[str, NDArray]
    slots: Int


def pack_draft(segments: Seq[DraftSegment], block_tokens: int) -> DraftBatch:
    """Build the drafter's inputs for one step."""
    lens = [len(s.features) for s in segments]
    contexts = [s.context_len for s in segments]
    layout = grid(lens)
    noise = [s.noise.gumbel for s in segments]
    width = max(n.shape[1] for n in noise)
    inputs: dict[str, NDArray] = {
        "context_features": np.concatenate([s.features for s in segments]),
        "context_position_ids": np.asarray(contexts, np.int64)[layout.request] + layout.column,
        "pad_index": layout.pad_index,
        "segment_lens": np.asarray(lens, np.int64),
        "context_lens": np.asarray(contexts, np.int64),
        "block_table": table([s.blocks for s in segments], contexts, block_tokens),
        "anchor_ids": np.asarray([s.anchor_id for s in segments], np.int64),
        "uniforms": np.stack([s.noise.uniforms for s in segments]),
        "noise": np.stack([np.broadcast_to(n, (n.shape[0], width)) for n in noise]),
        "temperature": np.asarray([s.temperature for s in segments], np.float32),
        "top_k": np.asarray([s.top_k for s in segments], np.int64),
        "top_p": np.asarray([s.top_p for s in segments], np.float32),
        "min_p": np.asarray([s.min_p for s in segments], np.float32),
    }
    own_slots = [
        slots(s.blocks, s.context_len, n, block_tokens) for s, n in zip(segments, lens, strict=True)
    ]
    return DraftBatch(inputs, np.concatenate(own_slots))


def _starts(counts: Seq[int]) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]
