"""The simulator on made-up machines whose throughput is known, and the article's thresholds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.article import article_results
from bench.load import plot
from bench.record import Recording, judge, load_recording
from bench.simulate import compare, simulate, slowdown
from bench.workload import Item, work_slices
from engines.calibrate import Rounds
from runtime.config import ConfigError
from tests.runtime.fakes import BLOCK_SIZE, make_tables

EIGHT = [[0, 1, 2, 3, 0, 1, 2, 3]]


def _recording(accepted: int, logit: float, requests: int = 4) -> Recording:
    """Requests of 20 rounds each that all accept the same number, and say so with one logit."""
    count = requests * 20
    rounds = Rounds(
        np.full((count, BLOCK_SIZE, 2), logit, np.float32),
        np.full(count, BLOCK_SIZE),
        np.full(count, accepted),
        np.repeat(np.arange(requests), 20),
    )
    rows = np.arange(requests)
    return Recording(rounds, rows % 2 == 0, np.full(requests, 10), np.full(requests, "set"), rows)


def test_plain_decoding_yields_a_token_a_step() -> None:
    tables = make_tables(request_s=0.0, token_s=0.0)
    result = simulate(tables, _recording(0, 0.0), "off", 1, 21, [[0, 1]])
    # Prefill of 10 tokens takes 1 s and yields the first token, the others take 1 s each.
    assert result["tokens_per_s"] == pytest.approx(1.0)
    assert result["user_tokens_per_s"] == pytest.approx(1.0)
    assert result["accepted_length"] == 1


def test_serving_slows_steps_by_what_plain_decoding_showed() -> None:
    tables = make_tables(request_s=0.0, token_s=0.0)
    served = [
        {"concurrency": c, "policy": policy, "predicted_over_measured": ratio}
        for c, policy, ratio in [(1, "off", 0.8), (2, "off", 0.5), (2, "fixed", 0.1), (4, "off", 0)]
    ]
    assert [slowdown(served, c) for c in (1, 2, 16)] == [1.25, 2.0, 2.0]
    assert slowdown([], 1) == 1
    result = simulate(tables, _recording(0, 0.0), "off", 1, 21, [[0, 1]], slower=1.25)
    assert result["tokens_per_s"] == pytest.approx(0.8)


def test_a_client_sends_its_next_request_while_the_others_take_a_step() -> None:
    recording = _recording(0, 0.0)
    keep = np.nonzero((recording.rounds.request != 0) | (np.arange(80) < 2))[0]
    short = replace(recording, rounds=recording.rounds.of(keep))  # request 0 ends at 3 tokens
    tables = make_tables(request_s=0.0, token_s=0.0)
    # Two prompts (2 s), three tokens each (2 s), request 1 alone (1 s), with the prompt of request
    # 2 (2 s), with request 2 (1 s); request 2 alone (1 s), with the prompt of request 0 again (2 s)
    # and with it (2 s), until both are complete.
    result = simulate(tables, short, "off", 2, 6, [[0, 1, 2]])
    assert result["tokens_per_s"] == pytest.approx((3 + 6 + 6 + 3) / 13)


def test_slices_share_the_sets_out_in_turns_and_go_on_where_they_stopped() -> None:
    slices = list(work_slices({"a": 3, "b": 2}, [1, 2], 2, 2))
    assert [concurrency for concurrency, _ in slices] == [1, 2, 1, 2]
    assert [len(items) for _, items in slices] == [2, 4, 2, 4]
    items = [item for _, own in slices for item in own]
    assert [item.prompt_set for item in items[:4]] == ["a", "b", "a", "b"]
    assert [item.row for item in items[:6]] == [0, 0, 1, 1, 2, 0]  # b starts again
    assert [item.temperature for item in items[:6]] == [0, 0, 1, 1, 0, 0]
    assert len({item.seed for item in items}) == len(items)


def test_whole_drafts_that_are_accepted_yield_a_block_and_one() -> None:
    tables = make_tables(request_s=0.0, token_s=0.0, draft_s=0.5 / 1.1)
    tokens = 1 + 3 * (BLOCK_SIZE + 1)
    result = simulate(tables, _recording(BLOCK_SIZE, 9.0), "fixed", 1, tokens, [[0]])
    assert result["tokens_per_s"] == pytest.approx(tokens / (1 + 3 * 1.5))
    assert result["accepted_length"] == BLOCK_SIZE + 1
    assert result["verified_per_round"] == BLOCK_SIZE


@pytest.mark.parametrize("policy", ["throughput", "lagged"])
def test_scheduling_gets_out_of_the_way_of_a_drafter_that_knows_it_fails(policy: str) -> None:
    tables = make_tables(survival=0.01, token_s=0.3, draft_s=0.5)
    plain, own = (
        simulate(tables, _recording(0, -9.0), p, 4, 40, EIGHT)["tokens_per_s"]
        for p in ("off", policy)
    )
    assert own >= 0.98 * plain


@pytest.mark.parametrize("policy", ["throughput", "lagged"])
def test_scheduling_uses_a_drafter_that_knows_it_succeeds(policy: str) -> None:
    tables = make_tables(survival=0.9, token_s=0.01, draft_s=0.1)
    recording = _recording(BLOCK_SIZE, 9.0)
    full, own = (
        simulate(tables, recording, p, 4, 40, EIGHT)["tokens_per_s"] for p in ("fixed", policy)
    )
    assert own >= 0.99 * full


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    recording = _recording(2, 0.5)
    recording.save(tmp_path / "rounds.npz")
    loaded = load_recording(tmp_path / "rounds.npz")
    assert (loaded.rounds.signals == recording.rounds.signals).all()
    assert loaded.greedy.tolist() == recording.greedy.tolist()
    assert loaded.sizes() == {"set": 4}
    assert [loaded.find(Item("set", row, row % 2, 0)) for row in range(4)] == [0, 1, 2, 3]
    np.savez(tmp_path / "other.npz", x=np.zeros(1))
    with pytest.raises(ConfigError, match="holds no recorded rounds"):
        load_recording(tmp_path / "other.npz")


def test_a_server_learns_what_its_calibration_got_wrong() -> None:
    """Every draft is sure to the last token and loses its second one."""
    recording = _recording(1, 2.0, requests=40)
    report = judge(recording, make_tables().calibration)
    assert set(report) == {"greedy", "sampling"}
    for mode in report.values():
        assert mode["accepted_length"] == 2
        assert mode["ece_after"] == pytest.approx(mode["ece_before"])
        assert mode["mean_ece_learned"] < 0.7 * mode["mean_ece_after"]
    assert "ece_after" not in judge(recording, None)["greedy"]


def test_results_are_compared_where_both_have_them_and_drawn(tmp_path: Path) -> None:
    tables = make_tables()
    results = [
        simulate(tables, _recording(1, 0.0), p, 2, 16, [[0, 1, 2, 3]])
        for p in ("off", "threshold", "fixed:1")
    ]
    measured = [{**results[0], "tokens_per_s": results[0]["tokens_per_s"] * 2}]
    (row,) = compare(results, measured)
    assert row["simulated_over_measured"] == pytest.approx(0.5)
    plot(results, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_the_articles_thresholds() -> None:
    rows = {(r["confidences"], r["rule"]): r for r in article_results()}
    for rule, threshold in [("load 0.1", 0.315), ("load 0.5", 0.375), ("load 0.9", 0.435)]:
        assert rows["high", rule]["threshold"] == threshold
    verified = {
        name: [
            rows[name, rule]["verified"] for rule in ("load 0.1", "load 0.5", "load 0.9", "fixed")
        ]
        for name in ("high", "medium", "low")
    }
    assert verified == {"high": [6, 6, 6, 5], "medium": [4, 4, 3, 3], "low": [2, 2, 1, 1]}
