"""The watchdog as a process, on a server that is only a sleep."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from triton_repo import watchdog
from triton_repo.watchdog import BEAT, GOODBYE


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def start(server: subprocess.Popen[bytes], timeout_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, watchdog.__file__, str(server.pid), str(timeout_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def test_a_decoder_that_dies_takes_the_server_along(server: subprocess.Popen[bytes]) -> None:
    with start(server, 60) as dog:
        assert dog.stdin is not None
        assert dog.stdout is not None
        dog.stdin.write(BEAT)
        dog.stdin.close()  # what the end of a process does
        assert server.wait(10) == -signal.SIGTERM
        assert b"the decoder's process died: ending the server" in dog.stdout.readline()
        dog.kill()


def test_a_decoder_that_hangs_takes_the_server_along(server: subprocess.Popen[bytes]) -> None:
    with start(server, 1.0) as dog:
        assert dog.stdin is not None
        for _ in range(8):
            dog.stdin.write(BEAT)
            time.sleep(0.2)
            assert server.poll() is None
        assert server.wait(10) == -signal.SIGTERM
        dog.kill()


def test_a_decoder_that_says_goodbye_is_left_alone(server: subprocess.Popen[bytes]) -> None:
    with start(server, 60) as dog:
        assert dog.stdin is not None
        dog.stdin.write(BEAT + GOODBYE)
        assert dog.wait(10) == 0
    assert server.poll() is None
