"""Acceptance from cached texts against a real decoding loop, and the statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.training.tiny import EOS, LAYER_IDS, VOCAB, tiny_drafter, tiny_target, write_store
from training.benchmark import cached_answers, confidence_report, outcomes
from training.drafter import Drafter, PackedContext, target_to_draft
from training.evaluate import SequenceScore, conditional_rates, score_sequence, validate, walk
from training.features import CachedSequence
from training.losses import acceptance
from training.scores import auc, expected_calibration_error
from training.target import Target


def real_loop(target: Target, drafter: Drafter, text: list[int], start: int) -> list[int]:
    """Accepted draft tokens a round of a plain speculative loop with the target in it."""
    g = drafter.config.block_size
    ids = text[: start + 1]  # the prefill has drawn the first answer token
    rounds = []
    while len(ids) < len(text) and ids[-1] != EOS:
        features = target.forward(torch.tensor(ids)).features[:-1].half().float()
        n = len(ids) - 1
        packed = PackedContext(features, (n,), torch.tensor([n]), (1,), torch.tensor(ids[-1:]))
        draft = drafter.draft(packed)[0][0].tolist()
        logits = target.forward(torch.tensor(ids + draft), first=n).logits
        best = logits.argmax(dim=-1).tolist()
        accepted = 0
        while accepted < g and draft[accepted] == best[accepted]:
            accepted += 1
        rounds.append(accepted)
        ids += [*draft[:accepted], best[accepted]]
    return rounds


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[CachedSequence]:
    stem = tmp_path_factory.mktemp("answers") / "a"
    write_store(stem, sequences=8, greedy=True)
    return cached_answers(stem, tiny_target())


def test_walk_equals_a_real_greedy_loop(answers: list[CachedSequence]) -> None:
    target = tiny_target()
    # A drafter with the target's own embedding and head agrees often enough to test acceptance.
    torch.manual_seed(3)
    drafter = tiny_drafter(draft_vocab=VOCAB, block_size=4)
    drafter.embedding.copy_(target.embedding)
    drafter.lm_head.copy_(target.lm_head)
    to_draft = target_to_draft(drafter.draft_to_target, VOCAB)
    # Teach the sequential head the texts themselves, so that blocks are accepted in part.
    assert drafter.markov_head is not None
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    from training.batches import anchor_candidates, make_batch
    from training.losses import LossWeights, drafter_loss, position_weights

    batch = make_batch([(s, anchor_candidates(s)) for s in answers[:5]], 4, to_draft)
    for _ in range(60):
        optimizer.zero_grad()
        drafter_loss(
            drafter, batch, to_draft, LossWeights(1.0, 0.0, 0.0, 0.0), position_weights(4, 4.0)
        ).total.backward()
        optimizer.step()

    lengths: set[int] = set()
    for sequence in answers:
        score = score_sequence(drafter, sequence, to_draft)
        assert score is not None
        rounds, tokens = walk(score.matches)
        text = sequence.token_ids.tolist()
        real = real_loop(target, drafter, text, sequence.answer_start)
        assert rounds == len(real)
        assert tokens == len(text) - 1 - sequence.answer_start
        lengths.update(real)
    assert len(lengths) > 2, "the test needs rounds of different lengths to mean anything"
    result = validate(drafter, answers)
    assert result.greedy_length > 1


def test_walk_and_rates_by_hand() -> None:
    matches = np.array([[1, 0], [0, 1], [1, 1], [0, 0], [1, 1]], dtype=bool)
    # Round at 0 accepts 1 and moves to 2; round at 2 accepts 2 and moves past the end (5).
    assert walk(matches) == (2, 5)
    assert conditional_rates(matches) == pytest.approx([3 / 5, 2 / 3])


def test_ratio_estimate_is_the_acceptance_probability() -> None:
    """E over y ~ p of min(1, q(y) / p(y)) is sum min(p, q): what the T = 1 estimate rests on."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(1, 20, generator=generator).softmax(dim=-1)
    q = torch.randn(1, 20, generator=generator).softmax(dim=-1)
    overlap, _ = acceptance(q.log(), torch.zeros(1, 1), torch.arange(20)[None], p)
    assert float((p * (q / p).clamp(max=1)).sum()) == pytest.approx(float(overlap), rel=1e-5)


def test_auc_and_ece_by_hand() -> None:
    scores = np.array([0.1, 0.4, 0.4, 0.8])
    hits = np.array([False, True, False, True])
    assert auc(scores, hits) == pytest.approx((1 + 0.5 + 1 + 1) / 4)
    assert np.isnan(auc(scores, np.ones(4, dtype=bool)))
    assert expected_calibration_error(scores, hits) == pytest.approx((0.1 + abs(0.8 - 1) + 0.2) / 4)
    report = confidence_report(
        np.array([[0.9, 0.5], [0.2, 0.5]], dtype=np.float32),
        np.array([[1, 1], [0, 1]], bool),
        np.array([[0.4, 0.2], [0.4, 0.1]], dtype=np.float32),
    )
    assert report.survival_auc[0] == 1.0
    assert report.best_survival_auc[0] == 0.5
    assert report.mean_acceptance == [0.5, 1.0]


def test_no_confidence_ranks_better_than_the_true_survival() -> None:
    rng = np.random.default_rng(0)
    ratios = rng.random((4000, 2)).astype(np.float32)
    overlaps = rng.random((4000, 2)).astype(np.float32)
    # At the first position the coin falls with the ratio, whose mean is the overlap: here, equal.
    overlaps[:, 0] = ratios[:, 0]
    everything = np.ones((4000, 2), bool)
    score = SequenceScore(1.0, np.arange(4000), everything, overlaps, ratios, ratios, everything)
    confidences, accepted, survival = outcomes(score, rng)
    assert survival[:, 0] == pytest.approx(ratios[:, 0])
    assert survival[:, 1] == pytest.approx(ratios[:, 0] * overlaps[:, 1])
    # P(accept) = u with u uniform: the best area under the curve is 5/6 (standard error 0.006).
    report = confidence_report(confidences, accepted, survival)
    assert report.best_survival_auc[0] == pytest.approx(5 / 6, abs=0.025)


def test_target_layers_are_checked() -> None:
    from training.target import TargetError

    with pytest.raises(TargetError, match=r"0\.\.2"):
        Target(tiny_target().model, (*LAYER_IDS, 3))
