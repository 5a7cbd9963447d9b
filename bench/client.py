"""A streaming gRPC client of a running server, and the server's own counters."""

from __future__ import annotations

import argparse
import bisect
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
    """When a request was sent and its responses came (perf_counter), and its tokens by then."""

    start_s: float
    times_s: list[float]
    tokens: list[int]
    complete: bool = True

    @property
    def num_output_tokens(self) -> int:
        """Of the whole answer."""
        return self.tokens[-1]

    def tokens_until(self, end_s: float) -> int:
        """Output tokens that had come at a time."""
        responses = bisect.bisect_right(self.times_s, end_s)
        return self.tokens[responses - 1] if responses else 0


class Client:
    """One gRPC stream, on which requests run one after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        import tritonclient.grpc as grpc

        self._client = grpc.InferenceServerClient(f"{args.host}:{args.grpc_port}")
        self._events: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(
            lambda result, error: self._events.put((time.perf_counter(), result, error))
        )

    def ask(self, **fields: Any) -> Timing:
        """Stream one request to its last response, or to an `interrupt`.

        Raises what the server refuses with.
        """
        start = time.perf_counter()
        self._client.async_stream_infer(
            MODEL_NAME,
            [grpc_input(name, value) for name, value in {**fields, "stream": True}.items()],
            enable_empty_final_response=True,
        )
        times, results, final = [], [], False
        while not final:
            at, result, error = self._events.get(timeout=TIMEOUT_S)
            if error is not None:
                raise error
            if result is None:
                break
            times.append(at)
            results.append(result)
            final = result.get_response().parameters["triton_final_response"].bool_param
        tokens = [int(result.as_numpy("num_output_tokens").item()) for result in results]
        return Timing(start, times, tokens, final)

    def interrupt(self) -> None:
        """Let another thread's `ask` return with what has come; `close` will cancel its request."""
        self._events.put((time.perf_counter(), None, None))

    def close(self) -> None:
        """End the stream, and the request that runs on it."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def grpc_input(name: str, value: Any) -> Any:
    """An input of the served model from a scalar, a list ([n] of one row) or rows of such lists.

    A name that the model does not have goes as INT32, for the server to refuse.
    """
    import tritonclient.grpc as grpc

    datatype = INPUTS[name].datatype if name in INPUTS else "INT32"
    values = value if isinstance(value, list) else [value]
    is_batch = bool(values) and isinstance(values[0], list)
    array = np.array(values if is_batch else [values], dtype=_NUMPY_TYPES[datatype])
    made = grpc.InferInput(name, list(array.shape), "BYTES" if datatype == "STRING" else datatype)
    made.set_data_from_numpy(array)
    return made


def read_metrics(host: str, port: int) -> Counter[str]:
    """The server's dspark_ series now, without that prefix; 0 where nothing was counted yet."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("dspark_")]
    values = {name.removeprefix("dspark_"): float(value) for name, value in pairs}
    return Counter(values)


def server_metrics(args: argparse.Namespace, wait_s: float = EXPORT_S) -> Counter[str]:
    """`read_metrics` once the server's periodic export has caught up."""
    time.sleep(wait_s)
    return read_metrics(args.host, args.metrics_port)


def gained(before: Counter[str], after: Counter[str]) -> Counter[str]:
    """How far each series has risen."""
    return Counter({name: value - before[name] for name, value in after.items()})
