"""The continuous-batching loop: one `step()` at a time, in the caller's thread.

This is the plain loop, and the reference for any faster one. It knows requests, blocks and arrays;
engines, acceptance and policies are behind their own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.accept import Draft, accept
from runtime.admission import Admission
from runtime.batch import (
    DraftSegment,
    VerifySegment,
    pack_draft,
    pack_verify,
    slots,
)
from runtime.calibration import signals_of
from runtime.config import RuntimeConfig
from runtime.engine import Engines
from runtime.load import LoadGauge
from runtime.logits import log_probs, processor_for
from runtime.manifest import Manifest
from runtime.metrics import Metrics
from runtime.prefix_cache import PrefixCache
from runtime.randomness import draft_noise, round_noise
from runtime.request import FinishReason, Origin, Request
from runtime.scheduler import Scheduler, Tables, resolve_policy
from runtime.sequence import OnOutput, Sequence
from runtime.text import Tokenizer

Drafts = dict[Sequence, Draft]
Lengths = dict[Sequence, int]

# Context tokens that a sequence may owe the drafter before they are given to it though it drafts
# nothing: they are kept as features, which take more memory than the drafter's K/V.
MAX_PENDING_TOKENS = 512


class Round(NamedTuple):
    """What became of one draft, for those who record it."""

    sequence: Sequence
    signals: NDArray[np.float32]  # [g, 2], see `runtime.calibration`
    num_verified: int
    num_accepted: int


class Loop:
    """Requests in, outputs through their callbacks; nothing happens outside `step()`."""

    def __init__(
        self,
        engines: Engines,
        manifest: Manifest,
        draft_vocab: NDArray[np.int64] | None,
        tokenizer: Tokenizer,
        config: RuntimeConfig,
        cache: PrefixCache,
        tables: Tables | None = None,
        gauge: LoadGauge | None = None,
    ) -> None:
        kv = manifest.verifier.kv
        self.metrics = Metrics()
        self.admission = Admission(cache, kv.block_tokens, config.max_batch_requests)
        self.cache = cache
        self._engines = engines
        self._block_tokens = kv.block_tokens
        self._vocab_size = manifest.verifier.vocab_size
        self._block_size = 0 if manifest.drafter is None else manifest.drafter.block_size
        self.scheduler: Scheduler[Sequence] = Scheduler(
            resolve_policy(config.policy, manifest.drafter, tables),
            config,
            self.metrics,
            tables,
            gauge or LoadGauge(config),
        )
        self.on_round: Callable[[Round], None] | None = None
        self._draft_vocab = draft_vocab
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(manifest.eos_token_ids)
        self._prefill_chunk_tokens = config.prefill_chunk_tokens
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.admission.has_work

    def add(self, request: Request, on_output: OnOutput) -> Sequence:
        """Queue a valid request; its outputs come from later steps."""
        self._next_id += 1
        end_ids = self._eos_token_ids if request.end_id is None else frozenset({request.end_id})
        if request.ignore_eos:
            end_ids = frozenset()
        processor = processor_for(request, self._tokenizer, end_ids, self._vocab_size)
        sequence = Sequence(self._next_id, request, self._tokenizer, end_ids, on_output, processor)
        sequence.drafted = self.scheduler.speculates(sequence)
        self.admission.waiting.append(sequence)
        self.metrics.counts["requests"] += 1
        self.metrics.counts["prompt_tokens"] += sequence.num_prompt
        return sequence

    def abort(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a waiting or running sequence now and free its blocks."""
        self.admission.remove(sequence)
        self.metrics.counts[f"finished_{reason}"] += 1
        sequence.abort(reason, error)

    def step(self) -> None:
        """One round: every running sequence gains at least one token or one prefill chunk."""
        metrics, scheduler, admission = self.metrics, self.scheduler, self.admission
        metrics.start_step()
        self._admit()
        scheduler.plan([s for s in admission.running if s.is_decoding])
        caps = self._reserve()
        metrics.lap("admit")
        old_context = metrics.counts["drafter_context_tokens"]
        drafts = self._draft(caps)
        metrics.lap("draft")
        verified = self._schedule(caps, drafts)
        metrics.lap("schedule")
        if decoding := self._decode_segments(caps, verified):
            self._verify(decoding, verified, "")
            lengths = [len(verified[s].token_ids) if s in verified else 0 for s in drafts]
            new_context = metrics.counts["drafter_context_tokens"] - old_context
            scheduler.end_decoding(lengths, new_context, metrics.step_s)
        if prefilling := self._prefill_segments():
            self._verify(prefilling, verified, "prefill_")
        scheduler.gauge.update(metrics.step_s, len(admission.running), len(admission.waiting))

    def _admit(self) -> None:
        for sequence in self.admission.admit():
            self.metrics.counts["prefix_cache_queried_tokens"] += len(sequence.token_ids)
            self.metrics.counts["prefix_cache_hit_tokens"] += sequence.num_computed

    def _reserve(self) -> Lengths:
        """Blocks for this step's tokens; returns how many draft tokens each sequence may get."""
        caps: Lengths = {}
        for sequence in list(self.admission.running):
            if sequence not in self.admission.running or not sequence.is_decoding:
                continue  # preempted below, or holding the blocks of its whole prefill already
            cap = self._cap(sequence)
            if self.admission.reserve(sequence, 1 + cap):
                caps[sequence] = cap
            elif self._make_room(sequence):
                caps[sequence] = 0
        return caps

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt younger sequences until one token fits; False when it had to go itself."""
        while not self.admission.reserve(sequence, 1):
            self.metrics.counts["preemptions"] += 1
            if self.admission.preempt_youngest() is sequence:
                return False
        return True

    def _cap(self, sequence: Sequence) -> int:
        if not (self.scheduler.drafts_for(sequence) and sequence.num_computed):
            return 0
        wanted = sequence.request.num_draft_tokens
        block = self._block_size if wanted is None else min(wanted, self._block_size)
        return min(block, sequence.num_remaining - 1)

    def _draft(self, caps: Lengths) -> Drafts:
        """Give the drafter its new context; draft for the sequences that may use it."""
        sequences = [
            s
            for s in self.admission.running
            if s.pending_features and (caps.get(s) or self._drafter_must_catch_up(s))
        ]
        if not sequences:
            return {}
        outputs = self._run_drafter(sequences)
        signals = signals_of(outputs)
        drafts: Drafts = {}
        for row, sequence in enumerate(sequences):
            if caps.get(sequence):
                sequence.num_drafted += self._block_size
                self.metrics.counts["drafted_tokens"] += self._block_size
                greedy = sequence.request.greedy
                drafts[sequence] = Draft(
                    outputs["draft_ids"][row],
                    None if greedy else outputs["draft_logits"][row],
                    self._draft_vocab,
                    None if signals is None else signals[row],
                )
        return drafts

    def _drafter_must_catch_up(self, sequence: Sequence) -> bool:
        """Whether a sequence's context goes to the drafter though nothing is drafted for it."""
        if sequence.num_pending >= MAX_PENDING_TOKENS:
            return True
        # A prompt enters the prefix cache as soon as it is computed, drafts or no drafts.
        prompt_waits = sequence.num_drafter_computed < sequence.num_prompt
        return sequence.is_decoding and prompt_waits and self.cache.lags(sequence)

    def _run_drafter(self, sequences: list[Sequence]) -> dict[str, NDArray]:
        """One drafter pass over what the sequences' contexts have gained."""
        drafter = self._engines.drafter
        assert drafter is not None, "a model without a drafter does not speculate"
        noise = draft_noise(
            [s.request for s in sequences],
            [s.num_computed for s in sequences],
            self._block_size,
            self._vocab_size,
            self._draft_vocab,
        )
        segments = [
            DraftSegment(
                features=np.concatenate(s.pending_features),
                context_len=s.num_drafter_computed,
                blocks=s.blocks,
                anchor_id=s.token_ids[min(s.num_computed, len(s.token_ids) - 1)],
                noise=own_noise,
                temperature=s.request.temperature,
                top_k=s.request.top_k,
                top_p=s.request.top_p,
                min_p=s.request.min_p,
            )
            for s, own_noise in zip(sequences, noise, strict=True)
        ]
        batch = pack_draft(segments, self._block_tokens)
        outputs = drafter.run(batch.inputs)
        drafter.commit(np.arange(len(batch.slots)), batch.slots)
        self.metrics.counts["drafter_context_tokens"] += len(batch.slots)
        for sequence, segment in zip(sequences, segments, strict=True):
            sequence.num_drafter_computed += len(segment.features)
            sequence.pending_features.clear()
            self.cache.publish(sequence)
        return outputs

    def _schedule(self, caps: Lengths, drafts: Drafts) -> Drafts:
        """Cut each draft to the tokens that will be verified; a draft cut to none is left out."""
        if not drafts:
            return {}
        signals = [draft.signals for draft in drafts.values() if draft.signals is not None]
        lengths = self.scheduler.lengths(
            list(drafts),
            np.array([caps[s] for s in drafts]),
            np.stack(signals) if signals else None,
        )
        cut = {s: d.first(n) for (s, d), n in zip(drafts.items(), lengths.tolist(), strict=True)}
        return {s: d for s, d in cut.items() if d is not None}

    def _decode_segments(
        self, sequences: Iterable[Sequence], verified: Drafts
    ) -> dict[Sequence, VerifySegment]:
        segments = {}
        for sequence in sequences:
            token_ids = sequence.token_ids[-1:]
            if sequence in verified:
                token_ids = token_ids + verified[sequence].token_ids.tolist()
            segments[sequence] = VerifySegment(
                token_ids, sequence.num_computed, sequence.blocks, len(token_ids)
            )
        return segments

    def _prefill_segments(self) -> dict[Sequence, VerifySegment]:
        """One chunk, shared by the oldest prefilling sequences.

        It runs apart from the decoding group, after it: padded to its length, their attention
        would cost more than the second pass.
        """
        budget = self._prefill_chunk_tokens
        segments = {}
        for sequence in self.admission.running:
            if budget > 0 and not sequence.is_decoding:
                found = self.cache.extend(sequence, budget)
                self.metrics.counts["prefix_cache_hit_tokens"] += found.tokens
                budget -= found.loaded
                if budget <= 0:
                    break
                start = sequence.num_computed
                token_ids = sequence.token_ids[start : start + budget]
                last = start + len(token_ids) == len(sequence.token_ids)
                segments[sequence] = VerifySegment(token_ids, start, sequence.blocks, int(last))
                budget -= len(token_ids)
        return segments

    def _verify(
        self, group: dict[Sequence, VerifySegment], verified: Drafts, phase_prefix: str
    ) -> None:
        """One verifier pass over the group, then accept, commit and emit for each sequence."""
        metrics = self.metrics
        segments = list(group.values())
        batch = pack_verify(segments, self._block_tokens)
        metrics.lap(f"{phase_prefix}pack")
        outputs = self._engines.verifier.run(batch.inputs)
        metrics.counts[f"{phase_prefix}verifier_passes"] += 1
        metrics.counts[f"{phase_prefix}verifier_tokens"] += len(batch.inputs["token_ids"])
        metrics.lap(f"{phase_prefix}verify")

        noise = round_noise(
            [s.request for s in group],
            [len(s.token_ids) - 1 for s in group],
            [max(0, segment.num_logits - 1) for segment in segments],
        )
        rows, into, advances = [], [], []
        for i, (sequence, segment) in enumerate(group.items()):
            kept, new_ids, likely = len(segment.token_ids), [], []
            if segment.num_logits:
                logits = outputs["logits"][batch.logits_starts[i] :][: segment.num_logits]
                draft = verified.get(sequence)
                if sequence.processor is not None:
                    drafted = np.empty(0, np.int64) if draft is None else draft.token_ids
                    logits = sequence.processor.process(logits, drafted)
                result = accept(sequence.request, draft, noise[i], logits)
                kept -= segment.num_logits - 1 - result.num_accepted
                accepted = [] if draft is None else draft.token_ids[: result.num_accepted].tolist()
                new_ids = [*accepted, result.next_token]
                if sequence.request.return_log_probs:
                    likely = log_probs(logits, new_ids)
                if self.on_round is not None and draft and draft.signals is not None:
                    row = Round(
                        sequence,
                        draft.signals.copy(),
                        len(draft.token_ids),
                        result.num_accepted,
                    )
                    self.on_round(row)
            start = batch.token_starts[i]
            rows.append(np.arange(start, start + kept))
            into.append(slots(segment.blocks, segment.context_len, kept, self._block_tokens))
            if sequence.drafted:
                sequence.pending_features.append(outputs["features"][start:][:kept].copy())
            advances.append((sequence, segment, kept, new_ids, likely))
        metrics.lap(f"{phase_prefix}accept")

        self._engines.verifier.commit(np.concatenate(rows), np.concatenate(into))
        metrics.lap(f"{phase_prefix}commit")

        for advance in advances:
            self._advance(*advance)
        metrics.lap(f"{phase_prefix}emit")

    def _advance(
        self,
        sequence: Sequence,
        segment: VerifySegment,
        kept: int,
        new_ids: list[int],
        likely: list[float],
    ) -> None:
        before = sequence.num_output
        num_accepted, num_verified = len(new_ids) - 1, segment.num_logits - 1
        # A prompt whose last token alone was not cached ends in a decoding step, but not a round.
        was_decoding = sequence.is_decoding and (before > 0 or num_verified > 0)
        sequence.num_computed += kept
        self.cache.publish(sequence)
        for row, token_id in enumerate(new_ids):
            rejected = row == num_accepted < num_verified
            own: Origin = "corrected" if rejected else "target"
            origin = "draft" if row < num_accepted else own
            sequence.append(token_id, origin, likely[row] if likely else None)
            if sequence.finish_reason is not None:
                break  # the rest of an accepted block is cut: in text, ids, usage and metrics
        self.scheduler.end_round(sequence, num_verified, num_accepted)
        gained = sequence.num_output - before
        self.metrics.counts["output_tokens"] += gained
        if was_decoding:
            num_accepted = min(num_accepted, gained)
            if sequence.finish_reason is not None:
                num_verified = min(num_verified, gained)
            sequence.num_rounds += 1
            sequence.num_verified += num_verified
            sequence.num_accepted += num_accepted
            self.metrics.count_round(num_verified, num_accepted)
        if sequence.finish_reason is not None:
            self._finish(sequence)
            self.metrics.counts[f"finished_{sequence.finish_reason}"] += 1
            self.metrics.observe_request(sequence.stats(), sequence.num_prompt, sequence.num_output)
        sequence.emit()

    def _finish(self, sequence: Sequence) -> None:
        if self.cache.lags(sequence):  # a last pass, so that its last blocks can be cached too
            self.metrics.lap("emit")
            self._run_drafter([sequence])
            self.metrics.lap("draft")
        self.admission.remove(sequence)
