"""What a client notes of a request."""

from __future__ import annotations

from bench.client import Timing


def test_tokens_that_had_come_at_a_time() -> None:
    timing = Timing(start_s=0.5, times_s=[1.0, 2.0, 4.0], tokens=[1, 4, 6])
    assert [timing.tokens_until(at) for at in (0.9, 1.0, 3.9, 4.0, 9.0)] == [0, 1, 4, 6, 6]
    assert timing.num_output_tokens == 6
