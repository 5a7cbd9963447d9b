"""The scheduler inside the loop: when it drafts, when it stops, and how it comes back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from runtime import loop as loop_module
from runtime.config import ConfigError, RuntimeConfig
from runtime.load import LoadGauge
from runtime.metrics import Metrics
from runtime.schedule import HISTORY_ROUNDS, Policy
from runtime.scheduler import (
    LOOK_STEPS,
    PLAIN_LOOK_STEPS,
    REFRESH_STEPS,
    Scheduler,
    Tables,
    available_policies,
    resolve_policy,
)
from runtime.spec import DrafterDims, KvDims
from tests.runtime.fakes import (
    BLOCK_SIZE,
    Collector,
    greedy_reference,
    make_loop,
    make_request,
    make_tables,
    run_all,
)

KV = KvDims(num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=4, dtype="fp32")
SURE, UNSURE = (DrafterDims(KV, 2, BLOCK_SIZE, 24, has) for has in (True, False))
PAYS = make_tables()
COSTS = make_tables(draft_s=3.0)  # drafting takes three times a plain step


@pytest.mark.parametrize(
    ("drafter", "tables", "expected"),
    [
        (SURE, PAYS, "throughput"),
        (SURE, None, "fixed"),
        (UNSURE, None, "fixed"),
        (None, None, "off"),
    ],
)
def test_auto_is_the_best_policy_that_the_model_has_all_for(
    drafter: DrafterDims | None, tables: Tables | None, expected: str
) -> None:
    assert str(resolve_policy("auto", drafter, tables)) == expected
    assert expected in available_policies(drafter, tables)


def test_the_metrics_say_that_tables_are_missing() -> None:
    loop, _ = make_loop()
    assert loop.scheduler.metrics()['falls_back{reason="no_tables"}'] == 1
    loop, _ = make_loop(policy="fixed")
    assert loop.scheduler.metrics()['falls_back{reason="no_tables"}'] == 0


@pytest.mark.parametrize(
    ("policy", "drafter", "message"),
    [
        ("throughput", SURE, "needs a cost table and a calibration: run `dspark profile` and"),
        ("lagged", SURE, "needs a cost table and a calibration: run `dspark profile` and"),
        ("threshold", UNSURE, "policy threshold needs a drafter with a confidence head"),
        ("fast", SURE, "policy must be off, fixed"),
    ],
)
def test_a_policy_that_lacks_something_is_refused(
    policy: str, drafter: DrafterDims, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_policy(policy, drafter, None)


def _long(prompt: tuple[int, ...], tokens: int, **fields: Any) -> Any:
    return make_request(prompt, max_tokens=tokens, ignore_eos=True, **fields)


@pytest.mark.parametrize("policy", ["throughput", "lagged"])
def test_where_plain_decoding_is_faster_nothing_is_drafted_but_a_rare_look(policy: str) -> None:
    loop, verifier = make_loop(agreement=1.0, tables=COSTS, policy=policy)
    (result,) = run_all(loop, [_long((1, 2, 3), 2 * LOOK_STEPS)])
    assert result.token_ids == greedy_reference((1, 2, 3), 2 * LOOK_STEPS, False)
    assert loop.metrics.counts["drafted_tokens"] == BLOCK_SIZE
    assert loop.metrics.counts["plain_is_faster_steps"] > LOOK_STEPS
    gauges = loop.scheduler.metrics()
    assert gauges[f'policy{{name="{policy}"}}'] == 1
    assert gauges['falls_back{reason="plain_is_faster"}'] == 1
    assert gauges['falls_back{reason="no_tables"}'] == 0
    assert set(verifier.runs[1:LOOK_STEPS]) == {1}


def test_drafting_comes_back_when_the_load_falls() -> None:
    """Alone a request pays for drafting, five do not; the arrears of context are made up."""
    tables = make_tables(request_s=0.02, token_s=0.3, draft_s=0.1)
    loop, _ = make_loop(agreement=1.0, tables=tables, policy="throughput")
    short = [_long((i, i), 12) for i in range(2, 6)]
    collectors = [Collector() for _ in range(5)]
    for request, collector in zip([*short, _long((1, 1), 60)], collectors, strict=True):
        loop.add(request, collector)
    loop.step()
    while len(loop.admission.running) == 5:
        loop.step()
    assert loop.metrics.counts["drafted_tokens"] == 0
    sequence = loop.admission.running[0]
    assert sequence.num_drafter_computed == 0
    while loop.has_work:
        loop.step()
    assert sequence.num_drafted > 0
    assert sequence.num_accepted == sequence.num_verified > 0
    assert collectors[-1].token_ids == greedy_reference((1, 1), 60, False)


def test_a_drafter_that_looked_hopeless_is_taken_up_after_a_few_looks() -> None:
    """The calibration says that nothing survives; what the looks find says otherwise."""
    tables = make_tables(survival=0.001, token_s=0.001, draft_s=0.1)
    loop, _ = make_loop(agreement=1.0, tables=tables, policy="throughput", max_batch_requests=1)
    run_all(loop, [_long((1, i), 120) for i in range(1, 9)])
    assert loop.metrics.counts["plain_is_faster_steps"] >= LOOK_STEPS
    assert loop.scheduler.drafting
    assert loop.metrics.counts["verified_draft_tokens"] > 0


def test_what_the_drafter_is_owed_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "MAX_PENDING_TOKENS", 8)
    loop, _ = make_loop(tables=COSTS, policy="throughput", prefill_chunk_tokens=4)
    collector = Collector()
    sequence = loop.add(_long(tuple([3] * 30), 40), collector)
    while loop.has_work:
        loop.step()
        assert sequence.num_pending < 8 + 4
        assert sequence.num_pending == sum(map(len, sequence.pending_features))
    assert sequence.num_drafter_computed >= 60
    assert loop.metrics.counts["drafted_tokens"] == 0
    assert collector.token_ids == greedy_reference(tuple([3] * 30), 40, False)


def test_each_request_may_name_its_policy() -> None:
    loop, _ = make_loop(agreement=1.0, tables=PAYS, policy="fixed:2")
    policies = [None, "off", "fixed", "fixed:1", "threshold:0", "throughput", "lagged"]
    results = run_all(
        loop,
        [
            _long((i, 1), 25, **({} if policy is None else {"policy": policy}))
            for i, policy in enumerate(policies, start=1)
        ],
    )
    stats = [result.final.stats for result in results]
    lengths = [s["num_verified_draft_tokens"] / s["num_rounds"] for s in stats]
    assert lengths[1] == 0
    assert lengths[3] < lengths[0] < lengths[2] == lengths[4]
    for i, result in enumerate(results, start=1):
        assert result.token_ids == greedy_reference((i, 1), 25, False)


def test_predicted_and_measured_times_are_of_the_same_steps() -> None:
    loop, _ = make_loop(agreement=1.0, tables=PAYS, policy="fixed:2", max_batch_requests=2)
    run_all(loop, [_long((1, 2), 16), _long((3, 4), 16)])
    metrics = loop.metrics
    plain_s = PAYS.cost.verify_cost(2, 0, 0)[0]
    assert metrics.predicted_decoding_s > plain_s * 4
    assert 0 < metrics.measured_decoding_s <= sum(metrics.seconds.values())
    without, _ = make_loop(policy="fixed")
    run_all(without, [_long((1, 2), 16)])
    assert without.metrics.predicted_decoding_s == without.metrics.measured_decoding_s == 0


class Mode(NamedTuple):
    greedy: bool = True
    policy: Policy | None = None


@dataclass(eq=False)
class Stub:
    """A sequence as the scheduler sees it."""

    request: Mode = Mode()  # noqa: RUF009
    num_computed: int = 16
    num_pending: int = 1
    speculates: bool = True
    survivals: deque[Any] = field(default_factory=lambda: deque(maxlen=HISTORY_ROUNDS))
    leaning: float = 0.0


def _scheduler(tables: Tables, min_gain: float) -> Scheduler[Stub]:
    config = RuntimeConfig(min_gain=min_gain)
    return Scheduler(Policy("throughput"), config, Metrics(), tables, LoadGauge(config))


def test_drafting_is_taken_up_only_for_a_minimum_gain() -> None:
    """Between standing still and the minimum gain the last decision stands."""
    tables = make_tables(survival=0.5, token_s=0.0, draft_s=0.0)
    plain_s = tables.cost.verify_cost(1, 0, 16)[0]
    tokens = 1 + 0.5 * BLOCK_SIZE
    # A draft that takes this long leaves a gain of 1.05.
    tables = make_tables(survival=0.5, token_s=0.0, draft_s=(tokens / 1.05 - 1) * plain_s / 1.1)
    for min_gain, expected in [(0.02, True), (0.2, False)]:
        scheduler, stub = _scheduler(tables, min_gain), Stub()
        scheduler.plan([Stub()])
        assert scheduler.drafting
        scheduler.drafting = False
        scheduler.plan([stub])
        assert scheduler.drafting == scheduler.drafts_for(stub) == expected


def test_arrears_of_context_are_weighed_before_drafting_is_taken_up() -> None:
    tables = make_tables(survival=0.9, context_token_s=0.5)
    for pending, expected in [(1, True), (1000, False)]:
        scheduler, stub = _scheduler(tables, 0.01), Stub(num_pending=pending)
        scheduler.drafting = False
        scheduler.plan([stub])
        assert scheduler.drafting == expected


def test_the_look_is_at_the_request_that_owes_most() -> None:
    scheduler = _scheduler(COSTS, 0.01)
    stubs = [Stub(num_pending=n) for n in (9, 30, 7)]
    for _ in range(LOOK_STEPS - 1):
        scheduler.plan(stubs)
        assert not any(scheduler.drafts_for(s) for s in stubs)
    scheduler.plan(stubs)
    assert [scheduler.drafts_for(s) for s in stubs] == [False, True, False]
    scheduler.plan(stubs)
    assert not any(scheduler.drafts_for(s) for s in stubs)


HOPELESS, HOPEFUL = np.full(BLOCK_SIZE, 0.001), np.full(BLOCK_SIZE, 0.95)


def test_expectations_follow_a_requests_last_rounds() -> None:
    scheduler = _scheduler(make_tables(survival=0.9, draft_s=0.3, token_s=0.05), 0.01)
    stubs = [Stub() for _ in range(8)]
    caps, signals = np.full(8, BLOCK_SIZE), np.full((8, BLOCK_SIZE, 2), -20, np.float32)
    scheduler.plan(stubs)
    assert scheduler.drafting
    for _ in range(HISTORY_ROUNDS + REFRESH_STEPS):
        scheduler.plan(stubs)
        assert scheduler.lengths(stubs, caps, signals).sum() == 0
    scheduler.plan(stubs)
    assert not scheduler.drafting
    scheduler.plan([Stub()])  # a young one is expected to do as the last rounds of others did
    assert not scheduler.drafting


def test_only_requests_whose_drafts_pay_are_drafted_for() -> None:
    """Drafting costs by the request here, so the hopeless ones are left to plain decoding."""
    scheduler = _scheduler(make_tables(draft_s=0.5, token_s=0.01), 0.01)
    stubs = [Stub(survivals=deque([HOPEFUL if i % 3 == 0 else HOPELESS] * 8)) for i in range(8)]
    scheduler.plan(stubs)
    assert scheduler.drafting
    assert [scheduler.drafts_for(s) for s in stubs] == [i % 3 == 0 for i in range(8)]


@pytest.mark.parametrize(("padding_s", "longest"), [(0.0, BLOCK_SIZE), (0.04, 1)])
def test_one_long_draft_must_pay_for_padding_all_others(padding_s: float, longest: int) -> None:
    """The first draft token is likely for all, further ones only for one of them."""
    tables = make_tables(draft_s=0.01, token_s=0.05, padding_s=padding_s)
    scheduler = _scheduler(tables, 0.01)
    short = np.where(np.arange(BLOCK_SIZE) < 1, 0.9, 0.001)
    stubs = [Stub(survivals=deque([short if i else HOPEFUL] * 8)) for i in range(8)]
    scheduler.plan(stubs)
    signals = np.full((8, BLOCK_SIZE, 2), -20, np.float32)
    signals[:, 0], signals[0] = 20, 20
    lengths = scheduler.lengths(stubs, np.full(8, BLOCK_SIZE), signals).tolist()
    assert max(lengths) == lengths[0] == longest
    predicted_s = scheduler.predicted_s(lengths, 8)
    even_s = tables.cost.verify_cost(8, sum(lengths), 16)[-1] + tables.cost.draft_cost(8, 16)
    assert predicted_s == pytest.approx(even_s + padding_s * (8 * longest - sum(lengths)))


@pytest.mark.parametrize("greedy", [True, False])
def test_confidences_that_do_not_come_true_count_less(greedy: bool) -> None:
    """Nothing is ever accepted, however sure the drafter is: its drafts are made no more."""
    scheduler = _scheduler(make_tables(survival=0.7, draft_s=0.3, token_s=0.05), 0.01)
    caps, signals = np.array([BLOCK_SIZE]), np.ones((1, BLOCK_SIZE, 2), np.float32)
    for _ in range(800):
        stub = Stub(Mode(greedy))
        scheduler.plan([stub])
        if scheduler.drafts_for(stub):
            verified = int(scheduler.lengths([stub], caps, signals).sum())
            scheduler.end_round(stub, verified, 0)
    assert not scheduler.drafting
    scheduler.plan([Stub(Mode(not greedy))])  # the other mode has kept its promises
    assert scheduler.drafting


def test_drafting_that_takes_longer_than_the_table_says_is_given_up() -> None:
    """The table sees a gain of about a fifth; drafting steps turn out to be a quarter slower."""
    scheduler = _scheduler(make_tables(survival=0.5, token_s=0.0, draft_s=0.8), 0.01)
    stub = Stub()
    caps, signals = np.array([BLOCK_SIZE]), np.zeros((1, BLOCK_SIZE, 2), np.float32)
    for _ in range(40 * PLAIN_LOOK_STEPS):
        scheduler.plan([stub])
        drafted = scheduler.drafts_for(stub)
        verified = scheduler.lengths([stub], caps, signals).tolist() if drafted else []
        predicted_s = scheduler.predicted_s(verified, 1)
        assert predicted_s is not None
        scheduler.end_decoding(verified, 1, predicted_s * (1.25 if verified else 1.0))
    assert not scheduler.drafting
    assert scheduler.metrics()["drafting_cost_factor"] > 1.15


def test_a_plain_step_is_looked_at_now_and_then() -> None:
    """Requests under a policy that always drafts are not held back for it."""
    scheduler = _scheduler(PAYS, 0.01)
    stub, fixed = Stub(), Stub(Mode(policy=Policy("fixed")))
    drafts = []
    for _ in range(2 * PLAIN_LOOK_STEPS):
        scheduler.plan([stub, fixed])
        assert scheduler.drafts_for(fixed)
        drafts.append(scheduler.drafts_for(stub))
    assert drafts == ([True] * (PLAIN_LOOK_STEPS - 1) + [False]) * 2
