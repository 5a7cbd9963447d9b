"""Batched generation against plain decoding, and data that resumes where it stopped."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.request import InvalidRequest
from tests.training.tiny import EOS, VOCAB, greedy_answer
from training.data import ChatFormat, DataConfig, generate_data, make_job
from training.exercises import function_stub
from training.generate import GenerationRequest, RuntimeEngine
from training.prompts import template_prompt
from training.store import read_store, store_paths


class FakeTokenizer:
    """One token a character, folded into the tiny vocabulary; '#' ends a message."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return f"S:{messages[0]['content']}#A:"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [EOS if c == "#" else 4 + ord(c) % (VOCAB - 4) for c in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + i % 26) for i in ids if i != EOS)


class FakeEngine:
    """Answers as a function of the request alone; can break down after some answers."""

    eos_token_ids = frozenset([EOS])

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.answered = 0

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, list[int]]]:
        order = np.random.default_rng(0).permutation(len(requests))
        for index in order.tolist():
            if self.answered >= self.limit:
                raise ConnectionError
            self.answered += 1
            request = requests[index]
            rng = np.random.default_rng((request.seed, len(request.prompt_ids)))
            count = min(request.max_tokens, int(rng.integers(1, 9)))
            yield index, [*rng.integers(4, VOCAB, size=count).tolist(), EOS]


def test_engine_equals_plain_greedy_decoding(tiny_build: Path) -> None:
    """More requests than slots, unequal prompts with a common start: refills happen."""
    model = AutoModelForCausalLM.from_pretrained(tiny_build / "hf", dtype=torch.float32).eval()
    rng = np.random.default_rng(1)
    prompts = [(7, 8, 9, *rng.integers(4, 300, size=n).tolist()) for n in (1, 5, 3, 9, 2, 4, 6)]
    limits = [9, 3, 12, 1, 7, 10, 2]
    engine = RuntimeEngine(tiny_build, slots=3, max_tokens=32)
    wanted = [
        greedy_answer(model, list(p), m, engine.eos_token_ids)
        for p, m in zip(prompts, limits, strict=True)
    ]
    requests = [GenerationRequest(p, 0.0, 0, m) for p, m in zip(prompts, limits, strict=True)]
    for _ in range(2):  # the second call finds the pool used
        got = dict(engine.generate(requests))
        assert [got[i] for i in range(len(prompts))] == wanted
    with pytest.raises(InvalidRequest, match="32"):
        list(engine.generate([GenerationRequest((5,) * 30, 0.0, 0, 3)]))
    engine.close()


def test_engine_sampling_follows_the_seed(tiny_build: Path) -> None:
    engine = RuntimeEngine(tiny_build, slots=4, max_tokens=8)
    requests = [GenerationRequest((5, 6), 1.0, seed, 4) for seed in range(12)]
    first = dict(engine.generate(requests))
    assert first == dict(engine.generate(requests))
    assert len({tuple(output) for output in first.values()}) > 6
    engine.close()


def test_data_resumes_with_the_same_jobs(tmp_path: Path) -> None:
    """An interrupted run ends with the same set of sequences as one that was not."""
    config = DataConfig(num_tokens=1500, max_prompt_tokens=400, jobs_per_chunk=16)
    chat = ChatFormat(FakeTokenizer())

    def rows(stem: Path) -> dict[int, list[int]]:
        store = read_store(stem)
        out = {}
        for index, meta in enumerate(store.metas):
            assert meta.job is not None
            assert meta.job not in out, "a job was done twice"
            out[meta.job] = store.sequence(index).tolist()
        return out

    generate_data(tmp_path / "whole", config, chat, FakeEngine())
    for _ in range(100):
        try:
            generate_data(tmp_path / "parts", config, chat, FakeEngine(limit=14))
            break
        except ConnectionError:
            continue
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    common = whole.keys() & parts.keys()
    assert len(common) > 0.8 * len(whole)
    assert all(whole[job] == parts[job] for job in common)
    meta_line = store_paths(tmp_path / "whole")[1].read_text().splitlines()[0]
    assert set(json.loads(meta_line)) == {"n", "a", "t", "mag", "done", "job"}


def test_jobs_have_the_asked_mix_and_no_eval_wrappers() -> None:
    config = DataConfig()
    jobs = [make_job(config, number) for number in range(2000)]
    assert jobs[17] == make_job(config, 17)
    assert np.mean([job.message is None for job in jobs]) == pytest.approx(0.45, abs=0.04)
    assert np.mean([job.temperature == 0 for job in jobs]) == pytest.approx(0.46, abs=0.04)
    rng = np.random.default_rng(0)
    texts = [template_prompt(rng) for _ in range(1000)]
    assert len(set(texts)) > 950
    for text in texts:
        assert not re.search(r"{(names|things|topics|[abc])\d*}", text), (
            "a form that was not filled"
        )
        for wrapper in ("final answer within", "passes the tests", "boxed", "reason step by step"):
            assert wrapper not in text


def test_exercises_are_python_and_their_examples_are_right() -> None:
    rng = np.random.default_rng(0)
    stubs = [function_stub(rng) for _ in range(2000)]
    for stub in stubs[:200]:
        ast.parse(f"{stub}\n    pass")
    examples = re.findall(r">>> even_sum\((.*)\)\n    (.*)", "\n".join(stubs))
    assert examples
    for given, answer in examples:
        numbers = ast.literal_eval(given)
        assert ast.literal_eval(answer) == sum(n for n in numbers if n % 2 == 0)
