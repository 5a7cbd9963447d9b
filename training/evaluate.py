"""How good a drafter is, from cached sequences, without running the target again.

Greedy: in a text that the target wrote greedily, the draft token at position k is accepted exactly
if it equals the text and all before it do. So drafting at every anchor of the text and then walking
through it (accepted + 1 tokens a round, the bonus token counted) gives the accepted length that a
real decoding loop would have, to the token.

Temperature 1: rejection sampling accepts k draft tokens with probability ``sum over x1..xk of prod
min(p, q)``, which is the mean of ``prod min(1, q / p)`` over texts drawn from p. So texts sampled
at temperature 1 give an unbiased estimate without drawing any draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.batches import anchor_candidates, make_batch
from training.drafter import Drafter, target_to_draft
from training.features import CachedSequence
from training.losses import acceptance


@dataclass(frozen=True)
class SequenceScore:
    """A drafter's result on one sequence, at A anchors.

    ``anchors`` [A]; ``matches`` [A, g] bool: draft argmax equals the text; ``overlaps`` [A, g]:
    acceptance probability at temperature 1 along the text; ``ratios`` [A, g]: min(1, q / p) of the
    text's token; ``confidences`` [A, g] after the sigmoid (empty without that head); ``exists``
    [A, g] bool: the text goes on so far.
    """

    temperature: float
    anchors: npt.NDArray[np.int64]
    matches: npt.NDArray[np.bool_]
    overlaps: npt.NDArray[np.float32]
    ratios: npt.NDArray[np.float32]
    confidences: npt.NDArray[np.float32]
    exists: npt.NDArray[np.bool_]


@dataclass
class Validation:
    """Summary over sequences; ``position_*`` are lists over k = 1..g."""

    greedy_rounds: int = 0
    greedy_tokens: int = 0
    position_match: list[float] = field(default_factory=list)
    position_overlap: list[float] = field(default_factory=list)
    sampled_length: float = float("nan")

    @property
    def greedy_length(self) -> float:
        """Accepted tokens a round when decoding greedily, bonus token counted."""
        return self.greedy_tokens / self.greedy_rounds if self.greedy_rounds else float("nan")


@torch.no_grad()
def score_sequence(
    drafter: Drafter, sequence: CachedSequence, to_draft: Tensor, stride: int = 1
) -> SequenceScore | None:
    """Draft at every ``stride``-th anchor of ``sequence``; None if it has no anchor."""
    anchors = anchor_candidates(sequence)[::stride]
    if not len(anchors):
        return None
    g = drafter.config.block_size
    device = str(drafter.draft_to_target.device)
    batch = make_batch([(sequence, anchors)], g, to_draft, device)
    everywhere = torch.ones_like(batch.keep)
    logits, confidence = drafter(batch.packed, batch.previous_ids, everywhere)
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    top_ids = to_draft[batch.top_ids.flatten(0, 1)]
    overlap, _ = acceptance(logits, log_total, top_ids, batch.top_probs.flatten(0, 1))
    best = drafter.draft_to_target[logits.argmax(dim=-1)].view_as(batch.label_ids)
    labels = to_draft[batch.label_ids.flatten()]
    label_log_q = (logits.gather(1, labels.clamp(min=0)[:, None]) - log_total)[:, 0]
    q_label = label_log_q.exp() * (labels >= 0)
    found = batch.top_ids.flatten(0, 1) == batch.label_ids.flatten()[:, None]
    top_probs = batch.top_probs.flatten(0, 1)
    # A token outside the cached top K is less likely than the last of them.
    p_label = torch.where(found.any(dim=1), (found * top_probs).sum(dim=1), top_probs[:, -1])
    exists = anchors[:, None] + np.arange(g) < len(sequence.token_ids) - 1
    matches = (best == batch.label_ids).cpu().numpy() & exists
    confidences = torch.empty(0) if confidence is None else torch.sigmoid(confidence).view(-1, g)
    return SequenceScore(
        temperature=sequence.temperature,
        anchors=anchors,
        matches=matches,
        overlaps=overlap.view(-1, g).cpu().numpy(),
        ratios=(q_label / p_label).clamp(max=1).view(-1, g).cpu().numpy(),
        confidences=confidences.cpu().numpy(),
        exists=exists,
    )


def walk(matches: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Rounds and tokens of a greedy loop over one text.

    ``matches`` [A, g] bool for every anchor of the text in order (stride 1). Each round commits the
    leading matches and one more token; the last round may have no token left to add.
    """
    accepted = np.cumprod(matches, axis=1).sum(axis=1)
    at = rounds = 0
    while at < len(accepted):
        at += int(accepted[at]) + 1
        rounds += 1
    return rounds, min(at, len(accepted))


def validate(
    drafter: Drafter, sequences: Sequence[CachedSequence], sampled_stride: int = 8
) -> Validation:
    """Score texts written greedily or sampled at temperature 1; others say nothing exact."""
    to_draft = target_to_draft(drafter.draft_to_target, drafter.config.vocab_size)
    scores = [
        score_sequence(drafter, sequence, to_draft, sampled_stride if sequence.temperature else 1)
        for sequence in sequences
        if sequence.temperature in (0, 1)
    ]
    return summarise([score for score in scores if score is not None])


def summarise(scores: Sequence[SequenceScore]) -> Validation:
    """Greedy texts by walking (they need every anchor), sampled ones by survival of drafts."""
    result = Validation()
    matched: list[npt.NDArray[np.bool_]] = []
    overlaps: list[npt.NDArray[np.float32]] = []
    survivals: list[npt.NDArray[np.float32]] = []
    for score in scores:
        whole = score.exists.all(axis=1)
        if score.temperature == 0:
            rounds, tokens = walk(score.matches)
            result.greedy_rounds += rounds
            result.greedy_tokens += tokens
            matched.append(score.matches[whole])
        else:
            overlaps.append(score.overlaps[whole])
            before = np.cumprod(score.ratios[whole], axis=1)[:, :-1]
            survivals.append(np.concatenate([np.ones_like(before[:, :1]), before], axis=1))
    if matched:
        result.position_match = conditional_rates(np.concatenate(matched))
    if overlaps:
        overlap, reached = np.concatenate(overlaps), np.concatenate(survivals)
        accepted = (overlap * reached).sum(axis=0)
        result.position_overlap = (accepted / reached.sum(axis=0)).tolist()
        result.sampled_length = 1 + float(accepted.sum()) / len(overlap)
    return result


def conditional_rates(matches: npt.NDArray[np.bool_]) -> list[float]:
    """P(position k accepted | all before accepted) for k = 1..g from ``matches`` [A, g]."""
    survival = np.cumprod(matches, axis=1).sum(axis=0)
    reached = np.concatenate([[len(matches)], survival[:-1]])
    return [float(s / r) if r else float("nan") for s, r in zip(survival, reached, strict=True)]
