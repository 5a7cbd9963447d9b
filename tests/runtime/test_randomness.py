"""The generator is Philox4x32-10 and its numbers are independent wherever they are looked at."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from runtime.randomness import Stream, draft_noise, exponentials, philox, round_noise, uniforms
from runtime.request import Request
from tests.runtime.fakes import make_request

# Each statistical test fails by chance with this probability; seeds are fixed, so a pass stays one.
FALSE_ALARM = 1e-6

ALL_ONES = 0xFFFFFFFF
# Known answers published with Random123 (kat_vectors, philox4x32 10).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_philox_gives_the_published_answers_for_many_counters_at_once() -> None:
    counters, keys, answers = (
        np.array(column, np.uint64).T for column in zip(*KNOWN_ANSWERS, strict=True)
    )
    np.testing.assert_array_equal(philox(counters, keys), answers)


def test_a_uniform_is_the_top_24_bits_of_its_counters_first_word() -> None:
    """Pins the counter layout: another layout would change every seeded text ever produced."""
    seed, position, round_ = 0x0123456789ABCDEF, 41, 7
    counter = np.array([position, Stream.ACCEPT, round_, 0], np.uint64)[:, None]
    key = np.array([seed & ALL_ONES, seed >> 32], np.uint64)[:, None]
    word = int(philox(counter, key)[0, 0])
    assert uniforms(seed, position, Stream.ACCEPT, round_) == (word >> 8) / 2**24


def test_all_arguments_broadcast_and_order_does_not_matter() -> None:
    """A number depends on its own arguments alone, not on what else is asked in the same call."""
    seeds, positions = np.arange(5)[:, None], np.arange(7)
    together = uniforms(seeds, positions, Stream.DRAFT, positions - positions % 3)
    assert together.shape == (5, 7)
    assert together.dtype == np.float32
    for seed in (0, 4):
        for position in (0, 5):
            alone = uniforms(seed, position, Stream.DRAFT, position - position % 3)
            assert alone.shape == ()
            assert alone == together[seed, position]


def test_seeds_of_64_bits_use_all_their_bits() -> None:
    seeds = np.array([1 << bit for bit in range(64)] + [0, 2**64 - 1], np.uint64)
    assert len(np.unique(uniforms(seeds, 3, Stream.TARGET))) == len(seeds)


def test_the_range_is_half_open() -> None:
    """1.0 would select past the end of a distribution; rounding up to it in fp32 is the trap."""
    values = uniforms(np.arange(400_000), 0, Stream.DRAFT)
    assert values.min() >= 0
    assert values.max() < 1
    assert (values * 2**24 % 1 == 0).all()


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("along", ["seeds", "positions", "rounds"])
def test_uniform_along_each_argument(stream: Stream, along: str) -> None:
    arguments = {"seeds": 12345, "positions": 100, "rounds": 99}
    values = uniforms(**{**arguments, along: np.arange(20_000)}, stream=stream)
    assert stats.kstest(values, "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("other", ["stream", "position", "round", "seed", "high_seed"])
def test_neighbours_are_independent(other: str) -> None:
    """Two numbers that differ in one argument are jointly uniform on the unit square."""
    seeds = np.arange(64_000)
    one = uniforms(seeds, 10, Stream.DRAFT, 9)
    two = {
        "stream": lambda: uniforms(seeds, 10, Stream.RESIDUAL, 9),
        "position": lambda: uniforms(seeds, 11, Stream.DRAFT, 9),
        "round": lambda: uniforms(seeds, 10, Stream.DRAFT, 8),
        "seed": lambda: uniforms(seeds + 64_000, 10, Stream.DRAFT, 9),
        "high_seed": lambda: uniforms(seeds + (1 << 32), 10, Stream.DRAFT, 9),
    }[other]()
    cells = (one * 16).astype(int) * 16 + (two * 16).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=256)).pvalue > FALSE_ALARM


def test_every_pair_of_streams_differs() -> None:
    """Two purposes sharing a stream is the bug that biases public engines."""
    values = [uniforms(np.arange(1000), 10, stream, 9) for stream in Stream]
    for i, one in enumerate(values):
        for two in values[:i]:
            assert abs(np.corrcoef(one, two)[0, 1]) < 0.16  # 5 sigma at 1000 pairs


def requests() -> list[Request]:
    return [
        make_request((1,), temperature=1.0, seed=2**64 - 1, acceptance="rejection"),
        make_request((1,), temperature=0.0, seed=3),
        make_request((1,), temperature=1.0, seed=3, acceptance="coupled"),
        make_request((1,), temperature=1.0, seed=3, acceptance="rejection"),
    ]


def test_draft_noise_knows_its_round_except_where_it_is_coupled() -> None:
    """Coupled drafts must meet the target's noise whichever round drafted them; the others must
    not meet noise that an earlier round has shown."""
    vocab = np.array([0, 2, 5])
    plain, greedy, coupled, same_seed = draft_noise(requests(), [10, 20, 30, 30], 3, 8, vocab)
    at = np.arange(11, 14)
    np.testing.assert_array_equal(plain.uniforms, uniforms(2**64 - 1, at, Stream.DRAFT, 10))
    np.testing.assert_array_equal(greedy.uniforms, np.zeros(3))
    np.testing.assert_array_equal(same_seed.uniforms, uniforms(3, at + 20, Stream.DRAFT, 30))
    for noise in (plain, greedy, same_seed):
        np.testing.assert_array_equal(noise.gumbel, np.zeros((3, 1)))
    assert (coupled.uniforms < 0).all()
    for k in range(3):
        expected = -np.log(exponentials(3, 31 + k, 8)[vocab])
        np.testing.assert_array_equal(coupled.gumbel[k], expected)


def test_round_noise_gives_each_request_its_own_streams() -> None:
    """Whatever else is in the batch, and however many tokens each request verifies."""
    plain, greedy, coupled, none = round_noise(requests(), [10, 20, 30, 40], [2, 3, 1, 0])
    seed = 2**64 - 1
    np.testing.assert_array_equal(plain.coins, uniforms(seed, [11, 12], Stream.ACCEPT, 10))
    np.testing.assert_array_equal(plain.tokens[:2], uniforms(seed, [11, 12], Stream.RESIDUAL))
    assert plain.tokens[2] == uniforms(seed, 13, Stream.TARGET)
    for noise in (greedy, coupled):
        assert noise.coins.size == noise.tokens.size == 0
    assert (plain.position, greedy.position, coupled.position, none.position) == (11, 21, 31, 41)
    assert none.coins.size == 0
    np.testing.assert_array_equal(none.tokens, uniforms(3, [41], Stream.TARGET))


def test_a_batch_of_greedy_requests_needs_no_noise() -> None:
    greedy = requests()[1:2]
    assert round_noise(greedy, [5], [2])[0].tokens.size == 0
    assert not draft_noise(greedy, [5], 4, 8, None)[0].uniforms.any()


def test_exponentials_are_exponential_and_of_one_seed_and_position() -> None:
    """Kolmogorov-Smirnov on 200,000 numbers, false alarm 1e-6; a prefix does not depend on the
    count, and neighbours in seed, position and token are uncorrelated."""
    numbers = exponentials(7, 3, 200_001)
    assert stats.kstest(numbers, "expon").pvalue > 1e-6
    first = [exponentials(seed, 3, 1)[0] for seed in range(5000)]
    assert stats.kstest(first, "expon").pvalue > 1e-6
    assert numbers.min() > 0
    np.testing.assert_array_equal(exponentials(7, 3, 1000), numbers[:1000])
    for other in (exponentials(8, 3, 200_001), exponentials(7, 4, 200_001), np.roll(numbers, 1)):
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 5 / np.sqrt(200_000)
