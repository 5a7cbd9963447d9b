"""`dspark bench stream`: what a streaming gRPC client of a running server sees.

The time between responses at the client beside the engine's own steps in the same period, which
the server's metrics tell; their ratio is what Triton and the glue cost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import statistics
import threading
import time
import urllib.request
from typing import Any

import numpy as np

from bench.prompts import add_prompt_arguments, read_prompts
from runtime.cli import run_guarded

_TIMEOUT_S = 120.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench stream`."""
    parser = subparsers.add_parser(
        "stream",
        help="time to first token and between tokens at a gRPC client of a running server",
        description="Stream prompts from a running server with a number of closed-loop clients.",
        allow_abbrev=False,
    )
    add_prompt_arguments(parser, limit=8, max_new_tokens=64)
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--grpc-port", type=int, default=8001, help="default: %(default)s")
    parser.add_argument("--metrics-port", type=int, default=8002, help="default: %(default)s")
    parser.add_argument(
        "--concurrency", type=int, default=1, metavar="N", help="clients (default: %(default)s)"
    )
    parser.set_defaults(func=_stream)


@run_guarded
def _stream(args: argparse.Namespace) -> int:
    prompts = read_prompts(args.prompts, args.limit)
    work: queue.SimpleQueue[str] = queue.SimpleQueue()
    work.put(prompts[0])
    _Client(args).drain(work)  # warm up
    for prompt in prompts:
        work.put(prompt)
    before = _metrics(args)
    clients = [_Client(args) for _ in range(args.concurrency)]
    threads = [threading.Thread(target=client.drain, args=(work,)) for client in clients]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    after = _metrics(args)
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}

    gaps = [gap for client in clients for gap in client.gaps_s]
    step_s = sum(v for n, v in gained.items() if n.startswith("dspark_step_"))
    steps = gained["dspark_steps_total"]
    report = {
        "concurrency": args.concurrency,
        "requests": len(prompts),
        "tokens_per_s": gained["dspark_output_tokens_total"] / seconds,
        "time_to_first_token_ms": 1e3 * statistics.median(t for c in clients for t in c.first_s),
        "between_responses_ms": 1e3 * statistics.mean(gaps),
        "step_ms": 1e3 * step_s / steps,
    }
    report["between_responses_over_step"] = report["between_responses_ms"] / report["step_ms"]
    for name, value in report.items():
        print(f"{name:>30}  {value:.4g}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


class _Client:
    """One gRPC stream that asks prompt after prompt and times the responses."""

    def __init__(self, args: argparse.Namespace) -> None:
        import tritonclient.grpc as grpc

        self._grpc = grpc
        self._client = grpc.InferenceServerClient(f"{args.host}:{args.grpc_port}")
        self._max_tokens = args.max_new_tokens
        self._events: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(
            lambda result, error: self._events.put((time.perf_counter(), result, error))
        )
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []

    def drain(self, work: queue.SimpleQueue[str]) -> None:
        """Ask until no prompt is left, then close."""
        while True:
            try:
                self.ask(work.get_nowait())
            except queue.Empty:
                break
        self._client.stop_stream()
        self._client.close()

    def ask(self, prompt: str) -> None:
        """One request to its last response."""
        start = time.perf_counter()
        inputs = [
            self._input("text_input", "BYTES", np.array([[prompt.encode()]], np.object_)),
            self._input("max_tokens", "INT32", np.array([[self._max_tokens]], np.int32)),
            self._input("stream", "BOOL", np.array([[True]])),
        ]
        self._client.async_stream_infer("dspark", inputs, enable_empty_final_response=True)
        times, final = [], False
        while not final:
            at, result, error = self._events.get(timeout=_TIMEOUT_S)
            if error is not None:
                raise error
            times.append(at)
            final = result.get_response().parameters["triton_final_response"].bool_param
        self.first_s.append(times[0] - start)
        self.gaps_s += [b - a for a, b in itertools.pairwise(times)]

    def _input(self, name: str, datatype: str, array: np.ndarray) -> Any:
        tensor = self._grpc.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        return tensor


def _metrics(args: argparse.Namespace) -> dict[str, float]:
    """The server's dspark_ metrics; waits until its periodic export has caught up."""
    time.sleep(1.0)
    url = f"http://{args.host}:{args.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("dspark_")]
    return {name.split("{")[0]: float(value) for name, value in pairs}
