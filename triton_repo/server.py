"""Starts, watches and stops a tritonserver on a packaged repository."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from runtime.config import RuntimeConfig
from triton_repo.contract import MODEL_NAME
from triton_repo.installation import InstallationError, prepare_installation

READY_TIMEOUT_S = 300.0  # large engines take long to load
UNLOAD_TIMEOUT_S = 10.0  # what models get to end, once no request runs or the time is over
ADMIN_HEADER = "dspark-admin-key"
GRPC_HEADER_PREFIX = "triton-grpc-protocol-"  # that Triton puts before it for gRPC
# Endpoints that change the server or reach its memory; clients of a model need none of them.
ADMIN_ENDPOINTS = "model-repository,shared-memory,trace,logging"
# Triton's HTTP threads copy a whole JSON body to their stack, so one larger than that kills the
# server. With the usual 8 MB, 10 MB of prompt would. Only address space is taken, not memory.
HTTP_STACK_BYTES = 256 << 20
_POLL_S = 0.1
_SHARED_MEMORY = Path("/dev/shm")  # where the Python backend and its stubs meet
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_QUOTED_LINES = 5
_QUOTED_BYTES = 1 << 16  # of the log's end, which may be long by then


class ServerError(Exception):
    """The server cannot run; the message says why in a sentence."""


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002

    @property
    def ports(self) -> dict[str, int]:
        """Ports by the protocol they serve."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}

    @property
    def client_host(self) -> str:
        """A host that a client on this machine can connect to."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host

    @property
    def http_url(self) -> str:
        """Base address of the HTTP endpoint."""
        return f"http://{self.client_host}:{self.http_port}"


def _check_ports(address: Address) -> None:
    for protocol, port in address.ports.items():
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address.host, port))
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise ServerError(
                    f"cannot listen for {protocol} on {address.host}:{port} ({reason}): "
                    f"choose another with --host and --{protocol}-port, or HOST= and "
                    f"{protocol.upper()}_PORT= for make"
                ) from error


@contextlib.contextmanager
def _stack_limit(wanted_bytes: int) -> Iterator[None]:
    """Give processes started inside this stack size for each of their threads, or what is allowed.

    Not "unlimited", even where that is set: threads would then get 2 MB.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    allowed = wanted_bytes if hard == resource.RLIM_INFINITY else min(wanted_bytes, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (allowed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


class TritonServer:
    """A running tritonserver; a context manager that leaves no process behind."""

    def __init__(
        self,
        repository: Path,
        work_dir: Path,
        address: Address | None = None,
        config: RuntimeConfig | None = None,
        admin_key: str = "",
    ) -> None:
        """Describe the server; nothing happens before `start`.

        Args:
            repository: a packaged model repository.
            work_dir: for the log, the backend folder and the configuration.
            address: where to listen.
            config: of the decoder.
            admin_key: value of the header ADMIN_HEADER that opens ADMIN_ENDPOINTS; one that nobody
                knows when empty.
        """
        self.repository = repository
        self.address = address or Address()
        self.log_path = work_dir / "serve.log"
        self._work_dir = work_dir
        self._config = config or RuntimeConfig()
        self._admin_key = admin_key or secrets.token_hex(16)
        # Of the files there; what a killed server leaves is found by it.
        self._shared_memory_prefix = f"dspark-{os.getpid()}-{secrets.token_hex(4)}-"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TritonServer:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the server, which is also that of its process group."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    def start(self) -> None:
        """Start the server process. Raises ServerError when it cannot run here."""
        if not (self.repository / MODEL_NAME / "config.pbtxt").is_file():
            raise ServerError(
                f"{self.repository} is no packaged model repository: run `make engines` first"
            )
        _check_ports(self.address)
        try:
            installation = prepare_installation(self._work_dir / "triton")
        except InstallationError as error:
            raise ServerError(str(error)) from error
        config_path = self._work_dir / "serve.json"
        config_path.write_text(self._config.to_json())
        command = [
            str(installation.tritonserver),
            f"--model-repository={self.repository}",
            f"--backend-directory={installation.backends}",
            f"--backend-config=python,shm-region-prefix-name={self._shared_memory_prefix}",
            "--model-control-mode=none",
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={math.ceil(self._config.drain_timeout_s)}",
            f"--http-restricted-api={ADMIN_ENDPOINTS}:{ADMIN_HEADER}={self._admin_key}",
            f"--grpc-restricted-protocol={ADMIN_ENDPOINTS}:{ADMIN_HEADER}={self._admin_key}",
        ]
        for protocol, port in self.address.ports.items():
            command += [f"--{protocol}-address={self.address.host}", f"--{protocol}-port={port}"]
        environment = {
            **os.environ,
            **installation.environment,
            "DSPARK_CONFIG": str(config_path.resolve()),
            "DSPARK_PYTHON": sys.executable,
        }
        with self.log_path.open("wb") as log, _stack_limit(HTTP_STACK_BYTES):
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is ours to handle
                preexec_fn=_end_with_parent,
            )

    def wait_until_ready(
        self, timeout_s: float = READY_TIMEOUT_S, stop: threading.Event | None = None
    ) -> None:
        """Return when the model answers, or `stop` is set.

        Raises ServerError when the server ends or takes longer.
        """
        deadline_s = time.monotonic() + timeout_s
        stop = stop or threading.Event()
        while not stop.wait(_POLL_S) and not self.is_ready():
            if self.exit_code() is not None:
                raise ServerError(f"the server ended while starting: {self.last_words()}")
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"the server was not ready within {timeout_s:g} s: {self.last_words()}"
                )

    def is_ready(self) -> bool:
        """Whether the server and its model are ready for requests."""
        url = f"{self.address.http_url}/v2/health/ready"
        try:
            with urllib.request.urlopen(url, timeout=1) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def exit_code(self) -> int | None:
        """Exit code of the server, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def last_words(self) -> str:
        """What the end of the log says, for a message; ends with the place of the whole log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _QUOTED_BYTES))
            text = log.read(_QUOTED_BYTES).decode(errors="replace")
        refusal = re.search(r"failed to load .*?: Internal: \w+: (.+?)(?:\\n|\"?$)", text, re.M)
        if refusal:  # what model.py raised
            return f"{refusal[1]} (log: {self.log_path})"
        telling = [line for line in text.splitlines() if _is_telling(line)]
        quoted = " | ".join(telling[-_QUOTED_LINES:]) or "it said nothing"
        return f"{quoted} (log: {self.log_path})"

    def stop(self, hurry: threading.Event | None = None) -> None:
        """End the server and everything it started; may be called again.

        New requests are refused and running ones get `drain_timeout_s` to finish, unless `hurry`
        is set, before or meanwhile.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        process.terminate()
        deadline_s = time.monotonic() + self._config.drain_timeout_s + UNLOAD_TIMEOUT_S
        hurry = hurry or threading.Event()
        while process.poll() is None and time.monotonic() < deadline_s and not hurry.wait(_POLL_S):
            pass
        # Stubs of a server that died or hangs stay behind in its process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in _SHARED_MEMORY.glob(f"{self._shared_memory_prefix}*"):
            path.unlink(missing_ok=True)


def _end_with_parent() -> None:
    """In the server's process, before it starts: have it stopped when this one is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_telling(line: str) -> bool:
    """Whether a log line says what went wrong: errors, but not those of a machine without a GPU."""
    if re.search(r"NVML|DCGM|CudaDriver|CUDA", line):
        return False
    return bool(re.match(r"E\d{4} |error|ERROR |.*(Error|Exception): ", line))
