"""``dspark train-data``: the target's own answers to self-made prompts.

Job i is a function of (seed, i) alone: its kind, prompt, temperature and noise. Some user messages
come from templates, the others are invented by the target itself, which continues the user header
of its chat template. Every finished answer is appended to the store with its job number, so an
interrupted command goes on where it stopped. Nothing here knows how an engine works.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training.generate import GenerationEngine, GenerationRequest
from training.prompts import template_prompt
from training.store import SequenceMeta, StoreWriter, store_paths

SENTINEL = "DSPARKUSERMESSAGE"


class DataError(ValueError):
    """The data cannot be generated as asked."""


@dataclass(frozen=True)
class DataConfig:
    """What to generate. Shares are of all jobs; what is not greedy is half at 0.7, half at 1.0."""

    num_tokens: int = 550_000
    max_prompt_tokens: int = 256
    max_answer_tokens: int = 320
    invented_share: float = 0.45
    greedy_share: float = 0.46
    max_message_tokens: int = 96
    jobs_per_chunk: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("invented_share", "greedy_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"{name} must be 0..1, got {getattr(self, name)}")
        for name in ("num_tokens", "max_prompt_tokens", "max_answer_tokens", "jobs_per_chunk"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Job:
    """One chat to make. ``message`` is None where the target is to invent it."""

    number: int
    message: str | None
    temperature: float
    seed: int


def make_job(config: DataConfig, number: int) -> Job:
    """Job ``number``, always the same for the same seed."""
    rng = np.random.default_rng((config.seed, number))
    invented = rng.random() < config.invented_share
    greedy = rng.random() < config.greedy_share
    temperature = 0.0 if greedy else (0.7, 1.0)[int(rng.integers(2))]
    message = None if invented else template_prompt(rng)
    return Job(number, message, temperature, int(rng.integers(1 << 31)))


class ChatFormat:
    """The target's chat template, as token ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": SENTINEL}], tokenize=False, add_generation_prompt=True
        )
        if text.count(SENTINEL) != 1:
            raise DataError("the chat template does not show the user's message exactly once")
        self._before, self._after = text.split(SENTINEL)

    @property
    def user_header(self) -> tuple[int, ...]:
        """Everything before the first user message: what the target continues to invent one."""
        return self._ids(self._before)

    def prompt(self, message: str) -> tuple[int, ...]:
        """The whole prompt for ``message``, up to where the answer begins."""
        return self._ids(self._before + message + self._after)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an invented message, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True)).strip()

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def finished_jobs(stem: Path) -> set[int]:
    """Numbers of the jobs whose answers are in the store ``stem``."""
    meta_path = store_paths(stem)[1]
    if not meta_path.is_file():
        return set()
    lines = meta_path.read_text(encoding="utf-8").split("\n")[:-1]
    return {job for job in (json.loads(line).get("job") for line in lines) if job is not None}


def invent_messages(
    jobs: Iterable[Job], config: DataConfig, chat: ChatFormat, engine: GenerationEngine
) -> dict[int, str]:
    """Let the target write the messages of ``jobs``: job number -> message; bad ones are missing.

    A message is bad if it is empty or did not end by itself.
    """
    wanted = list(jobs)
    header = chat.user_header
    requests = [
        # Temperature 1 always: a greedy target would invent one message again and again.
        GenerationRequest(header, 1.0, job.seed ^ 1, config.max_message_tokens)
        for job in wanted
    ]
    messages: dict[int, str] = {}
    for index, output in engine.generate(requests):
        text = chat.decode(output)
        if output[-1] in engine.eos_token_ids and text:
            messages[wanted[index].number] = text
    return messages


def generate_data(
    stem: Path,
    config: DataConfig,
    chat: ChatFormat,
    engine: GenerationEngine,
    progress: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Append answers to the store ``stem`` until it holds ``config.num_tokens`` tokens.

    Returns the number of tokens in the store. ``progress`` gets the tokens of each new sequence.
    """
    done = finished_jobs(stem)
    chunk = 0
    with StoreWriter(stem) as writer:
        progress(writer.num_tokens)
        while writer.num_tokens < config.num_tokens:
            first = chunk * config.jobs_per_chunk
            numbers = range(first, first + config.jobs_per_chunk)
            chunk += 1
            jobs = [make_job(config, number) for number in numbers if number not in done]
            if not jobs:
                continue
            invented = invent_messages(
                [job for job in jobs if job.message is None], config, chat, engine
            )
            asked: list[tuple[Job, GenerationRequest]] = []
            for job in jobs:
                message = job.message if job.message is not None else invented.get(job.number)
                ids = chat.prompt(message) if message else ()
                if ids and len(ids) <= config.max_prompt_tokens:
                    asked.append(
                        (
                            job,
                            GenerationRequest(
                                ids, job.temperature, job.seed, config.max_answer_tokens
                            ),
                        )
                    )
            for index, output in engine.generate([request for _, request in asked]):
                job, request = asked[index]
                ids = request.prompt_ids + tuple(output)
                writer.append(
                    ids,
                    SequenceMeta(
                        n=len(ids),
                        a=len(request.prompt_ids),
                        t=job.temperature,
                        mag=job.message is None,
                        done=output[-1] in engine.eos_token_ids,
                        job=job.number,
                    ),
                )
                progress(len(ids))
                if writer.num_tokens >= config.num_tokens:
                    break
        return writer.num_tokens
