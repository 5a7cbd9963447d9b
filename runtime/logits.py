"""What a request does to the verifier's logits before its token is chosen: penalties, bias, bans.

The order is repetition penalty, presence and frequency penalty, bias, bans; temperature and filters
follow (`runtime.sampling`). Row i of a round sees the committed tokens and the i draft tokens
before it, which are accepted wherever that row is used: so the distribution is that of plain
decoding, whatever was drafted. The draft itself is not penalised; its q stays what was sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.request import Request

BANNED = np.float32(-1e30)  # finite: where everything is banned something must still be chosen
TokenIds = tuple[int, ...]


class LogitsProcessor:
    """One request's rules and the tokens that they look back on."""

    def __init__(
        self,
        request: Request,
        end_ids: Collection[int],
        banned: Sequence[TokenIds],
        vocab_size: int,
    ) -> None:
        """Prepare the rules of `request`.

        Args:
            request: gives penalties, bias and min_tokens.
            end_ids: tokens that end the answer; banned before `min_tokens`.
            banned: token sequences that may not be generated.
            vocab_size: V.
        """
        self._request = request
        self._end_ids = np.array(sorted(end_ids), np.int64)
        self._banned = banned
        self._longest = max((len(word) for word in banned), default=1)
        self._in_prompt = np.zeros(vocab_size, bool)
        self._in_prompt[list(request.prompt_ids)] = True
        self._counts = np.zeros(vocab_size, np.int32)  # of each token in the output
        self._output: list[int] = []
        self._bias_ids = np.array([i for i, _ in request.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in request.logit_bias], np.float32)

    def observe(self, token_id: int) -> None:
        """Take note of a generated token."""
        self._counts[token_id] += 1
        self._output.append(token_id)

    def process(
        self, logits: NDArray[np.float32], draft_ids: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The logits that tokens are chosen by, [l + 1, V]; the arguments stay as they are.

        Args:
            logits: [l + 1, V] of the verifier; row i follows the anchor and i draft tokens.
            draft_ids: [l] the draft tokens.
        """
        processed = logits.copy()
        counts = self._counts.copy()
        recent = self._output[-self._longest :]
        for row, values in enumerate(processed):
            if row:
                counts[draft_ids[row - 1]] += 1
                recent.append(int(draft_ids[row - 1]))
            self._penalise(values, counts)
            values[self._bias_ids] += self._biases
            for word in self._banned:
                if tuple(recent[len(recent) - len(word) + 1 :]) == word[:-1]:
                    values[word[-1]] = BANNED
            if len(self._output) + row < self._request.min_tokens:
                values[self._end_ids] = BANNED
        return processed

    def _penalise(self, values: NDArray[np.float32], counts: NDArray[np.int32]) -> None:
        request = self._request
        if request.repetition_penalty != 1:
            seen = np.flatnonzero(self._in_prompt | (counts > 0))
            penalty, scores = np.float32(request.repetition_penalty), values[seen]
            values[seen] = np.where(scores > 0, scores / penalty, scores * penalty)
        if request.presence_penalty or request.frequency_penalty:
            used = np.flatnonzero(counts)
            values[used] -= np.float32(request.presence_penalty)
            values[used] -= np.float32(request.frequency_penalty) * counts[used].astype(np.float32)


def processor_for(
    request: Request, tokenizer: Any, end_ids: Collection[int], vocab_size: int
) -> LogitsProcessor | None:
    """The request's processor; None for one that leaves the logits alone.

    A bad word is banned as the tokens it has at the start of a text and after a space.
    """
    banned = {
        tuple(tokenizer.encode(prefix + word))
        for word in request.bad_words
        for prefix in ("", "" if word.startswith(" ") else " ")
    }
    if not (
        banned
        or request.logit_bias
        or request.repetition_penalty != 1
        or request.presence_penalty
        or request.frequency_penalty
        or (request.min_tokens and end_ids)
    ):
        return None
    return LogitsProcessor(request, end_ids, sorted(filter(None, banned)), vocab_size)


def log_probs(logits: NDArray[np.float32], token_ids: Sequence[int]) -> list[float]:
    """Log-probability of each token under the softmax of its row.

    Args:
        logits: [n, V] processed, before temperature and filters.
        token_ids: [n].
    """
    rows = logits[: len(token_ids)].astype(np.float64)
    shifted = rows - rows.max(axis=-1, keepdims=True)
    totals = np.log(np.exp(shifted).sum(axis=-1))
    return (shifted[np.arange(len(token_ids)), token_ids] - totals).tolist()
