"""Random and mutated requests: each is answered by a result or a clear error, and nothing breaks.

`make soak` sends 20,000; without it they are few.
"""

from __future__ import annotations

import http.client
import json
import os
from typing import Any

import pytest
import tritonclient.grpc as grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.triton_repo.clients import GrpcStream, RefusedError, eventually, idle
from triton_repo.contract import INPUTS, MODEL_NAME
from triton_repo.server import Address

pytestmark = pytest.mark.slow

PER_EXAMPLE = 10  # requests; drawing one list is cheaper than drawing ten examples
NUM_REQUESTS = 20_000 if "DSPARK_SOAK" in os.environ else 300
fuzzed = settings(
    max_examples=NUM_REQUESTS // 2 // PER_EXAMPLE,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 1e-300, 1e300])
    | st.floats()
    | st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
plausible = {
    "text_input": st.text(max_size=40),
    "prompt_ids": st.lists(st.integers(-1, 330), max_size=8),
    "temperature": st.floats(0, 3),
    "top_k": st.integers(0, 400),
    "top_p": st.floats(0, 1),
    "seed": st.integers(0, 2**31),
    "stop_words": st.lists(st.text(max_size=4), max_size=3),
    "bad_words": st.lists(st.text(max_size=4), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 330), st.floats(-100, 100)).map(json.dumps),
    "repetition_penalty": st.floats(0, 3),
    "stream": st.booleans(),
    "return_log_probs": st.booleans(),
    "end_id": st.integers(0, 330),
}
requests = st.fixed_dictionaries({"max_tokens": st.integers(-1, 12)}, optional=plausible).flatmap(
    lambda fields: (
        st.dictionaries(st.sampled_from(sorted(INPUTS)) | st.text(), values, max_size=2)
        .map(lambda wild: fields | wild)
        .filter(lambda merged: isinstance(merged["max_tokens"], int))
    )  # a default would take long
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON of a request, most often with a piece cut out, doubled or replaced."""
    body = json.dumps(draw(requests), ensure_ascii=draw(st.booleans())).encode(
        errors="surrogatepass"
    )
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(body)))
        end = draw(st.integers(start, len(body)))
        middle = draw(st.sampled_from([b"", body[start:end] * 2]) | st.binary(max_size=8))
        body = body[:start] + middle + body[end:]
    return body


@fuzzed
@given(
    work=st.lists(st.tuples(st.booleans(), bodies()), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE)
)
def test_http(address: Address, work: list[tuple[bool, bytes]]) -> None:
    connection = http.client.HTTPConnection(address.client_host, address.http_port, timeout=60)
    for stream, body in work:
        url = f"/v2/models/{MODEL_NAME}/{'generate_stream' if stream else 'generate'}"
        connection.request("POST", url, body)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line]
        assert events, (response.status, body)
        for event in events:
            check_answer(event, body)
        if response.status != 200:
            assert "error" in events[-1], body
    connection.close()


def check_answer(event: dict[str, Any], request: Any) -> None:
    if "error" in event:
        assert event["error"], request
        assert "Traceback" not in event["error"], request
        assert "Error:" not in event["error"], (event, request)  # an exception of ours got out
    else:
        assert isinstance(event["text_output"], str), request


def tensor(name: str, value: Any) -> Any:
    """A tensor whose shape, type and data need not fit each other."""
    shape, datatype, data = value
    made = grpc.InferInput(name, shape, datatype)
    made._raw_content = data
    return made


tensors = st.dictionaries(
    st.sampled_from(sorted(INPUTS)) | st.text(min_size=1, max_size=8),
    st.tuples(
        st.sampled_from([[1, 1], [1], [1, 2], [2, 1], [1, 0], [], [0, 1], [1, 1, 1], [-1, 1]]),
        st.sampled_from(["INT32", "BOOL", "FP32", "BYTES", "UINT64", "INT64", "FP64", "NONE"]),
        st.sampled_from([b"", b"\1", b"\5\0\0\0", b"\1\0\0\0a", b"\0" * 8, b"\xff" * 8])
        | st.binary(max_size=12),
    ),
    max_size=4,
)


@fuzzed
@given(
    work=st.lists(
        st.tuples(tensors, st.dictionaries(st.text("ab"), st.integers(0, 9), max_size=1)),
        min_size=PER_EXAMPLE,
        max_size=PER_EXAMPLE,
    )
)
def test_grpc(address: Address, work: list[tuple[dict[str, Any], dict[str, int]]]) -> None:
    with GrpcStream(address) as stream:
        for fields, parameters in work:
            inputs = [tensor(name, value) for name, value in fields.items()]
            stream.send_tensors(inputs, parameters)
            try:
                result, final = stream.next_response()
                while not final:
                    result, final = stream.next_response()
                assert result.as_numpy("text_output") is not None
            except RefusedError as refusal:
                check_answer({"error": refusal.args[0]}, fields)


def test_the_server_serves_on(address: Address) -> None:
    """After all that; and the fixture finds it idle, with every block free."""
    eventually(lambda: idle(address), within_s=30)
