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
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

from numpy.typing import NDArray

from runtime.decoder import Decoder
from runtime.request import InvalidRequest, QueueFull, RequestOutput, shown, validate_request
from triton_repo.contract import INPUTS, SERVING_PARAMETERS, Tensor

log = logging.getLogger("dspark")

HOUSEKEEPING_PERIOD_S = 0.25  # silent requests are asked for cancellation, metrics exported
PROMPT_THREADS = 2
_TIMES = ("time_in_queue_s", "time_to_first_token_s", "total_time_s")


@dataclass(frozen=True)
class Answer:
    """One response with text; each field is one of the contract's outputs, None to leave it out."""

    text_output: str
    finish_reason: str | None = None  # empty on all but the last
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None  # so far
    output_ids: list[int] | None = None
    output_log_probs: list[float] | None = None
    cum_log_probs: float | None = None
    # On the last response only
    acceptance_rate: float | None = None
    total_accepted_draft_tokens: int | None = None
    total_draft_tokens: int | None = None
    time_in_queue_s: float | None = None
    time_to_first_token_s: float | None = None
    total_time_s: float | None = None
    # Of a batched request only
    batch_index: int | None = None


FailureKind = Literal["invalid", "unavailable", "internal", "cancelled"]
FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


@dataclass(frozen=True)
class Failure:
    """A response without text: whose fault, and one sentence."""

    kind: FailureKind
    message: str


class Sender(Protocol):
    """Where one request's responses go."""

    def send(self, message: Answer | Failure, final: bool) -> None:
        """Send a response; after the final one the sender may not be used again."""

    def is_cancelled(self) -> bool:
        """Whether the client gave up."""


def read_fields(
    tensors: Mapping[str, NDArray[Any]], parameters: str, row: int = 0
) -> dict[str, Any]:
    """One row of the input tensors as plain Python values by name; `text_input` stays bytes.

    Args:
        tensors: [rows, n] arrays as Triton delivers them.
        parameters: JSON object of the request parameters that are not inputs. Triton puts unknown
            keys of /generate there; they are refused, not ignored.
        row: of a batched request.

    Raises InvalidRequest naming an unknown parameter or a value that is not UTF-8.
    """
    unknown = sorted(json.loads(parameters or "{}"))
    if unknown:
        raise InvalidRequest(
            f"unknown parameter {shown(unknown[0])}; parameters are {', '.join(INPUTS)}"
        )
    return {name: _plain(array[row], INPUTS[name]) for name, array in tensors.items()}


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

    def __init__(self, sender: Sender, fields: dict[str, Any]) -> None:
        """Take out of `fields` what the decoder does not need to know."""
        self.sender = sender
        self.request_id: int | None = None  # set once the decoder has taken the request
        self._stream = fields.get("stream", False)
        self._return_log_probs = fields.get("return_log_probs", False)
        self._returns = {
            name: fields.pop(name, SERVING_PARAMETERS[name].default)
            for name in SERVING_PARAMETERS
            if name.startswith("return_")
        }
        self._lock = threading.Lock()
        self._waiting: list[RequestOutput] = []
        self._text = ""
        self._ids: list[int] = []
        self._log_probs: list[float] = []

    def begin_with(self, text: str, token_ids: list[int]) -> None:
        """Put the prompt in front of what is generated."""
        self._text, self._ids = text, list(token_ids)

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
        self._ids += [token_id for output in outputs for token_id in output.token_ids]
        self._log_probs += [value for output in outputs for value in output.log_probs]
        last = outputs[-1]
        final = last.finish_reason is not None
        if last.finish_reason == "error":
            return Failure("internal", last.error or "the decoder failed"), True
        if last.finish_reason == "timeout":
            return Failure("unavailable", last.error or "the request took too long"), True
        if last.finish_reason == "cancelled":
            return Failure("cancelled", "the request was cancelled"), True
        if not final and not (self._stream and self._text):
            return None, False
        returns = self._returns
        answer = Answer(
            self._text,
            finish_reason=(last.finish_reason or "") if returns["return_finish_reason"] else None,
            num_input_tokens=last.num_input_tokens if returns["return_num_input_tokens"] else None,
            num_output_tokens=(
                last.num_output_tokens if returns["return_num_output_tokens"] else None
            ),
            output_ids=self._ids if returns["return_output_ids"] else None,
            output_log_probs=self._log_probs if self._return_log_probs else None,
            cum_log_probs=last.cum_log_probs if self._return_log_probs else None,
            **_statistics(last.stats),
        )
        self._text, self._ids, self._log_probs = "", [], []
        return answer, final


def _statistics(stats: Mapping[str, float]) -> dict[str, Any]:
    """The last response's fields; none for another."""
    if not stats:
        return {}
    accepted = int(stats["num_accepted_draft_tokens"])
    verified = int(stats["num_verified_draft_tokens"])
    return {
        "acceptance_rate": accepted / verified if verified else 0.0,
        "total_accepted_draft_tokens": accepted,
        "total_draft_tokens": verified,
        **{name: stats[name] for name in _TIMES},
    }


class _Batch:
    """Several rows over the one sender of their request.

    The first row that fails decides: the others are cancelled, and its failure comes last.
    """

    def __init__(self, sender: Sender, num_rows: int) -> None:
        self._sender = sender
        self._num_open = num_rows
        self._failure: Failure | None = None
        self._lock = threading.Lock()

    def send(self, row: int, message: Answer | Failure, final: bool) -> None:
        with self._lock:
            self._num_open -= final
            if isinstance(message, Failure):
                self._failure = self._failure or message
            elif self._failure is None:
                self._sender.send(replace(message, batch_index=row), self._num_open == 0)
                return
            if self._num_open == 0:
                assert self._failure is not None
                self._sender.send(self._failure, final=True)

    def is_cancelled(self) -> bool:
        with self._lock:
            return self._failure is not None or self._sender.is_cancelled()


@dataclass(frozen=True)
class _RowSender:
    """The `Sender` of one row of a batch."""

    batch: _Batch
    row: int

    def send(self, message: Answer | Failure, final: bool) -> None:
        self.batch.send(self.row, message, final)

    def is_cancelled(self) -> bool:
        return self.batch.is_cancelled()


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
        self._failures = dict.fromkeys(FAILURE_KINDS, 0)
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
        num_rows = len(next(iter(tensors.values()))) if tensors else 1
        try:
            rows = [read_fields(tensors, parameters, row) for row in range(num_rows)]
        except InvalidRequest as error:
            self.refuse(str(error), sender)
            return
        senders: list[Sender] = [sender]
        if num_rows > 1:
            batch = _Batch(sender, num_rows)
            senders = [_RowSender(batch, row) for row in range(num_rows)]
        for fields, row_sender in zip(rows, senders, strict=True):
            self._prompts.submit(self._submit, fields, row_sender)

    def refuse(self, message: str, sender: Sender) -> None:
        """Answer a request that is the client's fault."""
        failure = Failure("invalid", message)
        self._count(failure)
        sender.send(failure, final=True)

    def metrics(self) -> dict[str, float]:
        """Requests that ended with a failure, by kind; named as `Decoder.metrics` does."""
        with self._open_lock:
            return {f'failures_total{{kind="{kind}"}}': n for kind, n in self._failures.items()}

    def close(self) -> None:
        """End every request, then stop; the decoder is closed too. May be called again."""
        self._prompts.shutdown()
        self._decoder.close()
        self._outbox.put(None)  # behind the final outputs that closing the decoder produced
        self._thread.join()

    def _submit(self, fields: dict[str, Any], sender: Sender) -> None:
        reply = _Reply(sender, fields)
        try:
            request = validate_request(self._with_prompt_ids(fields, reply), self._decoder.limits)
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

    def _with_prompt_ids(self, fields: dict[str, Any], reply: _Reply) -> dict[str, Any]:
        """The fields with the text prompt replaced by its token ids."""
        tokenizer = self._decoder.tokenizer
        text = fields.pop("text_input", None)
        raw_prompt = fields.pop("raw_prompt", False)
        with_prompt = not fields.pop("exclude_input_in_output", True)
        if (text is None) == ("prompt_ids" not in fields):
            given = "neither" if text is None else "both"
            raise InvalidRequest(f"give either text_input or prompt_ids, got {given}")
        if text is not None:
            fields["prompt_ids"] = tokenizer.encode_prompt(text, raw_prompt, self._max_prompt_bytes)
        if with_prompt:
            ids = fields["prompt_ids"]
            reply.begin_with(tokenizer.decode(ids) if text is None else text.decode(), ids)
        return fields

    def _refuse(self, reply: _Reply, failure: Failure) -> None:
        self._count(failure)
        with self._open_lock:
            self._open.discard(reply)
        reply.sender.send(failure, final=True)

    def _count(self, failure: Failure) -> None:
        with self._open_lock:
            self._failures[failure.kind] += 1

    def _run(self) -> None:
        next_tick_s = time.monotonic() + HOUSEKEEPING_PERIOD_S  # `on_tick` may use the bridge
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
        if isinstance(message, Failure):
            self._count(message)
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
