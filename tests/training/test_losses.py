"""Loss terms against their definitions over the whole vocabulary."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional as F

from tests.training.tiny import HIDDEN, VOCAB, tiny_drafter
from training.batches import Batch, make_batch
from training.drafter import target_to_draft
from training.features import CachedSequence
from training.losses import LossWeights, TokenLoss, acceptance, drafter_loss, position_weights


def random_sequence(n: int = 20, start: int = 5, seed: int = 0) -> CachedSequence:
    """A sequence whose cached distribution is complete (K = V)."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(n, VOCAB)) * 2).float()
    top = torch.log_softmax(logits, dim=-1).sort(dim=-1, descending=True)
    return CachedSequence(
        token_ids=rng.integers(0, VOCAB, size=n),
        features=rng.normal(size=(n, 2 * HIDDEN)).astype(np.float16),
        top_ids=top.indices.numpy(),
        top_logprobs=top.values.half().numpy(),
        answer_start=start,
        temperature=1.0,
    )


def test_acceptance_is_one_minus_half_the_l1_distance() -> None:
    """The confidence target: exact where the draft vocabulary covers only part of the target's."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(VOCAB, generator=generator)[:30].sort().values
    to_draft = target_to_draft(ids, VOCAB)
    logits = torch.randn(7, 30, generator=generator)
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    p = torch.randn(7, VOCAB, generator=generator).softmax(dim=-1)
    q_full = torch.zeros(7, VOCAB).index_copy(1, ids, logits.softmax(dim=-1))
    top = p.sort(dim=-1, descending=True)
    overlap, _ = acceptance(logits, log_total, to_draft[top.indices], top.values)
    torch.testing.assert_close(overlap, 1 - (q_full - p).abs().sum(dim=-1) / 2)


def test_loss_is_the_weighted_sum_of_its_definitions() -> None:
    drafter = tiny_drafter()
    to_draft = target_to_draft(drafter.draft_to_target, VOCAB)
    sequence = random_sequence()
    batch = make_batch([(sequence, np.array([5, 9, 18]))], 4, to_draft)
    decay = position_weights(4, 3.0)
    assert math.isclose(float(decay[2]), math.exp(-2 / 3), rel_tol=1e-6)
    loss = drafter_loss(drafter, batch, to_draft, LossWeights(0.1, 0.9, 1.0, 0.5), decay)

    everywhere = torch.ones_like(batch.keep)
    logits, confidence = drafter(batch.packed, batch.previous_ids, everywhere)
    assert confidence is not None
    logits, confidence = logits.detach().view(3, 4, -1), confidence.detach().view(3, 4)
    weight_sum = l1 = ce = bce = kl = 0.0
    for a, anchor in enumerate([5, 9, 18]):
        for k in range(4):
            if anchor + k + 1 >= len(sequence.token_ids):
                break
            weight = float(decay[k])
            q = torch.zeros(VOCAB)
            q[drafter.draft_to_target] = logits[a, k].softmax(dim=-1)
            p = torch.zeros(VOCAB)
            row = anchor + k
            p[torch.from_numpy(sequence.top_ids[row])] = (
                torch.from_numpy(sequence.top_logprobs[row]).float().exp()
            )
            distance = float((q - p).abs().sum())
            label = int(sequence.token_ids[row + 1])
            weight_sum += weight
            l1 += weight * 2 * (1 - float(torch.minimum(p, q).sum()))
            assert math.isclose(distance, 2 * (1 - float(torch.minimum(p, q).sum())), abs_tol=3e-3)
            if q[label] > 0:
                ce -= weight * math.log(float(q[label]))
            drafted = q > 0
            kl -= weight * float((p[drafted] * q[drafted].log()).sum())
            wanted = torch.minimum(p, q).sum()
            bce += weight * float(F.binary_cross_entropy_with_logits(confidence[a, k], wanted))
            if to_draft[label] < 0:
                break  # the rest of the block can never be reached
    expected = (0.1 * ce + 0.9 * l1 + 1.0 * bce + 0.5 * kl) / weight_sum
    assert math.isclose(float(loss.total.detach()), expected, rel_tol=1e-4)


def test_the_written_out_gradient_is_that_of_automatic_differentiation() -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(VOCAB, generator=generator)[:30].sort().values
    to_draft = target_to_draft(ids, VOCAB)
    logits = torch.randn(9, 30, generator=generator, dtype=torch.float64, requires_grad=True)
    top = torch.randn(9, VOCAB, generator=generator, dtype=torch.float64).softmax(dim=-1).topk(12)
    top_ids = to_draft[top.indices]
    labels = to_draft[torch.randint(VOCAB, (9,), generator=generator)]
    assert (labels < 0).any()
    assert (labels >= 0).any()
    weights = LossWeights(0.3, 0.9, 1.0, 0.7)
    row_weights = torch.rand(9, generator=generator, dtype=torch.float64)

    log_q = logits.log_softmax(dim=-1)
    drafted = top_ids >= 0
    top_log_q = log_q.gather(1, top_ids.clamp(min=0))
    smaller = torch.where(drafted, torch.minimum(top_log_q.exp(), top.values), 0.0)
    label_log_q = log_q.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    rows = -0.3 * label_log_q + 1.8 * (1 - smaller.sum(dim=1))
    rows = rows - 0.7 * torch.where(drafted, top.values * top_log_q, 0.0).sum(dim=1)
    expected = (row_weights * rows).sum()
    total, *_ = TokenLoss.apply(logits, labels, top_ids, top.values, row_weights, weights)
    torch.testing.assert_close(total, expected)
    (wanted,) = torch.autograd.grad(2 * expected, logits)
    (found,) = torch.autograd.grad(2 * total, logits)
    torch.testing.assert_close(found, wanted)


def test_confidence_target_carries_no_gradient_to_the_draft() -> None:
    drafter = tiny_drafter()
    to_draft = target_to_draft(drafter.draft_to_target, VOCAB)
    batch = make_batch([(random_sequence(), np.array([6]))], 4, to_draft)
    weights = LossWeights(0.0, 0.0, 1.0, 0.0)
    drafter_loss(drafter, batch, to_draft, weights, position_weights(4, 4.0)).total.backward()
    assert drafter.markov_head is not None
    assert drafter.confidence_head is not None
    gradient = drafter.markov_head.markov_w2.weight.grad
    assert gradient is None or not gradient.any()
    assert drafter.confidence_head.proj.weight.grad is not None
    assert drafter.confidence_head.proj.weight.grad.any()


def test_batch_keeps_what_exists_and_can_be_reached() -> None:
    sequence = random_sequence(n=12)
    to_draft = torch.arange(VOCAB)
    missing = int(sequence.token_ids[7])
    to_draft[missing] = -1
    batch: Batch = make_batch([(sequence, np.array([5, 9]))], 4, to_draft)
    # Anchor 5 predicts tokens 6, 7, 8, 9; token 7 is not drafted, so 8 and 9 are out of reach.
    labels = sequence.token_ids[6:10]
    first = next((k for k, label in enumerate(labels) if label == missing), 4)
    assert batch.keep[0].tolist() == [k <= first for k in range(4)]
    assert batch.previous_ids[0].tolist() == sequence.token_ids[5:9].tolist()
    assert batch.label_ids[0].tolist() == labels.tolist()
    assert batch.packed.features.shape[0] == 9
    # Anchor 9 predicts tokens 10 and 11, then the text ends.
    assert batch.keep[1].tolist()[2:] == [False, False]
