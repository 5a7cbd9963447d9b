"""The training-time drafter against DeepSpec's own numbers, and its packed pass against itself."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.tiny import HIDDEN, LAYER_IDS, VOCAB, tiny_drafter
from training.checkpoint import DrafterCheckpointError, load_drafter, save_drafter
from training.drafter import (
    DrafterConfig,
    DrafterConfigError,
    PackedContext,
    pack_one,
    with_draft_vocab,
)

SHARED_DATA = Path(
    os.environ.get("DSPARK_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")
)


@pytest.fixture
def golden() -> Path:
    folder = SHARED_DATA / "golden"
    if not folder.is_dir():
        pytest.skip(f"no golden checkpoints at {folder}; set DSPARK_SHARED_DATA to their parent")
    return folder


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "dflash"])
def test_golden_drafts(golden: Path, name: str) -> None:
    weights = load_file(golden / "target" / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    drafter = load_drafter(golden / name, embedding, weights.get("lm_head.weight", embedding))
    expected = np.load(golden / f"{name}.npz")
    rounds = 0
    for p in range(3):
        context: list[np.ndarray] = []
        for r in range(8):
            key = f"p{p}_r{r}_"
            context.append(expected[key + "context_features"])
            features = torch.from_numpy(np.concatenate(context))
            n = len(features)
            packed = PackedContext(
                features, (n,), torch.tensor([n]), (1,),
                torch.from_numpy(expected[key + "anchor"]).reshape(1),
            )  # fmt: skip
            ids, logits, confidence = drafter.draft(packed)
            np.testing.assert_array_equal(ids[0], expected[key + "draft_ids"])
            np.testing.assert_allclose(logits[0], expected[key + "draft_logits"], atol=2e-5)
            if name == "dflash":
                assert confidence is None
            else:
                assert confidence is not None
                wanted = expected[key + "confidence_logits"]
                np.testing.assert_allclose(confidence[0], wanted, atol=2e-5)
            # Teacher forcing with the drafted tokens must say the same as drafting them.
            previous = torch.cat([packed.anchor_ids, ids[0, :-1]])[None]
            forced, _ = drafter(packed, previous, torch.ones_like(previous, dtype=torch.bool))
            np.testing.assert_allclose(forced.detach(), expected[key + "draft_logits"], atol=2e-5)
            rounds += 1
    assert rounds == 24


@pytest.mark.parametrize(("head", "rank"), [("vanilla", 4), ("gated", 4), ("rnn", 4), ("none", 0)])
def test_packed_anchors_equal_one_block_at_a_time(head: str, rank: int) -> None:
    """Guards the block mask: a block sees its own context and itself, and nothing else."""
    drafter = tiny_drafter(head if rank else "vanilla", rank)
    g = drafter.config.block_size
    generator = torch.Generator().manual_seed(5)
    lens, anchors = (9, 14), ([3, 4, 9], [1, 6, 7, 14])
    features = [torch.randn(n, 2 * HIDDEN, generator=generator) for n in lens]
    ids = [torch.randint(0, VOCAB, (n + 1,), generator=generator) for n in lens]
    previous = torch.randint(0, VOCAB, (7, g), generator=generator)
    packed = PackedContext(
        features=torch.cat(features),
        context_lens=lens,
        anchor_positions=torch.tensor(anchors[0] + anchors[1]),
        anchor_counts=(3, 4),
        anchor_ids=torch.cat([ids[i][anchors[i]] for i in range(2)]),
    )
    everywhere = torch.ones(7, g, dtype=torch.bool)
    logits, confidence = drafter(packed, previous, everywhere)
    assert confidence is not None
    row = 0
    for i in range(2):
        for anchor in anchors[i]:
            alone, sure = drafter(
                pack_one(features[i], [anchor], ids[i]), previous[row : row + 1], everywhere[:1]
            )
            torch.testing.assert_close(alone, logits.view(7, g, -1)[row], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(sure, confidence.view(7, g)[row], atol=1e-5, rtol=1e-5)
            row += 1


def test_block_does_not_see_its_anchor_or_later_features() -> None:
    drafter = tiny_drafter()
    features, ids = torch.randn(10, 2 * HIDDEN), torch.arange(10)
    before = drafter.backbone(pack_one(features, [4, 9], ids))
    features[4:] += 1.0
    after = drafter.backbone(pack_one(features, [4, 9], ids))
    torch.testing.assert_close(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


def test_feature_scale_changes_no_result() -> None:
    drafter = tiny_drafter()
    packed = pack_one(torch.randn(6, 2 * HIDDEN), [2, 6], torch.arange(7))
    before = drafter.backbone(packed)
    drafter.set_feature_scale(torch.rand(2 * HIDDEN) * 100 + 0.1)
    torch.testing.assert_close(drafter.backbone(packed), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("draft_vocab", [20, VOCAB])
def test_another_draft_vocabulary_changes_no_logit_of_the_tokens_in_both(draft_vocab: int) -> None:
    drafter = tiny_drafter(draft_vocab=32).eval()
    torch.manual_seed(0)
    head = torch.randn(VOCAB, HIDDEN)
    head[drafter.draft_to_target] = drafter.lm_head
    ids = None if draft_vocab == VOCAB else torch.randperm(VOCAB)[:draft_vocab].sort().values
    other = with_draft_vocab(drafter, ids, head if ids is None else head[ids])
    assert other.config.draft_vocab_size == draft_vocab
    packed = pack_one(torch.randn(9, 2 * HIDDEN), [4, 8], torch.arange(9))
    previous = torch.randint(VOCAB, (2, 4))
    everywhere = torch.ones(2, 4, dtype=torch.bool)
    before, confidence_before = drafter(packed, previous, everywhere)
    after, confidence_after = other(packed, previous, everywhere)
    torch.testing.assert_close(confidence_after, confidence_before)
    old, new = drafter.draft_to_target.tolist(), other.draft_to_target.tolist()
    shared = sorted(set(old) & set(new))
    assert shared
    torch.testing.assert_close(
        after[:, [new.index(t) for t in shared]], before[:, [old.index(t) for t in shared]]
    )
    w2 = other.markov_head.markov_w2.weight
    added = [new.index(t) for t in set(new) - set(old)]
    assert added
    assert not w2[added].any()


def test_saved_drafter_loads_strictly(tmp_path: Path) -> None:
    drafter = tiny_drafter("gated")
    drafter.set_feature_scale(torch.full((2 * HIDDEN,), 7.0))
    save_drafter(drafter, tmp_path)
    full_head = torch.zeros(VOCAB, HIDDEN)
    full_head[drafter.draft_to_target] = drafter.lm_head
    again = load_drafter(tmp_path, drafter.embedding, full_head)
    packed = pack_one(torch.randn(6, 2 * HIDDEN), [2, 6], torch.arange(7))
    # The weights on disk are fp16.
    torch.testing.assert_close(
        again.draft(packed)[1], drafter.draft(packed)[1], atol=2e-2, rtol=2e-2
    )
    assert again.config == drafter.config
    assert torch.equal(again.draft_to_target, drafter.draft_to_target)

    tensors = load_file(tmp_path / "model.safetensors")
    for change, word in (
        (lambda t: t.pop("norm.weight"), "missing"),
        (lambda t: t.update(surplus=torch.zeros(1)), "surplus"),
        (lambda t: t.update({"norm.weight": torch.ones(HIDDEN + 1)}), "expected"),
        (lambda t: t.pop("d2t"), "lacks d2t"),
        (lambda t: t["t2d"].logical_not_(), "contradict"),
    ):
        damaged = {name: value.clone() for name, value in tensors.items()}
        change(damaged)
        save_file(damaged, tmp_path / "model.safetensors")
        with pytest.raises(DrafterCheckpointError, match=word):
            load_drafter(tmp_path, drafter.embedding, full_head)


def test_config_survives_json_and_refuses_what_it_does_not_know() -> None:
    config = tiny_drafter("rnn").config
    assert DrafterConfig.from_json(config.to_json()) == config
    with pytest.raises(DrafterConfigError, match="architectures"):
        DrafterConfig.from_json(config.to_json() | {"architectures": ["Other"]})
    with pytest.raises(DrafterConfigError, match="target_layer_ids"):
        dataclasses.replace(config, target_layer_ids=(*LAYER_IDS, 3))
    with pytest.raises(DrafterConfigError, match="markov_head_type"):
        dataclasses.replace(config, markov_head_type="magic")
