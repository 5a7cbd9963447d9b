"""The served model for clients that only know `infer()`: one request, one response.

Triton refuses unary calls of a decoupled model, so this one, which is not decoupled, forwards each
request to it inside the server and answers when the whole text is there. Nobody waits for another's
answer: the responses come through senders, from threads.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

sys.path[:0] = filter(None, os.environ.get("DSPARK_SITE_PACKAGES", "").split(os.pathsep))

import triton_python_backend_utils as pb_utils  # noqa: E402

MODEL_NAME = "dspark"
MAX_REQUESTS = 256  # each holds a thread that sleeps; more of them wait here


class TritonPythonModel:
    """What Triton's Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the threads."""
        self._outputs = [output["name"] for output in json.loads(args["model_config"])["output"]]
        self._threads = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="dspark-unary")

    def execute(self, requests: list[Any]) -> None:
        """Take requests; their answers come through their response senders."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                parameters = request.parameters()
            except UnicodeDecodeError as error:
                message = f"a parameter's name is not valid UTF-8: {error}"
                _send(sender, _failure(message, "INVALID_ARG"))
                continue
            # Copied, since Triton may take back the request's memory once this returns.
            inputs = [
                pb_utils.Tensor(tensor.name(), tensor.as_numpy().copy())
                for tensor in request.inputs()
            ]
            names = set(request.requested_output_names()) or set(self._outputs)
            self._threads.submit(self._answer, inputs, parameters, names, sender)

    def _answer(self, inputs: list[Any], parameters: str, names: set[str], sender: Any) -> None:
        try:
            response = self._forward(inputs, parameters, names)
        except Exception as error:
            response = _failure(f"the request could not be forwarded: {error}", "INTERNAL")
        _send(sender, response)

    def _forward(self, inputs: list[Any], parameters: str, names: set[str]) -> Any:
        if any(tensor.name() == "stream" and tensor.as_numpy().any() for tensor in inputs):
            return _failure(
                f"this model answers once: for stream ask the model {MODEL_NAME}", "INVALID_ARG"
            )
        request = pb_utils.InferenceRequest(
            model_name=MODEL_NAME,
            inputs=inputs,
            requested_output_names=self._outputs,
            parameters=json.loads(parameters or "{}"),
        )
        tensors: list[Any] = []
        for response in request.exec(decoupled=True):  # the last may be empty
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            tensors += [t for t in response.output_tensors() if t.name() in names]
        return pb_utils.InferenceResponse(tensors)

    def finalize(self) -> None:
        """Wait for the answers that are under way."""
        self._threads.shutdown()


def _send(sender: Any, response: Any) -> None:
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _failure(message: str, code: str) -> Any:
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(error=error)
