"""The tokens that come out have the target's distribution, whatever was drafted.

How: a small language whose next-token distribution depends on the previous token, so p and q are
known exactly. `Simulation` plays rounds for many seeds at once, vectorised, with the bookkeeping of
the loop (positions, anchors, streams); the chi-square tests run on it. The code under test is tied
to it twice: `accept` must give the same tokens on every one of many seeds of each case,
and one case runs `accept_rejection` itself for all its samples.

Each statistical test here fails by chance with probability FALSE_ALARM; the seeds are fixed, so it
either always passes or always fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from runtime.accept import Draft, accept, accept_equal, accept_rejection
from runtime.logits import LogitsProcessor, processor_for
from runtime.randomness import RoundNoise, Stream, draft_noise, exponentials, round_noise, uniforms
from runtime.request import Request, RequestLimits, validate_request
from runtime.sampling import draw, race, softmax, target_probs
from tests.runtime.fakes import FakeTokenizer, ruled_logits

END = 5  # ends an answer
FALSE_ALARM = 1e-6
SIGMAS = 4.9  # a normal variable is farther out with probability FALSE_ALARM
SAMPLES = 200_000
REAL_SEEDS = 160  # seeds of each case that go through `accept`, round by round
V = 8
BLOCK = 3
PROMPT_END = 4  # absolute position of the first anchor
FIRST_ANCHOR = 2  # its token
LIMITS = RequestLimits(
    vocab_size=V,
    max_model_tokens=64,
    max_stop_words=4,
    max_stop_word_chars=16,
    default_max_tokens=16,
)


def make_request(**fields: Any) -> Request:
    return validate_request({"prompt_ids": [0] * PROMPT_END + [FIRST_ANCHOR], **fields}, LIMITS)


def random_logits(seed: int, width: int = V, scale: float = 2.0) -> NDArray[np.float32]:
    """[V, width] logits by previous token."""
    return np.random.default_rng(seed).normal(size=(V, width)).astype(np.float32) * scale


@dataclass(frozen=True)
class Case:
    """A target, a drafter and a request's sampling parameters."""

    target_logits: NDArray[np.float32]  # [V, V] by previous token
    draft_logits: NDArray[np.float32]  # [V, V'] by previous token
    vocab: NDArray[np.int64] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    trimmed: bool = False  # verify 0 to BLOCK tokens, by position, instead of all
    rules: Mapping[str, Any] = field(default_factory=dict)  # penalties, bias and bans

    def request(self, seed: int = 0, rule: str = "rejection") -> Request:
        return make_request(
            **self.rules,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed,
            acceptance=rule,
        )

    def num_verified(self, anchor: NDArray[np.int64]) -> NDArray[np.int64]:
        return (anchor * 7 + 2) % (BLOCK + 1) if self.trimmed else np.full_like(anchor, BLOCK)

    @property
    def contexts(self) -> list[tuple[int, ...]]:
        """What p may depend on: the previous token, or with rules up to two tokens of output,
        which settles the first three."""
        if not self.rules:
            return [(token,) for token in range(V)]
        return [(), *((a,) for a in range(V)), *itertools.product(range(V), repeat=2)]

    @property
    def last(self) -> list[int]:
        """The previous token in each context."""
        return [context[-1] if context else FIRST_ANCHOR for context in self.contexts]

    @property
    def start(self) -> int:
        return 0 if self.rules else FIRST_ANCHOR

    @property
    def follow(self) -> NDArray[np.int64]:
        """[contexts, V] the context after each token."""
        contexts = self.contexts
        after = [[(*c, t) if len(c) < 2 else c for t in range(V)] for c in contexts]
        if not self.rules:
            after = [[(t,) for t in range(V)]] * V
        number = {context: i for i, context in enumerate(contexts)}
        return np.array([[number[c] for c in row] for row in after])

    def processor(self, output: tuple[int, ...] = ()) -> LogitsProcessor | None:
        processor = processor_for(self.request(), FakeTokenizer(), {END}, V)
        for token in output if processor is not None else ():
            processor.observe(token)
        return processor

    @property
    def p(self) -> NDArray[np.float32]:
        """[contexts, V]"""
        rows = []
        for context, last in zip(self.contexts, self.last, strict=True):
            logits, processor = self.target_logits[[last]], self.processor(context)
            if processor is not None:
                logits = processor.process(logits, np.empty(0, np.int64))
            rows.append(target_probs(logits[0], self.request()))
        return np.stack(rows)

    @property
    def q(self) -> NDArray[np.float32]:
        """[contexts, V']"""
        return softmax(self.draft_logits[self.last] / np.float32(self.temperature))

    @property
    def q_in_target_ids(self) -> NDArray[np.float32]:
        if self.vocab is None:
            return self.q
        wide = np.zeros((len(self.last), V), np.float32)
        wide[:, self.vocab] = self.q
        return wide


FAR = Case(random_logits(1), -random_logits(1))  # unlikely for one is likely for the other
ONE_HOT = replace(
    FAR,
    draft_logits=np.where(
        random_logits(2) == random_logits(2).max(1, keepdims=True), 0, -1e9
    ).astype(np.float32),
)
REDUCED = Case(random_logits(1), random_logits(3, 5), np.array([0, 2, 3, 6, 7]))
CASES = {
    "q far from p": FAR,
    "q far from p, trimmed": replace(FAR, trimmed=True),
    "one-hot q": ONE_HOT,
    "reduced draft vocabulary": REDUCED,
    "q equal to p": Case(random_logits(1), random_logits(1)),
    "top-k": replace(FAR, top_k=3, temperature=1.5),
    "top-p": replace(FAR, top_p=0.8, draft_logits=random_logits(4)),
    "min-p": replace(REDUCED, min_p=0.1, trimmed=True),
    "all filters": replace(FAR, top_k=5, top_p=0.9, min_p=0.05, draft_logits=random_logits(5)),
    "temperature 0.3": replace(FAR, temperature=0.3, draft_logits=random_logits(6)),
    "temperature 2": replace(REDUCED, temperature=2.0),
    "penalties": replace(
        FAR, rules={"repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": -0.5}
    ),
    "penalties, trimmed": replace(
        REDUCED, trimmed=True, rules={"repetition_penalty": 0.6, "frequency_penalty": 2.0}
    ),
    "bias, bans and filters": replace(
        FAR,
        top_p=0.9,
        temperature=1.3,
        rules={
            "logit_bias": {1: 2.0, END: 3.0, 6: -3.0},
            "bad_words": ["d", "bb"],
            "min_tokens": 2,
        },
    ),
}


def reference_probs(case: Case) -> NDArray[np.float64]:
    """p [contexts, V] in fp64, one token at a time: independent of `runtime.sampling`."""
    rows = []
    for context, last in zip(case.contexts, case.last, strict=True):
        logits = case.target_logits[last].astype(np.float64)
        if case.rules:
            prompt = (*[0] * PROMPT_END, FIRST_ANCHOR)
            logits = ruled_logits(logits, prompt, list(context), {END}, **case.rules)
        scaled = logits / case.temperature
        if case.top_k:
            scaled[np.argsort(-scaled)[case.top_k :]] = -np.inf
        probs = np.exp(scaled - scaled.max())
        probs /= probs.sum()
        order = np.argsort(-probs)
        kept, mass = [], 0.0
        for token in order:
            if mass < case.top_p:
                kept.append(token)
            mass += probs[token]
        kept = [t for t in kept if probs[t] >= case.min_p * probs.max()]
        row = np.zeros(V)
        row[kept] = probs[kept] / probs[kept].sum()
        rows.append(row)
    return np.stack(rows)


def chi_square_p(tokens: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """p-value that `tokens` [n, k] come from `expected` [V]*k, rare cells pooled; 0 where a token
    of probability 0 came out."""
    counts = np.zeros(expected.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    if counts[expected == 0].any():
        return 0.0
    counts, wanted = counts[expected > 0], expected[expected > 0] * len(tokens)
    rare = wanted < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
        if wanted[-1] < 5:
            counts, wanted = counts[:-1], wanted[:-1]
    return float(stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue)


def chain(case: Case, p: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Joint probabilities [V]*length of the first tokens after FIRST_ANCHOR."""
    joint, contexts = np.ones(()), np.array(case.start)
    for _ in range(length):
        joint, contexts = joint[..., None] * p[contexts], case.follow[contexts]
    return joint


def inverse_cdf(
    table: NDArray[np.float32], rows: NDArray[np.int64], noise: NDArray[np.float32]
) -> NDArray[np.int64]:
    """`draw` from the weights table[rows]."""
    cumulative = np.cumsum(table, axis=1, dtype=np.float64)
    last = (cumulative < cumulative[:, -1:]).sum(1)
    thresholds = (noise * cumulative[rows, -1])[:, None]
    return np.minimum((cumulative[rows] <= thresholds).sum(1), last[rows])


@lru_cache(maxsize=64)
def column(position: int, stream: Stream, anchor: int) -> NDArray[np.float32]:
    parts = np.split(np.arange(SAMPLES), 50)  # small enough for the processor's cache
    return np.concatenate([uniforms(seeds, position, stream, anchor) for seeds in parts])


def noise_of(
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
    stream: Stream,
    anchors: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """`uniforms`, computed once for all cases: the same few positions come again and again."""
    rounds = np.zeros_like(positions) if anchors is None else anchors
    noise = np.empty(len(seeds), np.float32)
    keys = positions * 64 + rounds
    for key in np.flatnonzero(np.bincount(keys)).tolist():
        rows = keys == key
        noise[rows] = column(key // 64, stream, key % 64)[seeds[rows]]
    return noise


@dataclass
class Simulation:
    """Rounds of rejection sampling for many seeds at once; all bookkeeping is the loop's.

    The two switches are the known bugs, for the negative controls.
    """

    case: Case
    seeds: NDArray[np.int64]
    share_draft_noise_with_residual: bool = False
    drafting_temperature: float | None = None  # other than the one that acceptance assumes

    def __post_init__(self) -> None:
        self.p = self.case.p
        self.q = self.case.q
        self.sampled_q = self.q
        if self.drafting_temperature is not None:
            self.sampled_q = replace(self.case, temperature=self.drafting_temperature).q
        self.vocab = np.arange(V) if self.case.vocab is None else self.case.vocab
        self.follow = self.case.follow
        residual = np.maximum(self.p - self.case.q_in_target_ids, 0)
        self.residual = np.where(residual.any(1, keepdims=True), residual, self.p)

    def draft(
        self, seeds: NDArray[np.int64], anchor: NDArray[np.int64], previous: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draft columns [n, BLOCK] and the context before each."""
        columns, before = [], []
        for k in range(1, BLOCK + 1):
            noise = noise_of(seeds, anchor + k, Stream.DRAFT, anchor)
            before.append(previous)
            columns.append(inverse_cdf(self.sampled_q, previous, noise))
            previous = self.follow[previous, self.vocab[columns[-1]]]
        return np.stack(columns, 1), np.stack(before, 1)

    def run(self, num_tokens: int) -> NDArray[np.int64]:
        """The first tokens of every seed, [n, num_tokens]."""
        out = np.full((len(self.seeds), num_tokens + BLOCK + 1), -1)
        length = np.zeros(len(self.seeds), np.int64)
        last = np.full(len(self.seeds), self.case.start)
        while (active := np.flatnonzero(length < num_tokens)).size:
            tokens, count = self.round(
                self.seeds[active], PROMPT_END + length[active], last[active]
            )
            for k in range(BLOCK + 1):
                rows = k < count
                out[active[rows], length[active[rows]] + k] = tokens[rows, k]
                last[active[rows]] = self.follow[last[active[rows]], tokens[rows, k]]
            length[active] += count
        return out[:, :num_tokens]

    def round(
        self, seeds: NDArray[np.int64], anchor: NDArray[np.int64], previous: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [n, BLOCK + 1] of one round and how many of them count."""
        columns, before = self.draft(seeds, anchor, previous)
        verified = self.case.num_verified(anchor)
        tokens = np.full((len(seeds), BLOCK + 1), -1)
        count = np.zeros(len(seeds), np.int64)
        open_ = np.ones(len(seeds), bool)  # still accepting
        for k in range(BLOCK + 1):
            position = anchor + 1 + k
            bonus = open_ & (verified == k)
            if k == BLOCK:
                assert (bonus == open_).all()
            row = before[:, min(k, BLOCK - 1)]
            if k == BLOCK:
                row = self.follow[row, self.vocab[columns[:, -1]]]
            noise = noise_of(seeds, position, Stream.TARGET)
            tokens[bonus, k] = inverse_cdf(self.p, row, noise)[bonus]
            count[bonus] = k + 1
            open_ &= ~bonus
            if k == BLOCK:
                break
            drafted = self.vocab[columns[:, k]]
            coin = noise_of(seeds, position, Stream.ACCEPT, anchor)
            accepted = coin * self.q[row, columns[:, k]] < self.p[row, drafted]
            noise = noise_of(seeds, position, Stream.RESIDUAL)
            if self.share_draft_noise_with_residual:
                noise = noise_of(seeds, position, Stream.DRAFT, anchor)
            rejected = open_ & ~accepted
            tokens[rejected, k] = inverse_cdf(self.residual, row, noise)[rejected]
            tokens[open_ & accepted, k] = drafted[open_ & accepted]
            count[rejected] = k + 1
            open_ &= accepted
        return tokens, count


def decode(
    case: Case, request: Request, num_tokens: int, draft_row: Callable[[int, int], Any]
) -> tuple[list[int], int]:
    """One request through `accept`, round by round, as the loop does it.

    `draft_row(anchor, token)` gives the columns of the block drafted there. Returns the tokens and
    how many of them were drafts.
    """
    vocab = np.arange(V) if case.vocab is None else case.vocab
    tokens = [FIRST_ANCHOR]
    num_accepted = 0
    while len(tokens) <= num_tokens:
        anchor = PROMPT_END + len(tokens) - 1
        ids = vocab[draft_row(anchor, tokens[-1])]
        before = [tokens[-1], *ids.tolist()]
        length = int(case.num_verified(np.array(anchor)))
        draft = Draft(ids, case.draft_logits[before[:-1]], case.vocab).first(length)
        noise = noise_for(request, anchor, length)
        logits = case.target_logits[before[: length + 1]]
        if (processor := case.processor(tuple(tokens[1:]))) is not None:
            logits = processor.process(logits, ids[:length])
        result = accept(request, draft, noise, logits)
        tokens += [*ids[: result.num_accepted].tolist(), result.next_token]
        num_accepted += result.num_accepted
    return tokens[1 : num_tokens + 1], num_accepted


def noise_for(request: Request, anchor: int, length: int) -> RoundNoise:
    return round_noise([request], [anchor], [length])[0]


class TestRejection:
    @pytest.mark.parametrize("name", CASES)
    def test_three_tokens_have_the_targets_joint_distribution(self, name: str) -> None:
        case = CASES[name]
        tokens = Simulation(case, np.arange(SAMPLES)).run(3)
        p = reference_probs(case)
        np.testing.assert_allclose(case.p, p, atol=1e-6)
        assert chi_square_p(tokens[:, :1], p[case.start]) > FALSE_ALARM
        assert chi_square_p(tokens, chain(case, p, 3)) > FALSE_ALARM

    @pytest.mark.parametrize("name", CASES)
    def test_accept_gives_the_simulated_tokens_seed_by_seed(self, name: str) -> None:
        """Ties the code to what the chi-square tests have shown to be right."""
        case = CASES[name]
        simulation = Simulation(case, np.arange(REAL_SEEDS))
        num_tokens = 3 if case.rules else 4
        expected = simulation.run(num_tokens).tolist()
        for seed in range(0, REAL_SEEDS, 1 if name in ("q far from p", "min-p") else 8):

            def draft_row(anchor: int, token: int, seed: int = seed) -> NDArray[np.int64]:
                context = case.last.index(token)  # the draft looks at nothing else of it
                columns, _ = simulation.draft(*(np.array([x]) for x in (seed, anchor, context)))
                return columns[0]

            tokens, _ = decode(case, case.request(seed), num_tokens, draft_row)
            assert tokens == expected[seed], f"seed {seed}"

    def test_every_sample_through_the_code_itself(self) -> None:
        """p and q are the same at every position here, so the tokens of all rounds one after the
        other must be independent draws from p."""
        case = REDUCED
        assert case.vocab is not None
        p, q = case.p[FIRST_ANCHOR], np.tile(case.q[FIRST_ANCHOR], (BLOCK, 1))
        at = range(PROMPT_END + 1, PROMPT_END + BLOCK + 2)
        rows = np.full(SAMPLES, FIRST_ANCHOR)
        drafts = [
            case.vocab[inverse_cdf(case.q, rows, column(a, Stream.DRAFT, PROMPT_END))]
            for a in at[:BLOCK]
        ]
        coins = [column(a, Stream.ACCEPT, PROMPT_END) for a in at[:BLOCK]]
        tokens = [column(a, Stream.RESIDUAL, 0) for a in at[:BLOCK]]
        tokens.append(column(at[BLOCK], Stream.TARGET, 0))
        ids, noises = np.stack(drafts, 1), zip(np.stack(coins, 1), np.stack(tokens, 1), strict=True)
        out: list[int] = []
        for seed, noise in enumerate(noises):
            result = accept_rejection(
                ids[seed], q, case.vocab, lambda _: p, RoundNoise(*noise, PROMPT_END + 1)
            )
            out += [*ids[seed, : result.num_accepted].tolist(), result.next_token]
            if len(out) > SAMPLES:
                break
        assert len(out) > SAMPLES
        expected = reference_probs(case)[FIRST_ANCHOR]
        assert chi_square_p(np.array(out)[:, None], expected) > FALSE_ALARM
        pairs = np.array(out[: len(out) // 2 * 2]).reshape(-1, 2)
        assert chi_square_p(pairs, np.outer(expected, expected)) > FALSE_ALARM

    @pytest.mark.parametrize("name", ["q far from p", "top-p", "q equal to p", "one-hot q"])
    def test_acceptance_is_one_minus_the_distance_of_p_and_q(self, name: str) -> None:
        """Rejecting more than needed is exact too, but it wastes the drafter."""
        case = CASES[name]
        simulation = Simulation(case, np.arange(SAMPLES))
        anchors, previous = np.full(SAMPLES, PROMPT_END), np.full(SAMPLES, FIRST_ANCHOR)
        _, count = simulation.round(simulation.seeds, anchors, previous)
        assert_acceptance_is_one_minus_distance(case, int((count > 1).sum()))

    def test_q_equal_to_p_accepts_everything(self) -> None:
        p = CASES["q equal to p"].p[:BLOCK]
        ids = np.arange(BLOCK)
        noise = RoundNoise(
            np.full(BLOCK, 1 - 2**-24, np.float32), np.zeros(BLOCK + 1, np.float32), 0
        )
        result = accept_rejection(ids, p, None, lambda row: p[row % BLOCK], noise)
        assert result.num_accepted == BLOCK

    @pytest.mark.parametrize("coin", [0, 0.5])
    def test_a_draft_of_probability_zero_is_never_accepted(self, coin: float) -> None:
        """A coin of exactly 0 must not let it pass: 0 <= 0 would."""
        p = np.array([0, 0.5, 0.5], np.float32)
        q = np.array([[1, 0, 0]], np.float32)
        result = accept_rejection(np.array([0]), q, None, lambda _: p, noise_of_one(coin, 0.7))
        assert result == (0, 2)

    def test_an_empty_residual_falls_back_to_p(self) -> None:
        """Rounding can reject although p <= q everywhere: the target's tokens remain right."""
        p = np.array([0.5, 0.499], np.float32)
        q = np.array([[0.5, 0.5]], np.float32)
        noise = noise_of_one(0.999999, 0.6)
        assert accept_rejection(np.array([1]), q, None, lambda _: p, noise) == (0, 1)

    def test_the_target_is_asked_only_as_far_as_needed(self) -> None:
        asked = []

        def target(row: int) -> NDArray[np.float32]:
            asked.append(row)
            return np.array([0, 1], np.float32)

        q = np.full((3, 2), 0.5, np.float32)
        noise = RoundNoise(np.full(3, 0.5, np.float32), np.full(4, 0.5, np.float32), 0)
        assert accept_rejection(np.array([1, 0, 1]), q, None, target, noise) == (1, 1)
        assert asked == [0, 1]


def noise_of_one(coin: float, token: float) -> RoundNoise:
    return RoundNoise(np.array([coin], np.float32), np.array([token, token], np.float32), 0)


def assert_acceptance_is_one_minus_distance(case: Case, num_accepted: int) -> None:
    p, q = reference_probs(case)[FIRST_ANCHOR], case.q_in_target_ids[FIRST_ANCHOR]
    rate = 1 - np.abs(p - q).sum() / 2
    error = math.sqrt(rate * max(1 - rate, 0) * SAMPLES)
    assert abs(num_accepted - rate * SAMPLES) <= SIGMAS * error + 1


class TestTheTestsSeeKnownBugs:
    """Negative controls: the same simulation with a bug that public engines have had."""

    BIASED = Case(
        np.log(np.tile(np.array([0.4, 0.4, 0.2, 0, 0, 0, 0, 0], np.float32) + 1e-30, (V, 1))),
        np.log(np.tile(np.array([0.35, 0.05, 0.6, 0, 0, 0, 0, 0], np.float32) + 1e-30, (V, 1))),
    )

    def test_the_control_itself_is_unbiased(self) -> None:
        tokens = Simulation(self.BIASED, np.arange(SAMPLES)).run(1)
        assert chi_square_p(tokens, self.BIASED.p[FIRST_ANCHOR].astype(float)) > FALSE_ALARM

    def test_noise_shared_between_draft_and_residual(self) -> None:
        seeds = np.arange(SAMPLES)
        biased = Simulation(self.BIASED, seeds, share_draft_noise_with_residual=True).run(1)
        assert chi_square_p(biased, self.BIASED.p[FIRST_ANCHOR].astype(float)) < FALSE_ALARM
        frequencies = np.bincount(biased[:, 0], minlength=3)[:3] / SAMPLES
        np.testing.assert_allclose(frequencies, (0.35, 0.45, 0.2), atol=0.006)

    @pytest.mark.parametrize("temperature", [0.7, 1.2])
    def test_q_of_another_temperature(self, temperature: float) -> None:
        case = CASES["all filters"]
        tokens = Simulation(case, np.arange(SAMPLES), drafting_temperature=temperature).run(1)
        assert chi_square_p(tokens, reference_probs(case)[FIRST_ANCHOR]) < FALSE_ALARM


class TestCoupled:
    @pytest.mark.parametrize(
        "name", ["q far from p", "min-p", "temperature 0.3", "penalties", "bias, bans and filters"]
    )
    def test_the_text_depends_on_the_seed_alone(self, name: str) -> None:
        """Whatever is drafted and however much of it is verified, the tokens are those of plain
        decoding with the same seed."""
        random = np.random.default_rng(7)
        for seed in range(40):
            case = CASES[name]
            request = case.request(seed, "coupled")
            plain = [FIRST_ANCHOR]
            for position in range(PROMPT_END + 1, PROMPT_END + 9):
                noise = noise_for(request, position - 1, 0)
                logits = case.target_logits[plain[-1:]]
                if (processor := case.processor(tuple(plain[1:]))) is not None:
                    logits = processor.process(logits, np.empty(0, np.int64))
                result = accept(request, None, noise, logits)
                plain.append(result.next_token)
            width = V if case.vocab is None else len(case.vocab)
            for trimmed in (False, True):
                tokens, _ = decode(
                    replace(case, trimmed=trimmed),
                    request,
                    8,
                    lambda *_, width=width: random.integers(width, size=BLOCK),
                )
                assert tokens == plain[1:]

    def test_a_draft_with_the_same_noise_and_the_same_logits_is_accepted(self) -> None:
        case = CASES["q equal to p"]

        for seed in range(20):

            def draft_row(anchor: int, token: int, seed: int = seed) -> NDArray[np.int64]:
                ids = []
                for k in range(1, BLOCK + 1):
                    token = race(case.p[token], exponentials(seed, anchor + k, V))
                    ids.append(token)
                return np.array(ids)

            _, num_accepted = decode(case, case.request(seed, "coupled"), 8, draft_row)
            assert num_accepted == 6  # two rounds of a full block and one token

    @pytest.mark.parametrize("name", ["q far from p", "top-p", "reduced"])
    def test_draft_and_target_agree_as_often_as_a_race_lets_them(self, name: str) -> None:
        """At least (1 - d) / (1 + d), d the distance of p and q."""
        case = REDUCED if name == "reduced" else CASES[name]
        request = case.request(0, "coupled")
        width = V if case.vocab is None else len(case.vocab)
        vocab = np.arange(V) if case.vocab is None else case.vocab
        num_seeds, equal = 2000, 0
        for seed in range(num_seeds):
            noise = draft_noise([replace(request, seed=seed)], [PROMPT_END], 1, V, case.vocab)[0]
            assert noise.gumbel.shape == (1, width)
            assert noise.uniforms[0] < 0
            scaled = case.draft_logits[FIRST_ANCHOR] / np.float32(case.temperature)
            drafted = vocab[int((scaled + noise.gumbel[0]).argmax())]
            own = accept(
                replace(request, seed=seed),
                None,
                noise_for(request, PROMPT_END, 0),
                case.target_logits[[FIRST_ANCHOR]],
            )
            equal += int(own.next_token == drafted)
        p, q = reference_probs(case)[FIRST_ANCHOR], case.q_in_target_ids[FIRST_ANCHOR]
        distance = np.abs(p - q).sum() / 2
        bound = (1 - distance) / (1 + distance)
        error = math.sqrt(bound * (1 - bound) / num_seeds)
        assert equal / num_seeds > bound - SIGMAS * error
        assert equal / num_seeds < 1 - distance + SIGMAS * error

    def test_over_seeds_the_tokens_have_the_targets_joint_distribution(self) -> None:
        case = CASES["all filters"]
        tokens = [np.full(SAMPLES, FIRST_ANCHOR)]
        for k in range(1, 4):
            # Many samples from each of a few seeds: a generator a sample would take minutes.
            noise = [exponentials(s, PROMPT_END + k, 1000 * V) for s in range(SAMPLES // 1000)]
            tokens.append((case.p[tokens[-1]] / np.reshape(noise, (-1, V))).argmax(1))
        joint = np.stack(tokens[1:], 1)
        assert chi_square_p(joint, chain(case, reference_probs(case), 3)) > FALSE_ALARM
        for seed in range(100):
            request = case.request(seed, "coupled")
            result, _ = decode(case, request, 3, lambda *_: np.zeros(BLOCK, np.int64))
            expected, token = [], FIRST_ANCHOR
            for k in range(1, 4):
                token = race(case.p[token], exponentials(seed, PROMPT_END + k, V))
                expected.append(token)
            assert result == expected


class TestGreedy:
    def test_tokens_are_those_of_plain_greedy_decoding(self) -> None:
        random = np.random.default_rng(3)
        for trial in range(300):
            case = replace(
                Case(random_logits(trial), random_logits(trial + 1)), trimmed=bool(trial % 2)
            )
            expected, token = [], FIRST_ANCHOR
            for _ in range(6):
                token = int(case.target_logits[token].argmax())
                expected.append(token)
            agree = case.target_logits.argmax(1)

            def draft_row(
                _: int, token: int, agree: NDArray[np.int64] = agree
            ) -> NDArray[np.int64]:
                ids = []
                for _ in range(BLOCK):  # the target's own token, except sometimes
                    token = int(agree[token]) if random.random() < 0.7 else int(random.integers(V))
                    ids.append(token)
                return np.array(ids)

            tokens, _ = decode(case, make_request(temperature=0.0), 6, draft_row)
            assert tokens == expected

    def test_equal_logits_go_to_the_lowest_id_with_and_without_a_draft(self) -> None:
        logits = np.zeros((2, V), np.float32)
        request = make_request(temperature=0.0)
        noise = noise_for(request, 5, 1)
        assert accept(request, None, noise, logits[:1]) == (0, 0)
        assert accept(request, Draft(np.array([0]), None, None), noise, logits) == (1, 0)
        assert accept(request, Draft(np.array([3]), None, None), noise, logits) == (0, 0)


def test_accept_equal_stops_at_the_first_difference() -> None:
    own = [4, 5, 6, 7]
    assert accept_equal(np.array([4, 5, 6]), own.__getitem__) == (3, 7)
    assert accept_equal(np.array([4, 0, 6]), own.__getitem__) == (1, 5)
    assert accept_equal(np.array([], np.int64), own.__getitem__) == (0, 4)


def test_a_request_that_drafts_nothing_draws_from_the_target_at_its_own_position() -> None:
    """It must not consume or shift anybody's numbers: the same token comes at any load."""
    for seed in range(50):
        request = FAR.request(seed)
        expected = draw(FAR.p[3], float(uniforms(seed, 9, Stream.TARGET)))
        row = FAR.target_logits[3:4]
        assert accept(request, None, noise_for(request, 8, 0), row) == (0, expected)


def test_a_draft_cut_to_nothing_is_none() -> None:
    draft = Draft(np.arange(3), np.zeros((3, V), np.float32), None)
    assert draft.first(0) is None
    shorter = draft.first(2)
    assert shorter is not None
    assert shorter.logits is not None
    assert (len(shorter.token_ids), len(shorter.logits)) == (2, 2)
