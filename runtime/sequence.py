"""One running request: its tokens, how much of them is computed, and the text it has produced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.logits import LogitsProcessor
from runtime.request import FinishReason, Origin, Request, RequestOutput
from runtime.schedule import HISTORY_ROUNDS
from runtime.text import Detokenizer, StopMatcher, Tokenizer

OnOutput = Callable[[RequestOutput], None]


@dataclass(eq=False)
class Sequence:
    """State of a request between arrival and its final output.

    `token_ids` is prompt and output. The first `num_computed` of them have verifier K/V in the
    pool, the first `num_drafter_computed` the drafter's too; `pending_features` holds the rows
    between the two. Exactly one uncomputed token means that the sequence is decoding and that
    token is the anchor; more means that it is prefilling (a preempted sequence does so again).
    The first `num_published` blocks are in the prefix cache, where it is on, and never written.
    """

    request_id: int
    request: Request
    tokenizer: Tokenizer
    end_ids: frozenset[int]  # tokens that end the answer
    on_output: OnOutput
    processor: LogitsProcessor | None = None  # of its logits; None leaves them alone
    arrival_s: float = field(default_factory=time.monotonic)

    # Written by the loop
    token_ids: list[int] = field(init=False)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_drafter_computed: int = 0
    pending_features: list[NDArray[np.float32]] = field(default_factory=list)
    drafted: bool = False  # the drafter's K/V are computed too
    survivals: deque[NDArray[np.float64]] = field(  # [g] of the last rounds, older first
        default_factory=lambda: deque(maxlen=HISTORY_ROUNDS)
    )
    leaning: float = 0.0  # of its confidences, see `runtime.experience`
    finish_reason: FinishReason | None = None
    ended: bool = False  # the final output has been sent

    # Written by the prefix cache
    block_digests: list[bytes] = field(default_factory=list)  # of the full blocks so far
    num_published: int = 0

    # Statistics, in tokens unless the name says otherwise
    num_rounds: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    admitted_s: float | None = None  # for the first time
    num_cached: int = 0  # of the prompt, found in the prefix cache
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        self._detokenizer = Detokenizer(self.tokenizer)
        self._stop = StopMatcher(self.request.stop_words)
        self._unsent_text = ""
        self._unsent_origins: list[Origin] = []  # one for each token not sent yet
        self._unsent_log_probs: list[float] = []
        self._cum_log_probs = 0.0

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens - self.num_output

    @property
    def num_uncomputed(self) -> int:
        """Tokens without K/V, at least 1 until the sequence is finished."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the anchor is uncomputed."""
        return self.num_uncomputed == 1

    @property
    def num_pending(self) -> int:
        """Computed tokens that the drafter does not have in its context yet."""
        return self.num_computed - self.num_drafter_computed

    @property
    def speculates(self) -> bool:
        """Whether the request lets the drafter work for it."""
        return not self.request.disable_spec_decode and self.request.num_draft_tokens != 0

    def take_cached(self, num_blocks: int, block_tokens: int) -> None:
        """Count the tokens of the first `num_blocks` blocks as computed: the cache holds them."""
        self.num_published = num_blocks
        if not self.num_preemptions:
            self.num_cached += num_blocks * block_tokens - self.num_computed
        self.pending_features.clear()  # of tokens among these
        self.num_computed = num_blocks * block_tokens
        if self.drafted:
            self.num_drafter_computed = self.num_computed

    def append(self, token_id: int, origin: Origin, log_prob: float | None = None) -> None:
        """Add a generated token and decide whether it ends the answer."""
        assert self.finish_reason is None, "a finished sequence takes no token"
        self.token_ids.append(token_id)
        if self.processor is not None:
            self.processor.observe(token_id)
        self._unsent_origins.append(origin)
        if log_prob is not None:
            self._unsent_log_probs.append(log_prob)
            self._cum_log_probs += log_prob
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        if token_id in self.end_ids:
            self.finish_reason = "eos"  # in the ids, not in the text
        else:
            self._add_text(self._detokenizer.push(token_id))
            if self.finish_reason is None and self.num_remaining == 0:
                self.finish_reason = "length"
        if self.finish_reason in ("eos", "length"):
            self._add_text(self._detokenizer.flush())
            self._unsent_text += self._stop.flush()

    def _add_text(self, piece: str) -> None:
        if self.num_output < self.request.min_tokens:
            self._unsent_text += piece
            return
        match = self._stop.push(piece)
        self._unsent_text += match.text
        if match.stopped:
            self.finish_reason = "stop"

    def emit(self) -> None:
        """Send what is new, if the client wants it now and there is anything to send."""
        done = self.finish_reason is not None
        if done or (self.request.stream and self._unsent_origins):
            self._send()

    def abort(self, reason: FinishReason, error: str | None = None) -> None:
        """End the sequence from outside, with a final output."""
        self.finish_reason = reason
        self._send(error)

    def _send(self, error: str | None = None) -> None:
        assert not self.ended, "a sequence ends once"
        self.ended = self.finish_reason is not None
        text, self._unsent_text = self._unsent_text, ""
        origins, self._unsent_origins = self._unsent_origins, []
        log_probs, self._unsent_log_probs = self._unsent_log_probs, []
        self.on_output(
            RequestOutput(
                text=text,
                token_ids=self.token_ids[len(self.token_ids) - len(origins) :],
                origins=origins,
                finish_reason=self.finish_reason,
                error=error,
                num_input_tokens=self.num_prompt,
                num_output_tokens=self.num_output,
                log_probs=log_probs,
                cum_log_probs=self._cum_log_probs,
                stats=self.stats() if self.ended else {},
            )
        )

    def stats(self) -> dict[str, float]:
        """What the final output reports besides the text."""
        now = time.monotonic()
        return {
            "num_rounds": self.num_rounds,
            "num_drafted_tokens": self.num_drafted,
            "num_verified_draft_tokens": self.num_verified,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_preemptions": self.num_preemptions,
            "time_in_queue_s": (self.admitted_s or now) - self.arrival_s,
            "num_cached_tokens": self.num_cached,
            "time_to_first_token_s": (self.first_token_s or now) - self.arrival_s,
            "total_time_s": now - self.arrival_s,
        }
