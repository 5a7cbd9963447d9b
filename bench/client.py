"""A streaming gRPC client of a running server, and the server's own counters."""

from __future__ import annotations

import argparse
import queue
import time
import urllib.request
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from triton_repo.contract import INPUTS, MODEL_NAME

TIMEOUT_S = 300.0
EXPORT_S = 0.6  # until the server's periodic export has surely caught up
_NUMPY_TYPES = {
    "STRING": np.object_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
}


def add_address_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the server listens."""
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--grpc-port", type=int, default=8001, help="default: %(default)s")
    parser.add_argument("--metrics-port", type=int, default=8002, help="default: %(default)s")


class Timing(NamedTuple):
    """When a request was sent and its responses came (perf_counter), and its output tokens."""

    start_s: float
    times_s: list[float]
    num_output_tokens: int


class Client:
    """One gRPC stream, on which requests run one after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        import tritonclient.grpc as grpc

        self._grpc = grpc
        self._client = grpc.InferenceServerClient(f"{args.host}:{args.grpc_port}")
        self._events: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(
            lambda result, error: self._events.put((time.perf_counter(), result, error))
        )

    def ask(self, **fields: Any) -> Timing:
        """Stream one request to its last response. Raises what the server refuses with."""
        start = time.perf_counter()
        self._client.async_stream_infer(
            MODEL_NAME,
            [self._input(name, value) for name, value in {**fields, "stream": True}.items()],
            enable_empty_final_response=True,
        )
        times, final, result = [], False, None
        while not final:
            at, result, error = self._events.get(timeout=TIMEOUT_S)
            if error is not None:
                raise error
            times.append(at)
            final = result.get_response().parameters["triton_final_response"].bool_param
        assert result is not None
        return Timing(start, times, int(result.as_numpy("num_output_tokens").item()))

    def close(self) -> None:
        """End the stream."""
        self._client.stop_stream()
        self._client.close()

    def _input(self, name: str, value: Any) -> Any:
        datatype = INPUTS[name].datatype
        value = value.encode() if isinstance(value, str) else value
        array = np.array([[value]], _NUMPY_TYPES[datatype])
        wire = "BYTES" if datatype == "STRING" else datatype
        tensor = self._grpc.InferInput(name, list(array.shape), wire)
        tensor.set_data_from_numpy(array)
        return tensor


def server_metrics(args: argparse.Namespace, wait_s: float = EXPORT_S) -> Counter[str]:
    """The server's dspark_ series without that prefix, once its periodic export has caught up."""
    time.sleep(wait_s)
    url = f"http://{args.host}:{args.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("dspark_")]
    values = {name.removeprefix("dspark_"): float(value) for name, value in pairs}
    return Counter(values)


def gained(before: Counter[str], after: Counter[str]) -> Counter[str]:
    """How far each series has risen."""
    return Counter({name: value - before[name] for name, value in after.items()})
