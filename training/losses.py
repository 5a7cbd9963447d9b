"""The training loss (paper, section 3.3) and the acceptance probability it is built on.

Names: ``draft_probs`` is the paper's q (what the drafter samples from), ``target_probs`` its p.
"""

from typing import Any, NamedTuple

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
    logits: Tensor, log_total: Tensor, top_ids: Tensor, top_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Probability that a token drawn from q passes the acceptance test, and q at p's top tokens.

    ``logits`` [N, V'] of q, ``log_total`` [N, 1] their logsumexp; ``top_ids`` [N, K] int64 draft
    ids of the target's top tokens, -1 where not in the draft vocabulary; ``top_probs`` [N, K] p
    there. Returns ``sum min(p, q)`` [N], which equals ``1 - ||q - p||_1 / 2`` since both sum to 1,
    and log q [N, K] (0 where id is -1).
    """
    drafted = top_ids >= 0
    log_q = torch.where(drafted, logits.gather(1, top_ids.clamp(min=0)) - log_total, 0.0)
    return torch.where(drafted, torch.minimum(log_q.exp(), top_probs), 0.0).sum(dim=1), log_q


class TokenLoss(torch.autograd.Function):
    """The terms on the draft logits, with their gradient written out.

    Every term depends on log q at a few tokens t only. With s_t the slope of the loss in log q_t,
    the gradient in the logits is s - q * sum(s): one pass over the vocabulary where automatic
    differentiation takes one for each operation; those took a fifth of a step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        top_ids: Tensor,
        top_probs: Tensor,
        row_weights: Tensor,
        weights: LossWeights,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Weighted sums over rows: total, CE, L1, KL; and the overlap of each row [N].

        ``logits`` [N, V']; ``labels`` [N] and ``top_ids`` [N, K] int64 draft ids, -1 where not in
        the draft vocabulary; ``top_probs`` [N, K]; ``row_weights`` [N].
        """
        log_total = logits.logsumexp(dim=-1, keepdim=True)
        overlap, log_q = acceptance(logits, log_total, top_ids, top_probs)
        has_label, label_ids = labels >= 0, labels.clamp(min=0)[:, None]
        label_log_q = (logits.gather(1, label_ids) - log_total)[:, 0]
        ce = -(row_weights * label_log_q * has_label).sum()
        l1 = 2 * (row_weights * (1 - overlap)).sum()
        kl = -(row_weights[:, None] * top_probs * log_q).sum()
        q = log_q.exp()
        slopes = 2 * weights.l1 * torch.where(q < top_probs, q, 0.0) + weights.kl * top_probs
        slopes = torch.where(top_ids >= 0, -row_weights[:, None] * slopes, 0.0)
        label_slopes = (-weights.ce * row_weights * has_label)[:, None]
        ctx.save_for_backward(
            logits, log_total, top_ids.clamp(min=0), slopes, label_ids, label_slopes
        )
        ctx.mark_non_differentiable(ce, l1, kl, overlap)
        return weights.ce * ce + weights.l1 * l1 + weights.kl * kl, ce, l1, kl, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient in the logits, times that of the total."""
        logits, log_total, top_ids, slopes, label_ids, label_slopes = ctx.saved_tensors
        total_slope = slopes.sum(dim=1, keepdim=True) + label_slopes
        gradient = (logits - log_total).exp_().mul_(-total_slope)
        gradient.scatter_add_(1, top_ids, slopes).scatter_add_(1, label_ids, label_slopes)
        return gradient.mul_(grads[0]), None, None, None, None, None


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

    total, ce, l1, kl, overlap = TokenLoss.apply(
        logits, labels, top_ids, top_probs, row_weights, weights
    )
    confidence = torch.zeros_like(total)
    if confidence_logits is not None:
        confidence = F.binary_cross_entropy_with_logits(
            confidence_logits, overlap, weight=row_weights, reduction="sum"
        )
        total = total + weights.confidence * confidence
    return LossParts(total, ce, l1, confidence.detach(), kl, (row_weights * overlap).sum())
