"""What a long command says while it works."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(message: str) -> None:
    """Print one line of progress, at once, to standard error: results go to standard output."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def step(message: str) -> Iterator[None]:
    """Announce a step and say how long it took."""
    say(f"{message} ...")
    start = time.monotonic()
    yield
    say(f"  done in {time.monotonic() - start:.0f} s")
