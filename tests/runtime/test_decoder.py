"""The decoder's thread: every request ends once, whatever fails, and health tells the truth."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from runtime import decoder as decoder_module
from runtime.config import MIB, ConfigError, RuntimeConfig
from runtime.decoder import (
    MAX_FAILED_STEPS,
    MEMORY_RESERVE_BYTES,
    Decoder,
    _cache_blocks,
    _capacity,
)
from runtime.manifest import Artifact
from runtime.request import QueueFull, RequestOutput
from tests.runtime.fakes import (
    BLOCK_TOKENS,
    Collector,
    FakeVerifier,
    greedy_reference,
    make_loop,
    make_request,
    manifest,
)

WAIT_S = 20.0


class FakeModel:
    """A `Model` over fake engines."""

    options: dict[str, Any] = {}  # noqa: RUF012
    verifier: FakeVerifier

    def __init__(self, *_: Any) -> None:
        self.loop, FakeModel.verifier = make_loop(**self.options)
        self.closed = False

    def make_loop(self) -> Any:
        return self.loop

    def close(self) -> None:
        self.closed = True


class Waiter(Collector):
    """A collector that other threads can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Event()
        self.first = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        super().__call__(output)
        self.first.set()
        if self.done:
            self._ended.set()

    def wait(self) -> RequestOutput:
        assert self._ended.wait(WAIT_S), "the request did not end"
        return self.final


@pytest.fixture
def make_decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Decoder] = []

    def make(**options: Any) -> Decoder:
        monkeypatch.setattr(decoder_module, "Model", FakeModel)
        FakeModel.options = options
        made.append(Decoder(None, None, RuntimeConfig(**options)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for decoder in made:
        decoder.close()


def test_requests_from_many_threads_all_end_with_their_own_text(make_decoder: Any) -> None:
    decoder = make_decoder(max_batch_requests=4)
    prompts = [(1 + i % 7, 2 + i % 5, 1 + i % 11) for i in range(60)]
    waiters = [Waiter() for _ in prompts]

    def send(index: int) -> None:
        request = make_request(prompts[index], max_tokens=12, ignore_eos=True)
        decoder.submit(request, waiters[index])

    threads = [threading.Thread(target=send, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for prompt, waiter in zip(prompts, waiters, strict=True):
        waiter.wait()
        assert waiter.token_ids == greedy_reference(prompt, 12, False)
    metrics = decoder.metrics()
    assert metrics["kv_blocks_free"] == metrics["kv_blocks"]
    assert metrics["requests_total"] == len(prompts)


def test_cancel_ends_a_running_request_and_leaves_others_alone(make_decoder: Any) -> None:
    decoder = make_decoder()
    other, cancelled = Waiter(), Waiter()
    decoder.submit(make_request((2, 3), max_tokens=100, ignore_eos=True), other)
    request = make_request((1, 2), max_tokens=190, ignore_eos=True, stream=True)
    request_id = decoder.submit(request, cancelled)
    assert cancelled.first.wait(WAIT_S)
    decoder.cancel(request_id)
    assert cancelled.wait().finish_reason in ("cancelled", "length")
    assert other.wait().finish_reason == "length"
    decoder.cancel(request_id)  # ended already: nothing happens
    metrics = decoder.metrics()
    assert metrics["kv_blocks_free"] == metrics["kv_blocks"]


def test_a_failing_step_ends_its_requests_and_the_next_ones_work(make_decoder: Any) -> None:
    decoder = make_decoder()
    failing, good = Waiter(), Waiter()
    FakeModel.verifier.fail_next = True
    decoder.submit(make_request((1, 2), max_tokens=5), failing)
    final = failing.wait()
    assert final.finish_reason == "error"
    assert final.error is not None
    assert "engine failure on demand" in final.error
    decoder.submit(make_request((1, 2), max_tokens=5, ignore_eos=True), good)
    assert good.wait().finish_reason == "length"
    assert decoder.is_healthy()


def test_an_engine_that_keeps_failing_is_unhealthy(make_decoder: Any) -> None:
    decoder = make_decoder()
    for _ in range(MAX_FAILED_STEPS):
        assert decoder.is_healthy()
        FakeModel.verifier.fail_next = True
        waiter = Waiter()
        decoder.submit(make_request((1, 2), max_tokens=5), waiter)
        waiter.wait()
        _settle(decoder)
    assert not decoder.is_healthy()


def _settle(decoder: Decoder) -> None:
    """Wait until the loop's thread has finished the step whose outputs have arrived."""
    deadline_s = time.monotonic() + WAIT_S
    while decoder._sequences and time.monotonic() < deadline_s:
        time.sleep(0.001)


def test_a_loop_that_does_not_come_back_is_unhealthy(
    make_decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder(stall_timeout_s=0.05)
    release, waiter = threading.Event(), Waiter()
    run = FakeModel.verifier.run

    def stuck(inputs: Any) -> Any:
        release.wait(WAIT_S)
        return run(inputs)

    monkeypatch.setattr(FakeModel.verifier, "run", stuck)
    decoder.submit(make_request((1, 2), max_tokens=1), waiter)
    time.sleep(0.2)
    healthy = decoder.is_healthy()
    release.set()
    waiter.wait()
    _settle(decoder)
    assert not healthy
    assert decoder.is_healthy()  # idle again


def test_a_request_over_its_time_ends_with_the_limit(make_decoder: Any) -> None:
    decoder = make_decoder(request_timeout_s=0.001, max_batch_requests=1)
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        request = make_request((1, 2), max_tokens=190, ignore_eos=True)
        decoder.submit(request, waiter)
    final = waiters[-1].wait()
    assert final.finish_reason == "timeout"
    assert final.error is not None
    assert "0.001 s" in final.error


def test_a_full_queue_refuses_with_its_limit(make_decoder: Any) -> None:
    decoder = make_decoder(max_queued_requests=1, max_batch_requests=1)
    waiters: list[Waiter] = []
    with pytest.raises(QueueFull, match="limit of 1 requests"):  # noqa: PT012
        for _ in range(500):
            waiters.append(Waiter())
            decoder.submit(make_request((1, 2), max_tokens=190, ignore_eos=True), waiters[-1])
    waiters[0].wait()


def test_closing_ends_everything_and_refuses_the_rest(make_decoder: Any) -> None:
    decoder = make_decoder(max_batch_requests=1)
    waiters = [Waiter() for _ in range(5)]
    for waiter in waiters:
        decoder.submit(make_request((1, 2), max_tokens=190, ignore_eos=True), waiter)
    decoder.close()
    assert all(waiter.done for waiter in waiters)
    with pytest.raises(QueueFull, match="shutting down"):
        decoder.submit(make_request((1, 2), max_tokens=1), Waiter())
    decoder.close()


def test_a_callback_that_fails_cancels_only_its_own_request(make_decoder: Any) -> None:
    decoder = make_decoder()
    other = Waiter()

    def broken(output: RequestOutput) -> None:
        raise RuntimeError("the client's trouble")

    decoder.submit(make_request((1, 2), max_tokens=50, ignore_eos=True, stream=True), broken)
    decoder.submit(make_request((2, 3), max_tokens=20, ignore_eos=True), other)
    assert other.wait().finish_reason == "length"
    assert decoder.is_healthy()


def test_capacity_leaves_room_for_a_block_of_drafts() -> None:
    """One request of the longest length must fit with the drafts of its last round."""
    config = RuntimeConfig(kv_cache_mb=1, max_batch_requests=2)
    num_blocks, longest = _capacity(manifest(), config)
    assert longest == manifest().verifier.max_positions
    assert num_blocks * 4 >= longest + manifest().drafter.block_size  # type: ignore[union-attr]


def test_capacity_refuses_more_than_the_model_has() -> None:
    with pytest.raises(ConfigError, match="200 tokens, got 201"):
        _capacity(manifest(), RuntimeConfig(max_model_tokens=201))


def test_the_prefix_cache_takes_what_is_asked_for_or_what_is_free() -> None:
    """Weights and the running requests' blocks come first, and a reserve stays."""
    weights = Artifact("verifier.onnx", 5000, "")
    described = replace(manifest(), artifacts={"verifier": weights})
    block_bytes = BLOCK_TOKENS * 2 * 16  # both pools
    asked = RuntimeConfig(prefix_cache_mb=1)
    taken = 5000 + 10 * block_bytes + MEMORY_RESERVE_BYTES
    for free, blocks in (
        (1 << 40, MIB // block_bytes),
        (taken + 7 * block_bytes, 7),
        (taken + 7 * block_bytes - 1, 6),
        (taken, 0),
        (0, 0),
    ):
        assert _cache_blocks(described, asked, 10, free) == blocks
    assert _cache_blocks(described, RuntimeConfig(prefix_cache_mb=0), 10, 1 << 40) == 0
