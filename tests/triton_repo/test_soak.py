"""Many clients for long, and clients that behave badly: every request ends, nothing is left behind.

`make soak` runs these at full size (10,000 requests); without it they are small.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.prompts import run_requests
from runtime.config import RuntimeConfig
from runtime.decoder import Model
from runtime.request import validate_request
from tests.triton_repo.clients import (
    GrpcStream,
    RefusedError,
    children_of,
    eventually,
    generate,
    generate_stream,
    idle,
    infer,
    resident_bytes,
    settled_metrics,
)
from triton_repo.server import Address, TritonServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FULL_SIZE = "DSPARK_SOAK" in os.environ
NUM_REQUESTS = 10_000 if FULL_SIZE else 250
NUM_CONNECTIONS = 1_000 if FULL_SIZE else 150
CLIENTS = 32
MALFORMED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"prompt_ids": [320]}, "below the vocabulary size"),
    ({"prompt_ids": [5] * 600}, "may have at most"),
    ({"top_p": 2.0}, "top_p must be above 0"),
    ({"temperature": -1.0}, "temperature must be at least 0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
    ({"logit_bias": "{"}, "logit_bias must be a JSON object"),
    ({"return_context_logits": True}, "is not served"),
    ({"text_input": "both"}, "either text_input or prompt_ids, got both"),
)


def random_request(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_ids": [rng.randrange(3, 320) for _ in range(rng.choice([1, 3, 20, 150]))],
        "max_tokens": rng.choice([1, 4, 12, 40]),
        "ignore_eos": rng.random() < 0.7,
    }
    optional: dict[str, Any] = {
        "temperature": rng.choice([0.3, 1.0, 2.0]),
        "top_k": rng.randrange(50),
        "top_p": rng.choice([0.5, 0.95]),
        "seed": rng.randrange(2**31),
        "stop_words": ["the", "ox"],
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "bad_words": ["dog"],
        "return_log_probs": True,
        "return_output_ids": True,
        "num_draft_tokens": rng.randrange(6),
        "disable_spec_decode": True,
        "acceptance": rng.choice(["rejection", "coupled"]),
    }
    for name in rng.sample(sorted(optional), rng.randrange(5)):
        fields[name] = optional[name]
    return fields


def over_http(address: Address, fields: dict[str, Any]) -> None:
    reply = generate(address, **fields)
    assert reply["finish_reason"] in ("length", "stop", "eos")
    assert 1 <= reply["num_output_tokens"] <= fields["max_tokens"]


def over_sse(address: Address, fields: dict[str, Any]) -> None:
    *first, last = generate_stream(address, **fields)
    assert all(event["finish_reason"] == "" for event in first)
    assert last["finish_reason"] in ("length", "stop", "eos")


def over_grpc(address: Address, fields: dict[str, Any]) -> None:
    with GrpcStream(address) as stream:
        reply = stream.ask(**fields, stream=True)
        assert 1 <= reply.num_output_tokens <= fields["max_tokens"]
        assert not stream.has_more(within_s=0.01)


def over_unary(address: Address, fields: dict[str, Any]) -> None:
    assert infer(address, **fields)["num_output_tokens"] <= fields["max_tokens"]


def cancelled_over_grpc(address: Address, fields: dict[str, Any], after_s: float) -> None:
    with GrpcStream(address) as stream:
        stream.send(**fields, stream=True)
        time.sleep(after_s)
        stream.cancel()


def cancelled_over_http(address: Address, fields: dict[str, Any], after_s: float) -> None:
    body = json.dumps({**fields, "stream": True}).encode()
    head = "POST /v2/models/dspark/generate_stream HTTP/1.1\r\nHost: test\r\n"
    with socket.create_connection((address.client_host, address.http_port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(after_s)


WAYS: tuple[Callable[[Address, dict[str, Any]], None], ...] = (
    over_http,
    over_sse,
    over_grpc,
    over_unary,
)
CANCELLED = (cancelled_over_grpc, cancelled_over_http)


def one_request(address: Address, seed: int) -> str:
    rng = random.Random(seed)
    fields, draw = random_request(rng), rng.random()
    if draw < 0.2:
        rng.choice(CANCELLED)(address, fields | {"max_tokens": 80}, rng.random() * 0.1)
        return "cancelled"
    if draw < 0.25:
        wrong, sentence = rng.choice(MALFORMED)
        with pytest.raises(RefusedError, match=sentence):
            rng.choice(WAYS)(address, fields | wrong)
        return "malformed"
    rng.choice(WAYS)(address, fields)
    return "answered"


def held(server: TritonServer) -> tuple[int, int]:
    """Threads and file descriptors of the server and its stubs."""
    pids = (server.pid, *children_of(server.pid))
    return (
        sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
    )


def test_soak(server: TritonServer, address: Address) -> None:
    warm_up = NUM_REQUESTS // 5
    before = settled_metrics(address)
    seeds = range(NUM_REQUESTS)
    with ThreadPoolExecutor(CLIENTS) as pool:
        outcomes = Counter(pool.map(lambda seed: one_request(address, seed), seeds[:warm_up]))
        eventually(lambda: idle(address), within_s=60)
        resident, (threads, files) = resident_bytes(server), held(server)
        started_s = time.monotonic()
        outcomes += Counter(pool.map(lambda seed: one_request(address, seed), seeds[warm_up:]))
        seconds = time.monotonic() - started_s
    eventually(lambda: idle(address), within_s=60)
    gained = settled_metrics(address) - before
    growth = resident_bytes(server) / resident - 1
    print(f"{dict(outcomes)}, {(NUM_REQUESTS - warm_up) / seconds:.0f} requests/s")
    print(f"memory {resident >> 20} MB, grew {growth:.2%}; held {(threads, files)}, {held(server)}")
    assert outcomes["malformed"] > 0.03 * NUM_REQUESTS
    assert outcomes["cancelled"] > 0.12 * NUM_REQUESTS
    finished = {n: c for n, c in gained.items() if n.startswith("finished_")}
    assert sum(finished.values()) == gained["requests_total"]
    assert finished.get("finished_error_total", 0) == 0
    # A client that gives up early may do so before its request arrives, or after it is done.
    answered = outcomes["answered"]
    assert answered <= gained["requests_total"] <= answered + outcomes["cancelled"]
    assert gained['failures_total{kind="invalid"}'] >= outcomes["malformed"]
    assert growth < (0.02 if FULL_SIZE else 0.10)
    assert held(server)[0] <= threads + (2 if FULL_SIZE else CLIENTS)  # pools fill up at first
    eventually(lambda: held(server)[1] <= files + 4, within_s=30)


def test_connections_that_are_dropped_leave_nothing(server: TritonServer, address: Address) -> None:
    begun = b"POST /v2/models/dspark/generate HTTP/1.1\r\nHost: t\r\nContent-Length: 900\r\n\r\n{"
    generate(address, prompt_ids=[5], max_tokens=1)
    _, files = held(server)
    for i in range(NUM_CONNECTIONS):
        port = (address.http_port, address.grpc_port, address.metrics_port)[i % 3]
        with socket.create_connection((address.client_host, port)) as connection:
            connection.sendall((b"", begun, b"PRI * HTTP/2.0", os.urandom(64))[i % 4])
    assert generate(address, prompt_ids=[5], max_tokens=2)["num_output_tokens"] <= 2
    eventually(lambda: held(server)[1] <= files + 4, within_s=60)


def test_a_client_that_reads_slowly_delays_nobody(address: Address) -> None:
    before = settled_metrics(address)
    body = b'{"prompt_ids": [5], "max_tokens": 400, "ignore_eos": true, "stream": true}'
    head = f"POST /v2/models/dspark/generate_stream HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect((address.client_host, address.http_port))
        slow.sendall(head.encode() + body)
        for _ in range(10 if FULL_SIZE else 2):
            assert len(slow.recv(1)) == 1
            started_s = time.monotonic()
            generate(address, prompt_ids=[7], max_tokens=8)
            assert time.monotonic() - started_s < 5
            time.sleep(1)
    eventually(lambda: (settled_metrics(address) - before)["requests_total"] >= 3)
    eventually(lambda: idle(address))


def test_a_clock_that_jumps_changes_nothing(
    server: TritonServer, address: Address, tiny_pair_build: Path
) -> None:
    """By a day back and forth at every reading (conftest): no answer, no time, no health."""
    assert "the wall clock jumped by 172800 s" in server.log_path.read_text()
    config = RuntimeConfig(kv_cache_mb=64, prefix_cache_mb=0, num_threads=1, policy="off")
    model = Model(tiny_pair_build / "engines", tiny_pair_build / "hf", config)
    asked = [{"prompt_ids": [5, i], "max_tokens": 60, "ignore_eos": True} for i in range(7, 11)]
    requests = [validate_request(fields, model.limits) for fields in asked]
    expected = run_requests(model.make_loop(), requests)
    model.close()

    def streamed_ids(fields: dict[str, Any]) -> list[int]:
        with GrpcStream(address) as stream:
            return stream.ask(**fields, stream=True, return_output_ids=True).output_ids

    before, started_s = settled_metrics(address), time.monotonic()
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(streamed_ids, asked)) == expected
    now, seconds = settled_metrics(address), time.monotonic() - started_s
    assert min(now.values()) >= 0
    gained = now - before
    assert gained["finished_length_total"] == gained["requests_total"] == len(asked)
    assert not sum(n for series, n in gained.items() if series.startswith("failures_total"))
    for name in ("request_seconds", "request_queue_seconds", "time_to_first_token_seconds"):
        assert 0 < gained[f"{name}_sum"] < len(asked) * seconds


def test_no_clock_that_can_jump_is_read() -> None:
    """Timeouts, queue times and health count on the monotonic clock."""
    sources = [*(ROOT / "runtime").glob("*.py"), *(ROOT / "triton_repo").glob("*.py")]
    assert len(sources) > 20
    wall_clock = re.compile(r"time\.time\(|datetime|time\.localtime|time\.gmtime")
    assert not [path.name for path in sources if wall_clock.search(path.read_text())]
