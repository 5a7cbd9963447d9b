"""Between Triton's requests and the decoder; knows nothing of Triton's Python API.

A request passes three threads. Triton's thread reads its tensors, a pool thread applies the chat
template and the tokenizer (which may take long for a long prompt) and submits it, and the outbox
thread alone talks to its sender afterwards: sending takes about as long as a small model's step,
so the decoding loop never waits for it. Every request ends in exactly one final message.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from runtime.decoder import Decoder
from runtime.request import InvalidRequest, QueueFull, RequestOutput, validate_request
from triton_repo.contract import INPUTS, Tensor

log = logging.getLogger("dspark")

HOUSEKEEPING_PERIOD_S = 0.25  # silent requests are asked for cancellation, metrics exported
PROMPT_THREADS = 2


@dataclass(frozen=True)
class Answer:
    """One response with text; each field is one of the contract's outputs."""

    text_output: str
    finish_reason: str  # empty on all but the last
    num_input_tokens: int
    num_output_tokens: int  # so far
    output_ids: list[int]


@dataclass(frozen=True)
class Failure:
    """A response without text: whose fault, and one sentence."""

    kind: Literal["invalid", "unavailable", "internal", "cancelled"]
    message: str


class Sender(Protocol):
    """Where one request's responses go."""

    def send(self, message: Answer | Failure, final: bool) -> None:
        """Send a response; after the final one the sender may not be used again."""

    def is_cancelled(self) -> bool:
        """Whether the client gave up."""


def read_fields(tensors: Mapping[str, NDArray[Any]], parameters: str) -> dict[str, Any]:
    """Input tensors as plain Python values by name; `text_input` stays bytes.

    Args:
        tensors: [1, n] arrays as Triton delivers them.
        parameters: JSON object of the request parameters that are not inputs. Triton puts unknown
            keys of /generate there; they are refused, not ignored.

    Raises InvalidRequest naming an unknown parameter or a value that is not UTF-8.
    """
    unknown = sorted(json.loads(parameters or "{}"))
    if unknown:
        raise InvalidRequest(
            f"unknown parameter {unknown[0]!r}; parameters are {', '.join(INPUTS)}"
        )
    return {name: _plain(array, INPUTS[name]) for name, array in tensors.items()}


def _plain(array: NDArray[Any], tensor: Tensor) -> Any:
    values: list[Any]
    if tensor.datatype == "FP32":
        # The shortest decimal that reads as this number is what the client wrote: 0.9, not
        # 0.89999998, so that a text does not depend on the way its request came in.
        values = [float(str(value)) for value in array.reshape(-1)]
    else:
        values = array.reshape(-1).tolist()
    if tensor.datatype == "STRING" and tensor.name != "text_input":
        try:
            values = [value.decode() for value in values]
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{tensor.name} is not valid UTF-8: {error}") from error
    return values if tensor.is_list else values[0]


class _Reply:
    """One request's way back: what the loop has produced and the outbox has not sent yet."""

    def __init__(self, sender: Sender, stream: bool, return_output_ids: bool) -> None:
        self.sender = sender
        self.request_id: int | None = None  # set once the decoder has taken the request
        self._stream = stream
        self._return_output_ids = return_output_ids
        self._lock = threading.Lock()
        self._waiting: list[RequestOutput] = []
        self._text = ""
        self._ids: list[int] = []

    def add(self, output: RequestOutput) -> bool:
        """Take an output from the loop; returns whether the outbox must be told."""
        with self._lock:
            self._waiting.append(output)
            return len(self._waiting) == 1

    def next_message(self) -> tuple[Answer | Failure | None, bool]:
        """Everything that waits as one message (None: nothing to send yet) and whether it is final.

        Several outputs wait only when sending is slower than decoding; they then share a response.
        """
        with self._lock:
            outputs, self._waiting = self._waiting, []
        self._text += "".join(output.text for output in outputs)
        if self._return_output_ids:
            self._ids += [token_id for output in outputs for token_id in output.token_ids]
        last = outputs[-1]
        final = last.finish_reason is not None
        if last.finish_reason == "error":
            return Failure("internal", last.error or "the decoder failed"), True
        if last.finish_reason == "cancelled":
            return Failure("cancelled", "the request was cancelled"), True
        if not final and not (self._stream and self._text):
            return None, False
        answer = Answer(
            self._text,
            last.finish_reason or "",
            last.num_input_tokens,
            last.num_output_tokens,
            self._ids,
        )
        self._text, self._ids = "", []
        return answer, final


class Bridge:
    """Takes requests from Triton to the decoder and its outputs back. All methods thread-safe."""

    def __init__(
        self,
        decoder: Decoder,
        max_prompt_bytes: int,
        on_tick: Callable[[], None],
        on_death: Callable[[], None],
    ) -> None:
        """Start the outbox.

        Args:
            decoder: takes the requests; closed with the bridge.
            max_prompt_bytes: longest text prompt.
            on_tick: called every HOUSEKEEPING_PERIOD_S from the outbox.
            on_death: called once when the decoder is no longer healthy and everybody was told.
        """
        self._decoder = decoder
        self._max_prompt_bytes = max_prompt_bytes
        self._on_tick = on_tick
        self._on_death = on_death
        self._dead = False
        self._open: set[_Reply] = set()
        self._open_lock = threading.Lock()
        self._outbox: queue.SimpleQueue[_Reply | None] = queue.SimpleQueue()
        self._prompts = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="dspark-prompt")
        self._thread = threading.Thread(target=self._run, name="dspark-outbox", daemon=True)
        self._thread.start()

    def accept(self, tensors: Mapping[str, NDArray[Any]], parameters: str, sender: Sender) -> None:
        """Take one request; its answers, errors included, go to `sender`.

        The tensors are read before this returns. For the arguments see `read_fields`.
        """
        try:
            fields = read_fields(tensors, parameters)
        except InvalidRequest as error:
            sender.send(Failure("invalid", str(error)), final=True)
            return
        self._prompts.submit(self._submit, fields, sender)

    def close(self) -> None:
        """End every request, then stop; the decoder is closed too. May be called again."""
        self._prompts.shutdown()
        self._decoder.close()
        self._outbox.put(None)  # behind the final outputs that closing the decoder produced
        self._thread.join()

    def _submit(self, fields: dict[str, Any], sender: Sender) -> None:
        reply = _Reply(sender, fields.get("stream", False), fields.pop("return_output_ids", False))
        try:
            request = validate_request(self._with_prompt_ids(fields), self._decoder.limits)
            with self._open_lock:
                self._open.add(reply)

            def on_output(output: RequestOutput) -> None:
                if reply.add(output):
                    self._outbox.put(reply)

            reply.request_id = self._decoder.submit(request, on_output)
        except InvalidRequest as error:
            self._refuse(reply, Failure("invalid", str(error)))
        except QueueFull as error:
            self._refuse(reply, Failure("unavailable", str(error)))
        except Exception as error:
            log.exception("a request could not be submitted")
            self._refuse(reply, Failure("internal", f"the request failed: {error}"))

    def _with_prompt_ids(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields with the text prompt replaced by its token ids."""
        text = fields.pop("text_input", None)
        raw_prompt = fields.pop("raw_prompt", False)
        if (text is None) == ("prompt_ids" not in fields):
            given = "neither" if text is None else "both"
            raise InvalidRequest(f"give either text_input or prompt_ids, got {given}")
        if text is not None:
            tokenizer = self._decoder.tokenizer
            fields["prompt_ids"] = tokenizer.encode_prompt(text, raw_prompt, self._max_prompt_bytes)
        return fields

    def _refuse(self, reply: _Reply, failure: Failure) -> None:
        with self._open_lock:
            self._open.discard(reply)
        reply.sender.send(failure, final=True)

    def _run(self) -> None:
        next_tick_s = time.monotonic()
        while True:
            try:
                wait_s = max(0.0, next_tick_s - time.monotonic())
                reply = self._outbox.get(timeout=wait_s)
                if reply is None:
                    return
                self._deliver(reply)
            except queue.Empty:
                pass
            except Exception:
                log.exception("a response could not be sent")
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + HOUSEKEEPING_PERIOD_S
                self._tick()

    def _deliver(self, reply: _Reply) -> None:
        message, final = reply.next_message()
        if not final and self._cancel_if_asked(reply):
            return
        if final:
            with self._open_lock:
                self._open.discard(reply)
        if message is not None:
            reply.sender.send(message, final)

    def _tick(self) -> None:
        try:
            with self._open_lock:
                open_replies = list(self._open)
            if not self._decoder.is_healthy():
                self._die(open_replies)
                return
            for reply in open_replies:  # waiting or prefilling ones produce no outputs to ask at
                self._cancel_if_asked(reply)
            self._on_tick()
        except Exception:
            log.exception("housekeeping failed")

    def _die(self, open_replies: list[_Reply]) -> None:
        for reply in open_replies:
            self._refuse(reply, Failure("internal", "the decoder has stopped, and the server ends"))
        if not self._dead:
            self._dead = True
            self._on_death()

    def _cancel_if_asked(self, reply: _Reply) -> bool:
        if reply.request_id is None or not reply.sender.is_cancelled():
            return False
        self._decoder.cancel(reply.request_id)
        return True
