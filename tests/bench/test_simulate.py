"""The simulator on made-up machines whose throughput is known, and the article's thresholds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.article import article_results
from bench.load import plot
from bench.record import Recording, judge, load_recording
from bench.simulate import compare, simulate, slowdown
from engines.calibrate import Rounds
from runtime.config import ConfigError
from tests.runtime.fakes import BLOCK_SIZE, make_tables


def _recording(accepted: int, logit: float, requests: int = 4) -> Recording:
    """Requests of 20 rounds each that all accept the same number, and say so with one logit."""
    count = requests * 20
    rounds = Rounds(
        np.full((count, BLOCK_SIZE, 2), logit, np.float32),
        np.full(count, BLOCK_SIZE),
        np.full(count, accepted),
        np.repeat(np.arange(requests), 20),
    )
    return Recording(rounds, np.arange(requests) % 2 == 0, np.full(requests, 10))


def test_plain_decoding_yields_a_token_a_step() -> None:
    tables = make_tables(request_s=0.0, token_s=0.0)
    result = simulate(tables, _recording(0, 0.0), "off", 1, 21, 2)
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
    result = simulate(tables, _recording(0, 0.0), "off", 1, 21, 2, slower=1.25)
    assert result["tokens_per_s"] == pytest.approx(0.8)


def test_whole_drafts_that_are_accepted_yield_a_block_and_one() -> None:
    tables = make_tables(request_s=0.0, token_s=0.0, draft_s=0.5 / 1.1)
    tokens = 1 + 3 * (BLOCK_SIZE + 1)
    result = simulate(tables, _recording(BLOCK_SIZE, 9.0), "fixed", 1, tokens, 1)
    assert result["tokens_per_s"] == pytest.approx(tokens / (1 + 3 * 1.5))
    assert result["accepted_length"] == BLOCK_SIZE + 1
    assert result["verified_per_round"] == BLOCK_SIZE


@pytest.mark.parametrize("policy", ["throughput", "lagged"])
def test_scheduling_gets_out_of_the_way_of_a_drafter_that_knows_it_fails(policy: str) -> None:
    tables = make_tables(survival=0.01, token_s=0.3, draft_s=0.5)
    plain, own = (
        simulate(tables, _recording(0, -9.0), p, 4, 40, 8)["tokens_per_s"] for p in ("off", policy)
    )
    assert own >= 0.98 * plain


@pytest.mark.parametrize("policy", ["throughput", "lagged"])
def test_scheduling_uses_a_drafter_that_knows_it_succeeds(policy: str) -> None:
    tables = make_tables(survival=0.9, token_s=0.01, draft_s=0.1)
    recording = _recording(BLOCK_SIZE, 9.0)
    full, own = (
        simulate(tables, recording, p, 4, 40, 8)["tokens_per_s"] for p in ("fixed", policy)
    )
    assert own >= 0.99 * full


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    recording = _recording(2, 0.5)
    recording.save(tmp_path / "rounds.npz")
    loaded = load_recording(tmp_path / "rounds.npz")
    assert (loaded.rounds.signals == recording.rounds.signals).all()
    assert loaded.greedy.tolist() == recording.greedy.tolist()
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
        simulate(tables, _recording(1, 0.0), p, 2, 16, 4) for p in ("off", "threshold", "fixed:1")
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
