"""The training loss (paper, section 3.3) and the acceptance probability it is built on.

Names: ``draft_probs`` is the paper's q (what the drafter samples from), ``target_probs`` its p.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from training.batches import Batch
from training.drafter import Drafter


class LossWeights(NamedTuple):
    """Weights of the terms; ``kl`` is the extra soft-target term of the first part of a run."""

    ce: float
    l1: float
    confidence: float
    kl: float


class LossParts(NamedTuple):
    """Weighted means over kept positions; ``total`` carries the gradient, the rest is for logs."""

    total: Tensor
    ce: Tensor
    l1: Tensor
    confidence: Tensor
    kl: Tensor
    overlap: Tensor


def position_weights(block_size: int, decay_tokens: float) -> Tensor:
    """``exp(-(k - 1) / decay_tokens)`` for k = 1..g: [g] float32."""
    return torch.exp(-torch.arange(block_size, dtype=torch.float32) / decay_tokens)


def acceptance(
    log_draft: Tensor, top_draft_ids: Tensor, top_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Probability that a token drawn from q passes the acceptance test, and q at p's top tokens.

    ``log_draft`` [N, V'] log q; ``top_draft_ids`` [N, K] int64 draft ids of the target's top
    tokens, -1 where not in the draft vocabulary; ``top_probs`` [N, K] p there. Returns ``sum min(p,
    q)`` [N], which equals ``1 - ||q - p||_1 / 2`` since both sum to 1, and log q [N, K] (0 where id
    is -1).
    """
    drafted = top_draft_ids >= 0
    log_q = log_draft.gather(1, top_draft_ids.clamp(min=0))
    log_q = torch.where(drafted, log_q, torch.zeros_like(log_q))
    smaller = torch.minimum(log_q.exp(), top_probs)
    return torch.where(drafted, smaller, torch.zeros_like(smaller)).sum(dim=1), log_q


def drafter_loss(
    drafter: Drafter, batch: Batch, to_draft: Tensor, weights: LossWeights, decay: Tensor
) -> LossParts:
    """Run the drafter over ``batch`` and weigh the terms.

    ``to_draft`` [V] int64, -1 where not drafted; ``decay`` [g] position weights. CE leaves out
    labels that the draft vocabulary lacks; the target's probability of them still counts as
    rejection.
    """
    logits, confidence_logits = drafter(batch.packed, batch.previous_ids, batch.keep)
    row_weights = decay.expand_as(batch.keep)[batch.keep]
    row_weights = row_weights / row_weights.sum()
    labels = to_draft[batch.label_ids[batch.keep]]
    top_ids = to_draft[batch.top_ids[batch.keep]]
    top_probs = batch.top_probs[batch.keep]

    log_draft = F.log_softmax(logits, dim=-1)
    overlap, log_q = acceptance(log_draft, top_ids, top_probs)
    l1 = 2 * (row_weights * (1 - overlap)).sum()
    label_logprob = log_draft.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    ce = -(row_weights * label_logprob * (labels >= 0)).sum()
    kl = -(row_weights[:, None] * top_probs * log_q).sum()
    total = weights.ce * ce + weights.l1 * l1 + weights.kl * kl
    confidence = torch.zeros_like(total)
    if confidence_logits is not None:
        confidence = F.binary_cross_entropy_with_logits(
            confidence_logits, overlap.detach(), weight=row_weights, reduction="sum"
        )
        total = total + weights.confidence * confidence
    return LossParts(
        total,
        ce.detach(),
        l1.detach(),
        confidence.detach(),
        kl.detach(),
        (row_weights * overlap.detach()).sum(),
    )
