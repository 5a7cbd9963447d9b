"""The bridge on a decoder and senders without Triton: who gets what, exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from runtime.request import (
    InvalidRequest,
    QueueFull,
    Request,
    RequestLimits,
    RequestOutput,
)
from triton_repo.bridge import Answer, Bridge, Failure, read_fields

MAX_PROMPT_BYTES = 100


class FakeTokenizer:
    def encode_prompt(self, text: bytes, raw_prompt: bool, max_bytes: int) -> list[int]:
        if not text:
            raise InvalidRequest("the prompt is empty")
        assert max_bytes == MAX_PROMPT_BYTES
        return list(text) if raw_prompt else [0, *text]

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


class FakeDecoder:
    """Hands requests to the test, which plays the loop by calling `emit`."""

    def __init__(self) -> None:
        self.limits = RequestLimits(256, 50, 4, 8, 16)
        self.tokenizer = FakeTokenizer()
        self.requests: dict[int, tuple[Request, Callable[[RequestOutput], None]]] = {}
        self.cancelled: list[int] = []
        self.healthy = True
        self.refusal: Exception | None = None

    def submit(self, request: Request, on_output: Callable[[RequestOutput], None]) -> int:
        if self.refusal is not None:
            raise self.refusal
        request_id = len(self.requests) + 1
        self.requests[request_id] = (request, on_output)
        return request_id

    def emit(
        self,
        request_id: int,
        text: str,
        finish: Any = None,
        error: str | None = None,
        **extra: Any,
    ) -> None:
        request, on_output = self.requests[request_id]
        ids = list(text.encode())
        on_output(
            RequestOutput(
                text=text,
                token_ids=ids,
                origins=[],
                finish_reason=finish,
                error=error,
                num_input_tokens=len(request.prompt_ids),
                num_output_tokens=len(ids),
                cum_log_probs=sum(extra.get("log_probs", [])),
                **extra,
            )
        )

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def is_healthy(self) -> bool:
        return self.healthy

    def close(self) -> None:
        for request_id in self.requests:
            self.emit(request_id, "", "cancelled")


class FakeSender:
    def __init__(self, gate: threading.Event | None = None) -> None:
        self.messages: list[Answer | Failure] = []
        self.finals = 0
        self.cancelled = False
        self.entered = threading.Event()
        self._gate = gate

    def send(self, message: Answer | Failure, final: bool) -> None:
        assert self.finals == 0, "a response after the final one"
        self.entered.set()
        if self._gate is not None:
            assert self._gate.wait(5)
        self.messages.append(message)
        self.finals += final

    def is_cancelled(self) -> bool:
        return self.cancelled

    @property
    def texts(self) -> list[str]:
        return [m.text_output for m in self.messages if isinstance(m, Answer)]


@contextmanager
def running_bridge(decoder: FakeDecoder, **hooks: Callable[[], None]) -> Iterator[Bridge]:
    callbacks: dict[str, Callable[[], None]] = {"on_tick": int, "on_death": int, **hooks}
    bridge = Bridge(decoder, MAX_PROMPT_BYTES, **callbacks)  # type: ignore[arg-type]
    yield bridge
    decoder.requests.clear()
    bridge.close()


def tensors(**values: Any) -> dict[str, np.ndarray]:
    """Values as Triton delivers them: one row, strings as bytes."""

    def array(value: Any) -> np.ndarray:
        row = value if isinstance(value, list) else [value]
        row = [item.encode() if isinstance(item, str) else item for item in row]
        if row and isinstance(row[0], bytes):
            return np.array([row], dtype=object)
        if row and isinstance(row[0], float):
            return np.array([row], dtype=np.float32)
        return np.array([row])

    return {name: array(value) for name, value in values.items()}


def eventually(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen within 5 s"
        time.sleep(0.002)


def test_read_fields_gives_plain_python_values() -> None:
    fields = read_fields(
        tensors(
            text_input="hé", max_tokens=5, top_p=0.9, stream=True, stop_words=["a", "é"], seed=2**63
        ),
        "{}",
    )
    assert fields == {
        "text_input": "hé".encode(),
        "max_tokens": 5,
        "top_p": 0.9,  # not the 0.8999999762 of single precision
        "stream": True,
        "stop_words": ["a", "é"],
        "seed": 2**63,
    }
    assert type(fields["stream"]) is bool


def test_read_fields_refuses_unknown_parameters_and_broken_utf8() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown parameter 'tempreature'.*temperature"):
        read_fields({}, '{"tempreature": 1}')
    with pytest.raises(InvalidRequest, match="stop_words is not valid UTF-8"):
        read_fields(tensors(stop_words=[b"\xff"]), "{}")


def test_without_stream_there_is_one_answer() -> None:
    decoder, sender = FakeDecoder(), FakeSender()
    with running_bridge(decoder) as bridge:
        bridge.accept(
            tensors(text_input="ab", raw_prompt=True, return_output_ids=True), "{}", sender
        )
        eventually(lambda: decoder.requests)
        assert decoder.requests[1][0].prompt_ids == (97, 98)
        decoder.emit(1, "x")
        time.sleep(0.05)  # the outbox has it
        decoder.emit(1, "yz", "length")
        eventually(lambda: sender.finals)
    assert sender.messages == [Answer("xyz", "length", 2, 2, output_ids=[120, 121, 122])]


def test_outputs_come_when_they_are_asked_for() -> None:
    decoder, sender = FakeDecoder(), FakeSender()
    asked = {"return_log_probs": True, "exclude_input_in_output": False, "return_output_ids": True}
    asked |= dict.fromkeys(
        ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), False
    )
    with running_bridge(decoder) as bridge:
        bridge.accept(tensors(text_input="ab", raw_prompt=True, stream=True, **asked), "{}", sender)
        eventually(lambda: decoder.requests)
        decoder.emit(1, "x", log_probs=[-1.5])
        eventually(lambda: len(sender.messages) == 1)
        stats = dict.fromkeys(("time_in_queue_s", "time_to_first_token_s", "total_time_s"), 0.5)
        stats |= {"num_accepted_draft_tokens": 3, "num_verified_draft_tokens": 4}
        decoder.emit(1, "y", "eos", log_probs=[-0.5], stats=stats)
        eventually(lambda: sender.finals)
    assert sender.messages == [
        Answer("abx", output_ids=[97, 98, 120], output_log_probs=[-1.5], cum_log_probs=-1.5),
        Answer(
            "y",
            output_ids=[121],
            output_log_probs=[-0.5],
            cum_log_probs=-0.5,
            acceptance_rate=0.75,
            total_accepted_draft_tokens=3,
            total_draft_tokens=4,
            time_in_queue_s=0.5,
            time_to_first_token_s=0.5,
            total_time_s=0.5,
        ),
    ]


def batch(**columns: list[Any]) -> dict[str, np.ndarray]:
    rows = [tensors(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values())]  # noqa: B905
    return {name: np.concatenate([row[name] for row in rows]) for name in columns}


def test_rows_of_a_batch_are_answered_by_index_and_the_last_ends_the_request() -> None:
    decoder, sender = FakeDecoder(), FakeSender()
    with running_bridge(decoder) as bridge:
        bridge.accept(batch(text_input=["a", "bc", "d"], max_tokens=[1, 2, 3]), "{}", sender)
        eventually(lambda: len(decoder.requests) == 3)
        index = {request.max_tokens: i for i, (request, _) in decoder.requests.items()}
        for row, max_tokens in enumerate((2, 3, 1)):
            decoder.emit(index[max_tokens], "xyz"[row], "eos")
            eventually(lambda row=row: len(sender.messages) == row + 1)
            assert sender.finals == (row == 2)
    answers = [m for m in sender.messages if isinstance(m, Answer)]
    assert [(a.batch_index, a.text_output) for a in answers] == [(1, "x"), (2, "y"), (0, "z")]
    assert [a.num_input_tokens for a in answers] == [3, 2, 2]


def test_a_row_that_is_refused_cancels_the_others_and_ends_the_batch_once() -> None:
    decoder, sender = FakeDecoder(), FakeSender()
    with running_bridge(decoder) as bridge:
        bridge.accept(batch(text_input=["a", "b"], max_tokens=[9, 0]), "{}", sender)
        eventually(lambda: decoder.cancelled)
        assert not sender.messages
        decoder.emit(1, "", "cancelled")
        eventually(lambda: sender.finals)
    (failure,) = sender.messages
    assert isinstance(failure, Failure)
    assert "max_tokens must be at least 1, got 0" in failure.message


def test_with_stream_every_text_is_sent_and_held_back_text_is_not() -> None:
    decoder, sender = FakeDecoder(), FakeSender()
    with running_bridge(decoder) as bridge:
        bridge.accept(tensors(text_input="ab", stream=True), "{}", sender)
        eventually(lambda: decoder.requests)
        assert decoder.requests[1][0].prompt_ids == (0, 97, 98)  # the chat template
        decoder.emit(1, "x")
        eventually(lambda: len(sender.messages) == 1)
        decoder.emit(1, "")
        time.sleep(0.05)  # the outbox has it
        decoder.emit(1, "y")
        eventually(lambda: len(sender.messages) == 2)
        decoder.emit(1, "", "eos")
        eventually(lambda: sender.finals)
    assert sender.texts == ["x", "y", ""]
    assert [m.finish_reason for m in sender.messages if isinstance(m, Answer)] == ["", "", "eos"]


def test_slow_client_gets_what_waits_in_one_response_and_does_not_stop_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    decoder, sender = FakeDecoder(), FakeSender(gate)
    with running_bridge(decoder) as bridge:
        bridge.accept(tensors(prompt_ids=[1], stream=True), "{}", sender)
        eventually(lambda: decoder.requests)
        decoder.emit(1, "a")
        assert sender.entered.wait(5)
        for text in "bcd":
            decoder.emit(1, text)
        decoder.emit(1, "e", "stop")
        gate.set()
        eventually(lambda: sender.finals)
    assert sender.texts == ["a", "bcde"]
    assert not caplog.records


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either text_input or prompt_ids, got neither"),
        ({"text_input": "a", "prompt_ids": [1]}, "either text_input or prompt_ids, got both"),
        ({"text_input": ""}, "the prompt is empty"),
        ({"prompt_ids": [300]}, "below the vocabulary size 256, got 300"),
        ({"prompt_ids": [1], "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ],
)
def test_the_clients_fault_is_told_to_the_client(given: dict[str, Any], message: str) -> None:
    decoder, sender = FakeDecoder(), FakeSender()
    with running_bridge(decoder) as bridge:
        bridge.accept(tensors(**given), "{}", sender)
        eventually(lambda: sender.finals)
    (failure,) = sender.messages
    assert isinstance(failure, Failure)
    assert failure.kind == "invalid"
    assert message in failure.message
    assert not decoder.requests


def test_full_queue_and_our_own_bugs_end_the_request_too() -> None:
    for refusal, kind in ((QueueFull("the queue is full"), "unavailable"), (OSError(), "internal")):
        decoder, sender = FakeDecoder(), FakeSender()
        decoder.refusal = refusal
        with running_bridge(decoder) as bridge:
            bridge.accept(tensors(prompt_ids=[1]), "{}", sender)
            eventually(lambda sender=sender: sender.finals)
        (failure,) = sender.messages
        assert isinstance(failure, Failure)
        assert failure.kind == kind


@pytest.mark.parametrize(("reason", "kind"), [("error", "internal"), ("timeout", "unavailable")])
def test_a_failed_request_ends_with_its_sentence(reason: str, kind: Any) -> None:
    decoder, sender = FakeDecoder(), FakeSender()
    with running_bridge(decoder) as bridge:
        bridge.accept(tensors(prompt_ids=[1]), "{}", sender)
        eventually(lambda: decoder.requests)
        decoder.emit(1, "", reason, "the request took longer than 5 s")
        eventually(lambda: sender.finals)
        assert bridge.metrics()[f'failures_total{{kind="{kind}"}}'] == 1
    assert sender.messages == [Failure(kind, "the request took longer than 5 s")]


def test_cancellation_is_seen_at_the_next_output() -> None:
    decoder, sender = FakeDecoder(), FakeSender()
    with running_bridge(decoder) as bridge:
        bridge.accept(tensors(prompt_ids=[1], stream=True), "{}", sender)
        eventually(lambda: decoder.requests)
        sender.cancelled = True
        decoder.emit(1, "x")
        eventually(lambda: decoder.cancelled)
        decoder.emit(1, "", "cancelled")
        eventually(lambda: sender.finals)
    assert decoder.cancelled[0] == 1
    assert sender.messages == [Failure("cancelled", "the request was cancelled")]


def test_cancellation_of_a_request_that_waits_is_seen_without_outputs() -> None:
    decoder, sender = FakeDecoder(), FakeSender()
    with running_bridge(decoder) as bridge:
        bridge.accept(tensors(prompt_ids=[1]), "{}", sender)
        eventually(lambda: decoder.requests)
        sender.cancelled = True
        eventually(lambda: decoder.cancelled)


def test_dead_decoder_ends_every_request_and_is_reported_once() -> None:
    decoder, senders, deaths = FakeDecoder(), [FakeSender() for _ in range(3)], [0]

    def on_death() -> None:
        deaths[0] += 1

    with running_bridge(decoder, on_death=on_death) as bridge:
        for sender in senders:
            bridge.accept(tensors(prompt_ids=[1]), "{}", sender)
        eventually(lambda: len(decoder.requests) == 3)
        decoder.healthy = False
        eventually(lambda: deaths[0] and all(sender.finals for sender in senders))
        time.sleep(0.6)
    assert deaths == [1]


def test_close_ends_running_requests() -> None:
    decoder, sender = FakeDecoder(), FakeSender()
    bridge = Bridge(decoder, MAX_PROMPT_BYTES, int, int)  # type: ignore[arg-type]
    bridge.accept(tensors(prompt_ids=[1]), "{}", sender)
    eventually(lambda: decoder.requests)
    bridge.close()
    assert sender.messages == [Failure("cancelled", "the request was cancelled")]


def test_a_sender_that_fails_does_not_stop_the_others() -> None:
    class BrokenSender(FakeSender):
        def send(self, message: Answer | Failure, final: bool) -> None:
            raise RuntimeError("the client's stream is gone")

    decoder, healthy = FakeDecoder(), FakeSender()
    with running_bridge(decoder) as bridge:
        bridge.accept(tensors(prompt_ids=[1], stream=True), "{}", BrokenSender())
        eventually(lambda: len(decoder.requests) == 1)
        bridge.accept(tensors(prompt_ids=[1], stream=True), "{}", healthy)
        eventually(lambda: len(decoder.requests) == 2)
        decoder.emit(1, "x")
        decoder.emit(2, "y", "eos")
        eventually(lambda: healthy.finals)
    assert healthy.texts == ["y"]
