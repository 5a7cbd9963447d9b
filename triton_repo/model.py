"""The served model: glue between Triton's Python backend and the bridge.

Runs inside Triton's Python stub, from a packaged repository, where `runtime` and `triton_repo` lie
beside this file. The stub knows neither a virtual environment nor PYTHONPATH, so folders with
third-party packages come in the environment variable DSPARK_SITE_PACKAGES (os.pathsep between
them); DSPARK_CONFIG names a JSON file of RuntimeConfig overrides.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    *filter(None, os.environ.get("DSPARK_SITE_PACKAGES", "").split(os.pathsep)),
]

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402

from runtime.config import RuntimeConfig, load_config  # noqa: E402
from runtime.decoder import Decoder  # noqa: E402
from runtime.metrics import HISTOGRAMS  # noqa: E402
from triton_repo.bridge import Answer, Bridge, Failure  # noqa: E402
from triton_repo.contract import OUTPUTS  # noqa: E402
from triton_repo.watchdog import BEAT, GOODBYE  # noqa: E402

_ERROR_CODES = {  # attributes of TritonError, which does not exist before `initialize`
    "invalid": "INVALID_ARG",
    "unavailable": "UNAVAILABLE",
    "internal": "INTERNAL",
    "cancelled": "CANCELLED",
}
_NUMPY_TYPES = {"STRING": np.object_, "INT32": np.int32, "FP32": np.float32}


class TritonSender:
    """A bridge's `Sender` over Triton's response sender."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, message: Answer | Failure, final: bool) -> None:
        """Send one response; the final one also lets go of Triton's sender."""
        sender = self._sender
        if final:
            self._sender = None
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        sender.send(_response(message), flags=flags)

    def is_cancelled(self) -> bool:
        """Whether Triton saw the client cancel or disconnect."""
        return self._sender is not None and self._sender.is_cancelled()


def _response(message: Answer | Failure) -> Any:
    if isinstance(message, Failure):
        code = getattr(pb_utils.TritonError, _ERROR_CODES[message.kind])
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(message.message, code))
    tensors = []
    for name, tensor in OUTPUTS.items():
        value = getattr(message, name)
        if value is None:
            continue
        values = value if tensor.is_list else [value]
        array = np.array([values], dtype=_NUMPY_TYPES[tensor.datatype])
        tensors.append(pb_utils.Tensor(name, array))
    return pb_utils.InferenceResponse(tensors)


class MetricsExport:
    """The decoder's numbers as Prometheus metrics: counters where a name ends in `_total`."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}  # a metric lives no longer than its family
        self._metrics: dict[str, Any] = {}
        self._values: dict[str, float] = {}
        for name, histogram in HISTOGRAMS.items():
            family = self._family(name, pb_utils.MetricFamily.HISTOGRAM, histogram.help)
            self._metrics[name] = family.Metric(labels={}, buckets=list(histogram.buckets))

    def update(self, values: dict[str, float]) -> None:
        """Export what changed; a name that appears for the first time is registered."""
        for series, value in values.items():
            if series not in self._metrics:
                self._register(series)
            change = value - self._values.get(series, 0)
            if change and series.split("{")[0].endswith("_total"):
                self._metrics[series].increment(change)
            elif change:
                self._metrics[series].set(value)
            self._values[series] = value

    def observe(self, observations: list[tuple[str, float]]) -> None:
        """Add to the histograms."""
        for name, value in observations:
            self._metrics[name].observe(value)

    def _register(self, series: str) -> None:
        name = series.split("{")[0]
        is_counter = name.endswith("_total")
        kind = pb_utils.MetricFamily.COUNTER if is_counter else pb_utils.MetricFamily.GAUGE
        labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
        family = self._family(name, kind, name.replace("_", " "))
        self._metrics[series] = family.Metric(labels=labels)

    def _family(self, name: str, kind: Any, description: str) -> Any:
        if name not in self._families:
            self._families[name] = pb_utils.MetricFamily(
                name=f"dspark_{name}", description=description, kind=kind
            )
        return self._families[name]


def _check_numpy() -> None:
    """Refuse a stub that was compiled against numpy 1 where numpy 2 is installed.

    It would hand out wrong data without a word. `dspark serve` brings a stub that fits.
    """
    if int(np.__version__.split(".")[0]) < 2:
        return
    values = [1, 2, 3]
    if pb_utils.Tensor.from_dlpack("probe", np.array(values)).as_numpy().tolist() != values:
        raise RuntimeError(
            f"this Triton's Python backend gives wrong data with numpy {np.__version__}: "
            "install numpy<2 in its environment, or start it with `dspark serve`"
        )


class Watchdog:
    """Tells `triton_repo.watchdog` that this process lives."""

    def __init__(self, timeout_s: float) -> None:
        python = os.environ.get("DSPARK_PYTHON", "python3")
        script = HERE / "triton_repo" / "watchdog.py"
        command = [python, str(script), str(os.getppid()), str(timeout_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)

    def beat(self, sign: bytes = BEAT) -> None:
        """Write a sign of life, or of farewell."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(sign)


def _end_server() -> None:
    """End the tritonserver that started this stub.

    Without its decoder it would go on calling itself ready (2.51 does, even when the stub is gone);
    ended, whatever supervises it starts it again.
    """
    logging.getLogger("dspark").error("the decoder has stopped: ending the server")
    os.kill(os.getppid(), signal.SIGTERM)


class TritonPythonModel:
    """What Triton's Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the engines beside this file and start decoding."""
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        _check_numpy()
        path = os.environ.get("DSPARK_CONFIG")
        config = load_config(Path(path)) if path else RuntimeConfig()
        decoder = Decoder(HERE / "engines", HERE / "tokenizer", config)
        _ = decoder.tokenizer.has_chat_template  # loads it now, not in the first request
        metrics = MetricsExport()
        self._watchdog = Watchdog(config.stall_timeout_s)

        def on_tick() -> None:
            self._watchdog.beat()
            metrics.update(decoder.metrics() | self._bridge.metrics())
            metrics.observe(decoder.take_observations())

        self._bridge = Bridge(
            decoder, config.max_prompt_bytes, on_tick=on_tick, on_death=_end_server
        )

    def execute(self, requests: list[Any]) -> None:
        """Take requests; their answers come through their response senders."""
        for request in requests:
            sender = TritonSender(request.get_response_sender())
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            try:
                parameters = request.parameters()
            except UnicodeDecodeError as error:
                self._bridge.refuse(f"a parameter's name is not valid UTF-8: {error}", sender)
            else:
                self._bridge.accept(tensors, parameters, sender)

    def finalize(self) -> None:
        """End every request and free the engines."""
        self._bridge.close()
        self._watchdog.beat(GOODBYE)
