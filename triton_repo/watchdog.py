"""Ends a tritonserver whose decoder died or hangs; a process of its own, started by model.py.

Triton 2.51 calls itself ready when the process of a Python model is gone, and requests in flight
wait for ever. Ended, the server's clients get an error, and whatever supervises it starts it again.

    python watchdog.py SERVER_PID TIMEOUT_S

The decoder's process writes BEAT to standard input while all is well and GOODBYE before it ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

BEAT, GOODBYE = b".", b"q"
MERCY_S = 5.0  # from asking the server to end to making it


def watch(timeout_s: float) -> str | None:
    """Returns what happened to the decoder, or None when it said goodbye."""
    while True:
        readable, _, _ = select.select([0], [], [], timeout_s)
        if not readable:
            return f"gave no sign of life for {timeout_s:g} s"
        beats = os.read(0, 4096)
        if not beats:
            return "died"
        if beats.endswith(GOODBYE):
            return None


def main() -> None:
    """Watch, then end the server."""
    server, timeout_s = int(sys.argv[1]), float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server
    fate = watch(timeout_s)
    if fate is None:
        return
    print(f"ERROR dspark: the decoder's process {fate}: ending the server", flush=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGTERM)
        time.sleep(MERCY_S)
        os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    main()
