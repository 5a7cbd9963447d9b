"""Clients as users write them: HTTP with JSON, server-sent events, and tritonclient's gRPC."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tritonclient.grpc as grpc

from bench.client import grpc_input, read_metrics
from triton_repo.bridge import HOUSEKEEPING_PERIOD_S
from triton_repo.contract import MODEL_NAME, OUTPUTS, UNARY_MODEL_NAME
from triton_repo.server import Address, TritonServer

CONTEXT_TOKENS = 512  # of the tiny model
ADMIN_KEY = "open-sesame"  # of the server that the tests share
_TIMEOUT_S = 30


class RefusedError(Exception):
    """The server answered with an error; `args[0]` is its sentence."""


@dataclass(frozen=True)
class Reply:
    """A whole answer, put together from its responses."""

    text: str
    pieces: int
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    output_ids: list[int]
    outputs: dict[str, Any]  # everything in the last response, arrays as lists


def free_address() -> Address:
    """An address with three ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return Address("127.0.0.1", *ports)


def living_processes(group: int) -> list[int]:
    """Processes of a group; those that ended and were not waited for yet do not count."""
    living = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                living.append(int(path.parent.name))
    return living


def eventually(condition: Callable[[], Any], within_s: float = 10) -> None:
    """Wait until the condition holds."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {within_s} s"
        time.sleep(0.05)


def post(address: Address, endpoint: str, body: bytes) -> Any:
    """POST to an endpoint of the model; returns the open response. Raises RefusedError."""
    url = f"{address.http_url}/v2/models/{MODEL_NAME}/{endpoint}"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        answer = error.read().decode().removeprefix("data: ")  # so begins /generate_stream's
        raise RefusedError(json.loads(answer)["error"]) from error


def generate(address: Address, **fields: Any) -> dict[str, Any]:
    """One call of /generate."""
    with post(address, "generate", json.dumps(fields).encode()) as response:
        reply: dict[str, Any] = json.load(response)
        return reply


def generate_stream(address: Address, **fields: Any) -> Iterator[dict[str, Any]]:
    """Responses of one call of /generate_stream. Raises RefusedError."""
    body = json.dumps({"stream": True, **fields}).encode()
    with post(address, "generate_stream", body) as response:
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise RefusedError(event["error"])
                yield event


def metrics(address: Address) -> Counter[str]:
    """The dspark_ metrics by series without that prefix; 0 where nothing was counted yet."""
    return read_metrics(address.client_host, address.metrics_port)


def settled_metrics(address: Address) -> Counter[str]:
    """Metrics once the last exports have happened."""
    time.sleep(2 * HOUSEKEEPING_PERIOD_S)
    return metrics(address)


def idle(address: Address) -> bool:
    """Whether nothing runs and every block is free."""
    now = metrics(address)
    return now["running_requests"] == 0 and now["kv_blocks_free"] == now["kv_blocks"]


def resident_bytes(server: TritonServer) -> int:
    """Memory of the server and its stubs."""
    total = 0
    for pid in (server.pid, *children_of(server.pid)):
        status = Path(f"/proc/{pid}/status").read_text()
        total += int(status.split("VmRSS:")[1].split()[0]) << 10
    return total


def children_of(pid: int) -> list[int]:
    """Processes that a process started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def decoder_of(server_pid: int) -> int:
    """The process, among those the server started, that runs the decoder."""
    (decoder,) = (
        pid
        for pid in children_of(server_pid)
        if f"/{MODEL_NAME}/1" in Path(f"/proc/{pid}/cmdline").read_text()
    )
    return decoder


class GrpcStream:
    """One gRPC stream, on which requests run one after another."""

    def __init__(self, address: Address) -> None:
        self._client = grpc.InferenceServerClient(f"{address.client_host}:{address.grpc_port}")
        self._events: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._events.put((result, error)))

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.stop_stream()
        self._client.close()

    def cancel(self) -> None:
        """Cancel what runs and end the stream."""
        self._client.stop_stream(cancel_requests=True)

    def send(self, parameters: dict[str, Any] | None = None, **fields: Any) -> None:
        """Start a request."""
        self._client.async_stream_infer(
            MODEL_NAME,
            [grpc_input(name, value) for name, value in fields.items()],
            enable_empty_final_response=True,
            parameters=parameters or {},
        )

    def send_tensors(self, tensors: list[grpc.InferInput], parameters: dict[str, Any]) -> None:
        """Start a request of whatever tensors."""
        self._client.async_stream_infer(
            MODEL_NAME, tensors, enable_empty_final_response=True, parameters=parameters
        )

    def send_rows(self, **columns: list[Any]) -> None:
        """Start a batched request of scalars."""
        inputs = [
            grpc_input(name, [[value] for value in values]) for name, values in columns.items()
        ]
        self._client.async_stream_infer(MODEL_NAME, inputs, enable_empty_final_response=True)

    def next_response(self) -> tuple[Any, bool]:
        """The next response and whether it is the final one. Raises RefusedError."""
        result, error = self._events.get(timeout=_TIMEOUT_S)
        if error is not None:
            raise RefusedError(error.message())
        return result, result.get_response().parameters["triton_final_response"].bool_param

    def ask(self, parameters: dict[str, Any] | None = None, **fields: Any) -> Reply:
        """Run a request to its final response. Raises RefusedError."""
        self.send(parameters, **fields)
        texts, ids, final = [], [], False
        while not final:
            result, final = self.next_response()
            texts.append(result.as_numpy("text_output").item().decode())
            if (new_ids := result.as_numpy("output_ids")) is not None:
                ids += new_ids.reshape(-1).tolist()
        return Reply(
            "".join(texts),
            len(texts),
            result.as_numpy("finish_reason").item().decode(),
            result.as_numpy("num_input_tokens").item(),
            result.as_numpy("num_output_tokens").item(),
            ids,
            _plain_outputs(result),
        )

    def has_more(self, within_s: float) -> bool:
        """Whether anything else arrives, which after a final response nothing may."""
        try:
            self._events.get(timeout=within_s)
        except queue.Empty:
            return False
        return True


def infer(address: Address, **fields: Any) -> dict[str, Any]:
    """One unary gRPC call of the companion model. Raises RefusedError."""
    with grpc.InferenceServerClient(f"{address.client_host}:{address.grpc_port}") as client:
        inputs = [grpc_input(name, value) for name, value in fields.items()]
        try:
            result = client.infer(UNARY_MODEL_NAME, inputs, client_timeout=_TIMEOUT_S)
        except grpc.InferenceServerException as error:
            raise RefusedError(error.message()) from error
        return _plain_outputs(result)


def _plain_outputs(result: Any) -> dict[str, Any]:
    values = {}
    for output in result.get_response().outputs:
        (row,) = result.as_numpy(output.name).tolist()
        row = [item.decode() if isinstance(item, bytes) else item for item in row]
        is_list = OUTPUTS[output.name].is_list
        values[output.name] = row if is_list else row[0]
    return values
