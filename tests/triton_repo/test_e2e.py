"""A tiny model behind the real tritonserver: every way in, every way out, nothing left behind."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc

from tests.triton_repo.clients import (
    ADMIN_KEY,
    CONTEXT_TOKENS,
    GrpcStream,
    RefusedError,
    Reply,
    children_of,
    decoder_of,
    eventually,
    free_address,
    generate,
    generate_stream,
    infer,
    living_processes,
    metrics,
    post,
    resident_bytes,
    settled_metrics,
)
from triton_repo.package import package
from triton_repo.server import ADMIN_HEADER, GRPC_HEADER_PREFIX, Address, TritonServer

pytestmark = pytest.mark.slow


def test_generate_takes_and_gives_plain_json(address: Address) -> None:
    reply = generate(address, text_input="The quick brown fox", max_tokens=8, ignore_eos=True)
    assert reply["finish_reason"] == "length"
    assert reply["num_output_tokens"] == 8
    assert reply["num_input_tokens"] > 4  # the chat template adds some
    assert "output_ids" not in reply
    raw = generate(
        address, text_input="The quick brown fox", raw_prompt=True, max_tokens=1, ignore_eos=True
    )
    assert 0 < raw["num_input_tokens"] < reply["num_input_tokens"]


def test_every_way_in_gives_the_same_text(address: Address) -> None:
    fields = {
        "text_input": "the dog sleeps under the tree",
        "raw_prompt": True,
        "max_tokens": 24,
        "ignore_eos": True,
        "return_output_ids": True,
    }
    whole = generate(address, **fields)
    events = list(generate_stream(address, **fields))
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert len(events) > 1
    assert [event["finish_reason"] for event in events] == [""] * (len(events) - 1) + ["length"]
    with GrpcStream(address) as stream:
        reply = stream.ask(**fields, stream=True)
        assert not stream.has_more(within_s=0.3)
        single = stream.ask(**fields)
    assert reply.text == single.text == whole["text_output"]
    assert reply.pieces > single.pieces == 1
    assert reply.output_ids == single.output_ids == whole["output_ids"]
    assert len(reply.output_ids) == reply.num_output_tokens == 24


def test_token_ids_go_in_directly(address: Address) -> None:
    fields = {"max_tokens": 8, "ignore_eos": True, "return_output_ids": True}
    prompt_ids = [5, 17, 260, 300]
    first = generate(address, prompt_ids=prompt_ids, **fields)
    assert first["num_input_tokens"] == 4
    with GrpcStream(address) as stream:
        longer = stream.ask(prompt_ids=prompt_ids + first["output_ids"][:4], **fields)
    assert longer.output_ids[:4] == first["output_ids"][4:]


def test_stop_words_end_the_text_in_front_of_them(address: Address) -> None:
    fields = {"text_input": "oak tree", "raw_prompt": True, "max_tokens": 40, "ignore_eos": True}
    text = generate(address, **fields)["text_output"]
    stop = text[len(text) // 2 :][:3]
    reply = generate(address, **fields, stop_words=["never in there", stop])
    assert reply["finish_reason"] == "stop"
    assert reply["text_output"] == text[: text.index(stop)]


def test_a_seed_fixes_the_text(address: Address) -> None:
    fields = {"text_input": "the", "max_tokens": 16, "temperature": 1.5, "top_p": 0.9}
    texts = [
        generate(address, **fields, seed=seed, acceptance="coupled")["text_output"]
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_last_response_tells_what_it_took(address: Address) -> None:
    reply = generate(address, text_input="the dog", max_tokens=20, ignore_eos=True)
    assert 0 <= reply["total_accepted_draft_tokens"] <= reply["total_draft_tokens"]
    assert reply["total_draft_tokens"] > 0
    rate = reply["total_accepted_draft_tokens"] / reply["total_draft_tokens"]
    assert reply["acceptance_rate"] == pytest.approx(rate)
    times = [reply[f"{name}_s"] for name in ("time_in_queue", "time_to_first_token", "total_time")]
    assert 0 <= times[0] <= times[1] <= times[2] < 30
    plain = generate(address, text_input="the dog", max_tokens=20, disable_spec_decode=True)
    assert plain["total_draft_tokens"] == plain["acceptance_rate"] == 0
    assert plain["text_output"] in reply["text_output"]
    *first, last = generate_stream(address, text_input="the dog", max_tokens=20, ignore_eos=True)
    assert not any("total_time_s" in event for event in first)
    assert last["total_draft_tokens"] == reply["total_draft_tokens"]


def test_penalties_bias_and_log_probs_reach_the_model(address: Address) -> None:
    fields = {"prompt_ids": [5, 17, 260], "max_tokens": 12, "ignore_eos": True}
    asked = {"return_output_ids": True, "return_log_probs": True}
    plain = generate(address, **fields, **asked)
    ids = plain["output_ids"]
    log_probs = plain["output_log_probs"]
    assert len(log_probs) == 12
    assert max(log_probs) < 0
    assert plain["cum_log_probs"] == pytest.approx(sum(log_probs), abs=1e-3)
    bias = json.dumps({str(token): -100 for token in set(ids)})
    assert not set(ids) & set(generate(address, **fields, **asked, logit_bias=bias)["output_ids"])
    fresh = generate(address, **fields, **asked, presence_penalty=2, frequency_penalty=2)
    assert len(set(fresh["output_ids"])) >= len(set(ids))
    with GrpcStream(address) as stream:
        reply = stream.ask(**fields, **asked, stream=True, repetition_penalty=1.5, min_tokens=3)
        off = stream.ask(
            **fields, **asked, repetition_penalty=1.5, min_tokens=3, num_draft_tokens=0
        )
    assert reply.output_ids == off.output_ids
    assert reply.outputs["cum_log_probs"] == pytest.approx(off.outputs["cum_log_probs"], abs=1e-3)


def test_the_prompt_may_come_back_in_front(address: Address) -> None:
    fields = {"text_input": "the dog", "max_tokens": 6, "return_output_ids": True}
    without = generate(address, **fields)
    whole = generate(address, **fields, exclude_input_in_output=False)
    assert whole["text_output"] == "the dog" + without["text_output"]
    assert whole["output_ids"][-6:] == without["output_ids"][-6:]
    assert len(whole["output_ids"]) == whole["num_input_tokens"] + len(without["output_ids"])
    bare = ["return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"]
    assert not set(generate(address, **fields, **dict.fromkeys(bare, False))) & {
        name.removeprefix("return_") for name in bare
    }


def test_a_batch_is_answered_row_by_row(address: Address) -> None:
    prompts = ["the dog", "a model drafts tokens", "fox"]
    lone = [generate(address, text_input=p, max_tokens=9, ignore_eos=True) for p in prompts]
    with GrpcStream(address) as stream:
        stream.send_rows(text_input=prompts, max_tokens=[9] * 3, ignore_eos=[True] * 3)
        replies, final = {}, False
        while not final:
            result, final = stream.next_response()
            replies[result.as_numpy("batch_index").item()] = result.as_numpy("text_output").item()
        assert [replies[i].decode() for i in range(3)] == [r["text_output"] for r in lone]
        stream.send_rows(text_input=prompts, max_tokens=[9, 0, 9], ignore_eos=[True] * 3)
        with pytest.raises(RefusedError, match="max_tokens must be at least 1, got 0"):
            stream.next_response()
        stream.send_rows(text_input=["a"] * 65, max_tokens=[1] * 65)
        with pytest.raises(RefusedError, match="batch-size must be <= 64"):
            stream.next_response()


def test_unary_calls_are_answered_without_waiting_for_each_other(address: Address) -> None:
    fields = {"text_input": "the dog", "ignore_eos": True}
    expected = generate(address, **fields, max_tokens=12)
    assert infer(address, **fields, max_tokens=12)["text_output"] == expected["text_output"]
    for wrong, sentence in (
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"stream": True}, "for stream ask the model dspark"),
        ({"text_input": b"a\xff"}, "not valid UTF-8"),
    ):
        with pytest.raises(RefusedError, match=sentence):
            infer(address, **(fields | wrong))
    done: list[int] = []

    def ask(max_tokens: int) -> None:
        infer(address, **fields, max_tokens=max_tokens)
        done.append(max_tokens)

    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(ask, 250)
        time.sleep(0.1)
        pool.submit(ask, 1).result()
        long.result()
    assert done == [1, 250]


def test_metrics_tell_what_happened(address: Address) -> None:
    """Deltas over a known piece of work; each number could be wrong by itself."""
    before = settled_metrics(address)
    fields = {"prompt_ids": [5, 17, 260], "max_tokens": 20, "ignore_eos": True}
    replies = [generate(address, **fields) for _ in range(3)]
    generate(address, **fields | {"max_tokens": 1}, temperature=1)
    for wrong in ({"max_tokens": 0}, {"prompt_ids": [320]}):
        with pytest.raises(RefusedError):
            generate(address, **fields | wrong)
    gained = settled_metrics(address) - before
    assert gained["requests_total"] == gained["finished_length_total"] == 4
    assert gained["prompt_tokens_total"] == gained["request_prompt_tokens_sum"] == 12
    assert gained["output_tokens_total"] == gained["request_output_tokens_sum"] == 61
    assert gained['failures_total{kind="invalid"}'] == 2
    assert gained['failures_total{kind="internal"}'] == 0
    accepted = sum(reply["total_accepted_draft_tokens"] for reply in replies)
    verified = sum(reply["total_draft_tokens"] for reply in replies)
    assert gained["accepted_draft_tokens_total"] == accepted
    assert gained["verified_draft_tokens_total"] == verified
    for name, total in (("accepted", accepted), ("verified", verified)):
        at = [n for series, n in gained.items() if series.startswith(f"{name}_at_position_total{{")]
        assert sum(at) == total
    for name, count in (
        ("request_queue_seconds", 4),
        ("time_to_first_token_seconds", 4),
        ("request_seconds", 4),
        ("inter_token_seconds", 3),  # one token has no gaps
        ("accepted_length", 3),
    ):
        assert gained[f"{name}_count"] == count, name
        assert gained[f'{name}_bucket{{le="+Inf"}}'] == count, name
    times = sum(reply["time_to_first_token_s"] for reply in replies)
    assert times < gained["time_to_first_token_seconds_sum"] < times + 5
    steps = gained["steps_total"]
    assert gained["verifier_passes_total"] + gained["prefill_verifier_passes_total"] == steps
    split = sum(n for series, n in gained.items() if series.startswith("step_"))
    assert 0 < split < 1.5 * gained["request_seconds_sum"]  # a step goes on after its last output
    assert gained["step_verify_seconds_total"] > 0


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "prometheus-rules.yaml"])
def test_dashboard_and_alerts_ask_for_metrics_that_exist(name: str, address: Address) -> None:
    generate(address, prompt_ids=[5, 17, 260], max_tokens=20, ignore_eos=True)
    served = {series.split("{")[0] for series in settled_metrics(address)}
    named = set(re.findall(r"dspark_(\w+)", (Path("deploy") / name).read_text()))
    assert len(named) > 5
    assert not sorted(named - served)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads(Path("deploy/grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        assert panel["type"] == "timeseries"
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("empty prompt", {"text_input": ""}, "the prompt is empty.*at least 1"),
    ("no tokens wanted", {"text_input": "a", "max_tokens": 0}, "max_tokens.*at least 1, got 0"),
    ("fewer than none", {"text_input": "a", "max_tokens": -5}, "max_tokens.*at least 1, got -5"),
    (
        "prompt beyond the context",
        {"text_input": "dog " * 600},
        f"prompt may have at most {CONTEXT_TOKENS - 1} tokens, got \\d+",
    ),
    (
        "answer beyond the context",
        {"prompt_ids": [5] * 500, "max_tokens": 13},
        f"together may have at most {CONTEXT_TOKENS} tokens, got 500 \\+ 13",
    ),
    ("cold", {"text_input": "a", "temperature": -1}, "temperature.*at least 0.*got -1"),
    ("not a number", {"text_input": "a", "temperature": float("nan")}, "temperature.*got nan"),
    ("no probability", {"text_input": "a", "top_p": 0}, "top_p.*above 0.*got 0"),
    ("too much probability", {"text_input": "a", "top_p": 2}, "top_p.*at most 1.*got 2"),
    ("token out of range", {"prompt_ids": [320]}, "below the vocabulary size 320, got 320"),
    ("no prompt", {"max_tokens": 3}, "either text_input or prompt_ids, got neither"),
    (
        "10 MB of prompt",
        {"text_input": "a" * 10_000_000},
        "prompt may have at most 1048576 bytes, got 10000000",
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_gets_one_sentence(
    address: Address, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RefusedError, match=sentence) as refusal:
        generate(address, **fields)
    assert "\n" not in refusal.value.args[0]
    with pytest.raises(RefusedError, match=sentence):
        list(generate_stream(address, **fields))
    with GrpcStream(address) as stream:
        with pytest.raises(RefusedError, match=sentence):
            stream.ask(**fields)
        assert not stream.has_more(within_s=0.1)


def test_unknown_parameters_are_refused_with_the_known_ones(address: Address) -> None:
    sentence = "unknown parameter 'tempreature'.*temperature"
    with pytest.raises(RefusedError, match=sentence):
        generate(address, text_input="a", tempreature=1)
    with GrpcStream(address) as stream, pytest.raises(RefusedError, match=sentence):
        stream.ask(parameters={"tempreature": 1}, text_input="a")
    with GrpcStream(address) as stream, pytest.raises(RefusedError, match="tempreature"):
        stream.ask(text_input="a", tempreature=1)


def test_text_that_is_not_utf8_is_refused(address: Address) -> None:
    for body in (b'{"text_input": "a\xff"}', b'{"text_input": "a", "\xff": 1}'):
        with pytest.raises(RefusedError, match="not valid UTF-8"):
            post(address, "generate", body)
    with GrpcStream(address) as stream, pytest.raises(RefusedError, match="not valid UTF-8"):
        stream.ask(text_input=b"a\xff")
    with GrpcStream(address) as stream, pytest.raises(RefusedError, match=r"stop_words.*UTF-8"):
        stream.ask(text_input="a", stop_words=[b"\xff"])


def test_what_a_prompt_says_is_not_logged(server: TritonServer, address: Address) -> None:
    secret = "my PIN is 8154"
    generate(address, text_input=secret, max_tokens=2)
    for wrong in ({"max_tokens": 0}, {"stop_words": [secret] * 100}):
        with pytest.raises(RefusedError):
            generate(address, **{"text_input": secret} | wrong)
    assert "8154" not in server.log_path.read_text()


def test_cancelling_a_grpc_stream_ends_the_request(address: Address) -> None:
    before = settled_metrics(address)
    with GrpcStream(address) as stream:
        stream.send(prompt_ids=[5], max_tokens=CONTEXT_TOKENS - 1, ignore_eos=True, stream=True)
        stream.next_response()
        stream.cancel()
    eventually(lambda: (metrics(address) - before)["finished_cancelled_total"] == 1)
    assert 0 < (metrics(address) - before)["output_tokens_total"] < CONTEXT_TOKENS // 2


def test_disconnecting_from_an_http_stream_ends_the_request(address: Address) -> None:
    before = settled_metrics(address)
    body = b'{"prompt_ids": [5], "max_tokens": 511, "ignore_eos": true, "stream": true}'
    head = "POST /v2/models/dspark/generate_stream HTTP/1.1\r\nHost: test\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((address.client_host, address.http_port)) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(1024)
    eventually(lambda: (metrics(address) - before)["finished_cancelled_total"] == 1)


def test_many_streams_end_exactly_once_with_the_text_of_a_lone_request(
    server: TritonServer, address: Address
) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randrange(1, 60))] for _ in range(40)]
    work = [(rng.randrange(40), rng.randrange(1, 40)) for _ in range(200)]
    lone: dict[int, Reply] = {}
    with GrpcStream(address) as stream:
        for i, prompt in enumerate(prompts):
            lone[i] = stream.ask(prompt_ids=prompt, max_tokens=40, return_output_ids=True)
    before, resident_before = settled_metrics(address), resident_bytes(server)

    def run(share: list[tuple[int, int]]) -> list[Reply]:
        with GrpcStream(address) as stream:
            replies = [
                stream.ask(
                    prompt_ids=prompts[i],
                    max_tokens=max_tokens,
                    return_output_ids=True,
                    stream=True,
                )
                for i, max_tokens in share
            ]
            assert not stream.has_more(within_s=0.2)
            return replies

    shares = [work[k::16] for k in range(16)]
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(run, shares))
    for share, replies in zip(shares, results, strict=True):
        for (i, max_tokens), reply in zip(share, replies, strict=True):
            assert reply.output_ids == lone[i].output_ids[:max_tokens]
            # A cut inside a character shows as one that is not there in the longer text.
            assert lone[i].text.startswith(reply.text.rstrip("\ufffd"))
            ended = len(lone[i].output_ids) <= max_tokens and lone[i].finish_reason == "eos"
            assert reply.finish_reason == ("eos" if ended else "length")
    counted = settled_metrics(address) - before
    assert counted["requests_total"] == 200
    assert counted["output_tokens_total"] == sum(
        reply.num_output_tokens for replies in results for reply in replies
    )
    assert resident_bytes(server) < 1.05 * resident_before


def test_endpoints_that_change_the_server_are_closed(
    server: TritonServer, address: Address
) -> None:
    url = f"{address.http_url}/v2/repository/index"
    for headers, status in (({}, 403), ({ADMIN_HEADER: "guess"}, 403)):
        request = urllib.request.Request(url, b"{}", headers)
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(request, timeout=10)
        assert refusal.value.code == status
    with grpc.InferenceServerClient(f"{address.client_host}:{address.grpc_port}") as client:
        assert client.is_server_ready()
        with pytest.raises(grpc.InferenceServerException, match="restricted"):
            client.register_system_shared_memory("mine", "/dev/shm/x", 8)
        opened = client.get_model_repository_index(
            headers={GRPC_HEADER_PREFIX + ADMIN_HEADER: ADMIN_KEY}
        )
    assert {model.name for model in opened.models} == {"dspark", "dspark_unary"}


@contextmanager
def serving(build: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Address, str]]:
    """`dspark serve` in a process of its own, where it listens, and the command it suggests."""
    package(build)
    address = free_address()
    command = [sys.executable, "-m", "cli.main", "serve", "--name", build.name, *options]
    command += ["--build-dir", str(build.parent), "--num-threads", "1"]
    for protocol, port in address.ports.items():
        command += [f"--{protocol}-port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        lines = [run.stdout.readline()]
        while "curl" not in lines[-1]:
            lines.append(run.stdout.readline())
            assert lines[-1], f"dspark serve ended early: {lines}"
        (group,) = {os.getpgid(pid) for pid in children_of(run.pid)}
        assert shared_memory_of(run.pid)
        try:
            yield run, address, lines[-1]
        finally:
            run.kill()  # which a test that fails leaves running
    eventually(lambda: not living_processes(group))  # the server, its stubs and their watchdog
    assert not shared_memory_of(run.pid)


def shared_memory_of(launcher_pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"dspark-{launcher_pid}-*"))


LONG = {
    "prompt_ids": [5],
    "max_tokens": CONTEXT_TOKENS - 1,
    "ignore_eos": True,
    "stream": True,
}


def test_sigterm_lets_running_requests_finish_and_leaves_no_process(tiny_build: Path) -> None:
    """Without a drafter, too, a model is served."""
    with serving(tiny_build) as (serve, address, suggested):
        shown = subprocess.run(
            suggested, shell=True, capture_output=True, text=True, check=True, timeout=60
        )
        assert '"text_output"' in shown.stdout
        with GrpcStream(address) as running, GrpcStream(address) as late:
            running.send(**LONG)
            running.next_response()
            serve.send_signal(signal.SIGTERM)
            eventually(lambda: not is_accepted(late))
            assert to_the_end(running).as_numpy("finish_reason").item() == b"length"
        assert serve.wait(timeout=60) == 0


def is_accepted(stream: GrpcStream) -> bool:
    try:
        stream.ask(prompt_ids=[5], max_tokens=1)
    except RefusedError:
        return False
    return True


def test_overload_and_overtime_are_unavailable_and_a_killed_decoder_ends_all(
    tiny_build: Path,
) -> None:
    """Triton alone would go on calling itself ready, and the streams would wait for ever."""
    options = "--max-batch-requests 1 --max-queued-requests 5 --request-timeout-s 1.5"
    with serving(tiny_build, *options.split()) as (serve, address, _):
        (server,) = children_of(serve.pid)
        decoder = decoder_of(server)
        with GrpcStream(address) as stream:
            for _ in range(12):
                stream.send(**LONG)
            ended = Counter(outcome(stream) for _ in range(12))
        full = ended["the queue holds its limit of 5 requests: try again later"]
        late = ended["the request took longer than 1.5 s"]
        assert full >= 1
        assert late >= 1
        assert full + late + ended["answered"] == 12
        eventually(lambda: metrics(address)['failures_total{kind="unavailable"}'] == full + late)
        assert metrics(address)["finished_timeout_total"] == late
        check_that_all_end(address, lambda: os.kill(decoder, signal.SIGKILL))
        assert serve.stderr is not None
        assert serve.wait(timeout=30) == 1
        assert "the decoder's process died: ending the server" in serve.stderr.read()


def test_a_decoder_that_hangs_ends_the_streams_and_the_server(tiny_build: Path) -> None:
    with serving(tiny_build, "--stall-timeout-s", "3") as (serve, address, _):
        (server,) = children_of(serve.pid)
        decoder = decoder_of(server)
        check_that_all_end(address, lambda: os.kill(decoder, signal.SIGSTOP))
        assert serve.stderr is not None
        assert serve.wait(timeout=30) == 1
        assert "the server ended" in serve.stderr.read()


def check_that_all_end(address: Address, fault: Callable[[], None]) -> None:
    """Clients of every kind, who have an answer under way all the time, are told of a fault."""
    fields = {"prompt_ids": [5], "max_tokens": 20, "ignore_eos": True}

    def ask_on(ask: Callable[[], object]) -> None:
        while True:
            ask()

    with GrpcStream(address) as stream, ThreadPoolExecutor() as pool:
        ways = (
            lambda: generate(address, **fields),
            lambda: infer(address, **fields),
            lambda: list(generate_stream(address, **fields)),
            lambda: stream.ask(**fields, stream=True),
        )
        before = metrics(address)["requests_total"]
        clients = [pool.submit(ask_on, ask) for ask in ways]
        eventually(lambda: metrics(address)["requests_total"] >= before + len(ways))
        fault()
        for client in clients:
            with pytest.raises((RefusedError, OSError, http.client.HTTPException)) as told:
                client.result(timeout=30)
            assert "queue holds" not in str(told.value)


def outcome(stream: GrpcStream) -> str:
    try:
        to_the_end(stream)
    except RefusedError as refusal:
        return str(refusal.args[0])
    return "answered"


def to_the_end(stream: GrpcStream) -> Any:
    """The final result of what runs on a stream. Raises RefusedError."""
    while True:
        result, final = stream.next_response()
        if final:
            return result
