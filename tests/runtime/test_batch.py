"""Packed arrays against loops that a reader can check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.batch import (
    DraftSegment,
    VerifySegment,
    grid,
    pack_draft,
    pack_verify,
    slots,
    table,
)
from runtime.kv_blocks import blocks_for
from runtime.randomness import DraftNoise
from runtime.spec import DrafterDims, KvDims, VerifierDims, drafter_inputs, verifier_inputs

BLOCK_TOKENS = 4
lengths = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(lens=lengths)
def test_grid_maps_rows_to_cells_and_back(lens: list[int]) -> None:
    layout = grid(lens)
    width = max(1, *lens)
    assert layout.pad_index.shape == (len(lens), width)
    row = 0
    for r, length in enumerate(lens):
        for c in range(width):
            if c < length:
                assert layout.pad_index[r, c] == row
                assert layout.unpad_index[row] == r * width + c
                assert (layout.request[row], layout.column[row]) == (r, c)
                row += 1
            else:
                assert layout.pad_index[r, c] == 0
    assert row == len(layout.unpad_index) == len(layout.request) == len(layout.column)


@settings(max_examples=50, deadline=None)
@given(start=st.integers(0, 30), count=st.integers(0, 12), seed=st.integers(0, 99))
def test_slots_follow_the_block_list(start: int, count: int, seed: int) -> None:
    blocks = np.random.default_rng(seed).permutation(20)[:11].tolist()
    expected = [
        blocks[t // BLOCK_TOKENS] * BLOCK_TOKENS + t % BLOCK_TOKENS
        for t in range(start, start + count)
    ]
    assert slots(blocks, start, count, BLOCK_TOKENS).tolist() == expected


def test_slots_beyond_the_blocks_are_an_error() -> None:
    """Wrapping round to another request's block would corrupt it silently."""
    with pytest.raises(IndexError):
        slots([3], 3, 2, BLOCK_TOKENS)


@settings(max_examples=50, deadline=None)
@given(contexts=lengths)
def test_tables_cover_the_context_and_no_more(contexts: list[int]) -> None:
    """A block allocated for tokens to come holds nothing yet and must not be looked at."""
    blocks = [[10 * r + 1, 10 * r + 2, 10 * r + 3, 10 * r + 4] for r in range(len(contexts))]
    rows = table(blocks, contexts, BLOCK_TOKENS)
    counts = [blocks_for(n, BLOCK_TOKENS) for n in contexts]
    assert rows.shape == (len(contexts), max(1, *counts))
    for r, count in enumerate(counts):
        assert rows[r, :count].tolist() == blocks[r][:count]
        assert not rows[r, count:].any()  # never -1, which would wrap round to the last block


verify_segments = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6
)


@settings(max_examples=50, deadline=None)
@given(shapes=verify_segments)
def test_verify_batches(shapes: list[tuple[int, int, int]]) -> None:
    segments = [
        VerifySegment(
            token_ids=[100 * r + c for c in range(length)],
            context_len=context,
            blocks=[10 * r + i for i in range(8)],
            num_logits=min(wanted, length),
        )
        for r, (context, length, wanted) in enumerate(shapes)
    ]
    batch = pack_verify(segments, BLOCK_TOKENS)
    inputs = batch.inputs
    kv = KvDims(1, 1, 2, BLOCK_TOKENS, "fp32")
    specs = verifier_inputs(VerifierDims(kv, 4, 8, 64, (0,)))[:-2]
    assert list(inputs) == [s.name for s in specs]
    assert all(inputs[s.name].dtype == np.int64 for s in specs)
    assert all(inputs[s.name].ndim == len(s.dims) for s in specs)

    token = wanted_row = 0
    for r, segment in enumerate(segments):
        assert batch.token_starts[r] == token
        assert batch.logits_starts[r] == wanted_row
        assert inputs["segment_lens"][r] == len(segment.token_ids)
        assert inputs["context_lens"][r] == segment.context_len
        for c, token_id in enumerate(segment.token_ids):
            assert inputs["token_ids"][token] == token_id
            assert inputs["position_ids"][token] == segment.context_len + c
            if c >= len(segment.token_ids) - segment.num_logits:
                assert inputs["logits_index"][wanted_row] == token
                wanted_row += 1
            token += 1
    assert len(inputs["token_ids"]) == token
    assert len(inputs["logits_index"]) == wanted_row
    contexts, blocks = [s.context_len for s in segments], [s.blocks for s in segments]
    np.testing.assert_array_equal(inputs["block_table"], table(blocks, contexts, BLOCK_TOKENS))
    layout = grid([len(s.token_ids) for s in segments])
    np.testing.assert_array_equal(inputs["pad_index"], layout.pad_index)
    np.testing.assert_array_equal(inputs["unpad_index"], layout.unpad_index)


@settings(max_examples=50, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=6))
def test_draft_batches(shapes: list[tuple[int, int]]) -> None:
    random = np.random.default_rng(len(shapes))
    gumbel = [random.random((3, 8 if r == 1 else 1), np.float32) for r in range(len(shapes))]
    segments = [
        DraftSegment(
            features=random.normal(size=(new, 6)).astype(np.float32),
            context_len=context,
            blocks=[10 * r + i for i in range(8)],
            anchor_id=50 + r,
            temperature=0.5 * r,
            top_k=r,
            top_p=1 / (r + 1),
            min_p=0.1 * r,
            noise=DraftNoise(random.random(3).astype(np.float32), gumbel[r]),
        )
        for r, (context, new) in enumerate(shapes)
    ]
    batch = pack_draft(segments, BLOCK_TOKENS)
    inputs = batch.inputs
    dims = DrafterDims(KvDims(1, 1, 2, BLOCK_TOKENS, "fp32"), 6, 3, 8, False)
    specs = drafter_inputs(dims)[:-2]
    width = max(rows.shape[1] for rows in gumbel)
    assert list(inputs) == [s.name for s in specs]
    numpy_dtypes = {"int64": np.int64, "fp32": np.float32}
    assert all(inputs[s.name].dtype == numpy_dtypes[s.dtype] for s in specs)

    row = 0
    for r, segment in enumerate(segments):
        assert inputs["context_lens"][r] == segment.context_len
        assert inputs["segment_lens"][r] == len(segment.features)
        assert inputs["anchor_ids"][r] == segment.anchor_id
        for name in ("temperature", "top_k", "top_p", "min_p"):
            assert inputs[name][r] == inputs[name].dtype.type(getattr(segment, name))
        np.testing.assert_array_equal(inputs["uniforms"][r], segment.noise.uniforms)
        np.testing.assert_array_equal(inputs["noise"][r], np.broadcast_to(gumbel[r], (3, width)))
        for c in range(len(segment.features)):
            position = segment.context_len + c
            block = segment.blocks[position // BLOCK_TOKENS]
            np.testing.assert_array_equal(inputs["context_features"][row], segment.features[c])
            assert inputs["context_position_ids"][row] == position
            assert batch.slots[row] == block * BLOCK_TOKENS + position % BLOCK_TOKENS
            row += 1
    assert row == len(batch.slots) == len(inputs["context_features"])
    contexts, blocks = [s.context_len for s in segments], [s.blocks for s in segments]
    np.testing.assert_array_equal(inputs["block_table"], table(blocks, contexts, BLOCK_TOKENS))
