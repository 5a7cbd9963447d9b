"""The embedded model: through the real server as a user meets it, and beside transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.prompts import run_requests
from runtime.config import RuntimeConfig
from runtime.decoder import Model
from runtime.request import validate_request
from tests.triton_repo.clients import GrpcStream, free_address, generate, metrics
from triton_repo.package import package
from triton_repo.server import TritonServer

pytestmark = pytest.mark.slow

PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that reverses a list.",
    "Name three colours and say what each of them reminds you of.",
)
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def model(embedded_build: Path) -> Iterator[Model]:
    model = Model(
        embedded_build / "engines", embedded_build / "hf", RuntimeConfig(max_batch_requests=4)
    )
    yield model
    model.close()


def test_greedy_tokens_are_those_of_transformers(model: Model, embedded_build: Path) -> None:
    """Alone and in a batch that requests join, under plain and speculative decoding."""
    import torch
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(embedded_build / "hf", dtype=torch.float32)
    prompts = [model.tokenizer.encode_prompt(p, False, 1000) for p in PROMPTS]
    expected = []
    for ids in prompts:
        out = peer.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
        expected.append(out[0, len(ids) :].tolist())
    requests = [
        validate_request({"prompt_ids": ids, "max_tokens": MAX_TOKENS}, model.limits)
        for ids in prompts
    ]
    for policy in ("off", "fixed"):
        alone = [run_requests(model.make_loop(policy), [request])[0] for request in requests]
        assert alone == expected, policy
        joined = run_requests(model.make_loop(policy), requests, random.Random(0))
        assert joined == expected, policy


def test_the_server_answers_a_question(embedded_build: Path) -> None:
    package(embedded_build)
    with TritonServer(embedded_build / "repository", embedded_build, free_address()) as server:
        reply = generate(server.address, text_input=PROMPTS[0], max_tokens=MAX_TOKENS)
        assert "Paris" in reply["text_output"]
        assert reply["finish_reason"] == "eos"
        with GrpcStream(server.address) as stream:
            streamed = stream.ask(text_input=PROMPTS[0], max_tokens=MAX_TOKENS, stream=True)
        assert streamed.text == reply["text_output"]
        assert streamed.num_output_tokens == reply["num_output_tokens"]
        assert metrics(server.address)["requests_total"] >= 1
