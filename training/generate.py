"""Batched text generation for training data, behind a protocol of one function.

Any engine that can answer many requests at once will do; ``TorchEngine`` is the one that is always
there: plain transformers, a fixed number of slots, each refilled as soon as its request ends.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

ATTENTION_NAME = "dspark_slots"


class GenerationRequest(NamedTuple):
    """One text to write: target ids of the prompt, sampling temperature (0 = argmax), seed, limit.

    The output stops after an end-of-sequence id (which is part of it) or at ``max_tokens``.
    """

    prompt_ids: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int


class GenerationEngine(Protocol):
    """Writes texts for many requests at once."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, list[int]]]:
        """Yield (index into ``requests``, output ids), each once, in the order they finish."""
        ...


class SlotCache:
    """Keys and values of all slots; handed to the model in place of transformers' own cache.

    One tensor [slots, kv heads, tokens, head size] for keys and one for values per layer. ``rows``
    and ``positions`` say where the tokens of the coming forward pass go.
    """

    def __init__(self, config: Any, slots: int, max_tokens: int, device: torch.device) -> None:
        heads = int(config.num_key_value_heads)
        size = int(
            getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
        )
        shape = (int(config.num_hidden_layers), slots, heads, max_tokens, size)
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)
        self.rows = slice(0, 0)
        self.positions = torch.zeros(0, 0, dtype=torch.int64)
        self.visible = 0

    def aim(self, rows: slice, positions: Tensor) -> None:
        """The coming pass writes ``rows`` at ``positions`` [rows, tokens] and reads up to them."""
        self.rows, self.positions = rows, positions
        self.visible = int(positions.max()) + 1

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *unused: Any, **also: Any
    ) -> tuple[Tensor, Tensor]:
        """Store ``key`` and ``value`` [rows, kv heads, tokens, D]; return all that is visible."""
        keys, values = self.keys[layer_idx, self.rows], self.values[layer_idx, self.rows]
        row_index = torch.arange(keys.shape[0], device=key.device)[:, None]
        keys[row_index, :, self.positions] = key.transpose(1, 2)
        values[row_index, :, self.positions] = value.transpose(1, 2)
        return keys[:, :, : self.visible], values[:, :, : self.visible]

    def move(self, source: int, destination: int) -> None:
        """Copy one slot over another."""
        self.keys[:, destination] = self.keys[:, source]
        self.values[:, destination] = self.values[:, source]


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention that never repeats keys for grouped heads: the copies cost more than the products.

    ``query`` [B, heads, n, D], ``key`` and ``value`` [B, kv heads, T, D], ``attention_mask``
    [B, 1, n, T] additive. Returns [B, n, heads, D].
    """
    rows, heads, n, size = query.shape
    kv = key.shape[1]
    grouped = query.view(rows, kv, heads // kv, n, size) * scaling
    scores = grouped.flatten(2, 3) @ key.transpose(2, 3)
    scores = scores.view(rows, kv, heads // kv, n, -1) + attention_mask[:, :, None]
    out = scores.softmax(dim=-1).flatten(2, 3) @ value
    return out.view(rows, heads, n, size).transpose(1, 2), None


@dataclass
class _Slot:
    """One request in flight."""

    index: int
    request: GenerationRequest
    length: int  # tokens in the cache
    next_id: int
    output: list[int]
    noise: np.random.Generator


class TorchEngine:
    """Continuous batching on plain transformers.

    ``max_tokens`` bounds prompt plus output of a request. The longest common prefix of all prompts
    of one call is computed once and shared, since chats begin with the same system message.
    """

    def __init__(
        self,
        model: nn.Module,
        eos_token_ids: frozenset[int],
        slots: int = 32,
        max_tokens: int = 512,
    ) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, slot_attention)
        model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
        self.model = model.eval()
        self.config: Any = model.config
        self.eos_token_ids = eos_token_ids
        self.slots = slots
        self.max_tokens = max_tokens
        self.device = next(model.parameters()).device
        self.cache = SlotCache(self.config, slots, max_tokens, self.device)

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, list[int]]]:
        """Yield (index, output ids) as requests finish."""
        for index, request in enumerate(requests):
            total = len(request.prompt_ids) + request.max_tokens
            if not request.prompt_ids or request.max_tokens < 1 or total > self.max_tokens:
                raise ValueError(
                    f"request {index} has {len(request.prompt_ids)} prompt tokens and max_tokens "
                    f"{request.max_tokens}: each must be at least 1, together at most "
                    f"{self.max_tokens}"
                )
        if not requests:
            return
        prefix = common_prefix([request.prompt_ids for request in requests])
        if prefix:
            self._forward(slice(0, 1), torch.tensor([prefix]), torch.arange(len(prefix))[None])
            for row in range(1, min(self.slots, len(requests))):
                self.cache.keys[:, row, :, : len(prefix)] = self.cache.keys[:, 0, :, : len(prefix)]
                self.cache.values[:, row, :, : len(prefix)] = self.cache.values[
                    :, 0, :, : len(prefix)
                ]
        active: list[_Slot] = []
        waiting = iter(enumerate(requests))
        while True:
            while len(active) < self.slots:
                item = next(waiting, None)
                if item is None:
                    break
                active.append(self._admit(len(active), item[0], item[1], len(prefix)))
            if not active:
                return
            # From the end, so that moving the last slot into a hole never skips one.
            for row in reversed(range(len(active))):
                slot = active[row]
                if self._finished(slot):
                    yield slot.index, slot.output
                    last = active.pop()
                    if last is not slot:
                        self.cache.move(len(active), row)
                        active[row] = last
            if active:
                self._decode(active)

    def _finished(self, slot: _Slot) -> bool:
        return slot.output[-1] in self.eos_token_ids or len(slot.output) >= slot.request.max_tokens

    def _admit(self, row: int, index: int, request: GenerationRequest, shared: int) -> _Slot:
        """Prefill one request into ``row`` and draw its first token."""
        # At least one token is computed: its logits are needed.
        ids = request.prompt_ids[shared:] if shared < len(request.prompt_ids) else ()
        start = len(request.prompt_ids) - max(1, len(ids))
        tokens = torch.tensor([request.prompt_ids[start:]])
        positions = torch.arange(start, len(request.prompt_ids))[None]
        logits = self._forward(slice(row, row + 1), tokens, positions)
        slot = _Slot(
            index=index,
            request=request,
            length=len(request.prompt_ids),
            next_id=-1,
            output=[],
            noise=np.random.default_rng(request.seed),
        )
        self._draw([slot], logits)
        return slot

    def _decode(self, active: Sequence[_Slot]) -> None:
        """One token for every slot in flight."""
        tokens = torch.tensor([[slot.next_id] for slot in active])
        positions = torch.tensor([[slot.length] for slot in active])
        logits = self._forward(slice(0, len(active)), tokens, positions)
        for slot in active:
            slot.length += 1
        self._draw(active, logits)

    def _forward(self, rows: slice, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [rows, V] of the last of ``tokens`` [rows, n] at ``positions`` [rows, n]."""
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        self.cache.aim(rows, positions)
        reach = torch.arange(self.cache.visible, device=self.device)
        hidden = reach > positions[:, :, None]
        mask = torch.zeros(hidden.shape, device=self.device).masked_fill(hidden, -math.inf)
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask[:, None],
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _draw(self, slots: Sequence[_Slot], logits: Tensor) -> None:
        """Choose the next token of every slot: argmax, or inverse CDF with the slot's own noise."""
        best = logits.argmax(dim=-1).tolist()
        for row, slot in enumerate(slots):
            token = int(best[row])
            if slot.request.temperature > 0:
                probs = torch.softmax(logits[row].double() / slot.request.temperature, dim=-1)
                reached = probs.cumsum(dim=-1)
                point = slot.noise.random() * float(reached[-1])
                token = min(int(torch.searchsorted(reached, point, right=True)), len(probs) - 1)
            slot.next_id = token
            slot.output.append(token)


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Longest common prefix of ``sequences``."""
    low, high = min(sequences), max(sequences)
    length = 0
    while length < min(len(low), len(high)) and low[length] == high[length]:
        length += 1
    return low[:length]
