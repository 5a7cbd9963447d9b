"""Batched text generation for training data, on the decoder that serves: `runtime.loop`.

Plain decoding with continuous batching; a finished request makes room for the next at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from runtime.config import RuntimeConfig
from runtime.decoder import Model
from runtime.request import RequestOutput, validate_request

MAX_KV_MB = 1 << 20  # the slots and the longest text bound the pool, nothing else


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

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, list[int]]]:
        """Yield (index into ``requests``, output ids), each once, in the order they finish."""


class RuntimeEngine:
    """The built model in ``folder`` (``build/<name>``), ``slots`` texts of at most ``max_tokens``.

    Raises what `runtime.decoder.Model` raises.
    """

    def __init__(self, folder: Path, slots: int, max_tokens: int, threads: int = 0) -> None:
        config = RuntimeConfig(
            max_batch_requests=slots,
            max_model_tokens=max_tokens,
            kv_cache_mb=MAX_KV_MB,
            prefix_cache_mb=0,  # prompts share nothing
            num_threads=threads,
            policy="off",
        )
        self._model = Model(folder / "engines", folder / "hf", config)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        return frozenset(self._model.manifest.eos_token_ids)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, list[int]]]:
        """Yield (index, output ids) as requests finish. Raises InvalidRequest for a bad one."""
        loop = self._model.make_loop()
        finished: list[tuple[int, list[int]]] = []

        def collect(index: int, output: RequestOutput) -> None:
            finished.append((index, output.token_ids))  # unstreamed: all of it, once

        for index, wanted in enumerate(requests):
            fields = {**wanted._asdict(), "acceptance": "rejection"}
            request = validate_request(fields, self._model.limits)
            loop.add(request, partial(collect, index))
        while loop.has_work:
            loop.step()
            yield from finished
            finished.clear()

    def close(self) -> None:
        """Free the engine; may be called again."""
        self._model.close()
