"""Cost tables and calibrations: fitted on known numbers, and made of a tiny pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engines.calibrate import Fit, Rounds, calibrate, errors, fit, fit_positions, outcomes
from engines.cost_profile import monotone, profile
from runtime.calibration import load_calibration, sigmoid
from runtime.config import ConfigError, RuntimeConfig
from runtime.cost import TableError, load_cost
from runtime.decoder import Model
from runtime.manifest import load_manifest
from runtime.request import validate_request
from tests.runtime.fakes import run_all


@given(arrays(np.float64, st.tuples(*[st.integers(1, 5)] * 3), elements=st.floats(0.125, 8)))
def test_monotone_costs_fall_along_no_axis_and_stay_where_they_did_not(values: np.ndarray) -> None:
    smoothed = monotone(values)
    for axis in range(3):
        assert (np.diff(smoothed, axis=axis) >= -1e-12).all()
    assert np.allclose(monotone(smoothed), smoothed)
    assert values.min() <= smoothed.min()
    assert smoothed.max() <= values.max()


def test_noise_around_a_level_does_not_raise_it() -> None:
    noisy = 1 + 0.1 * np.tile([1.0, -1.0], 10)
    assert monotone(noisy).mean() == pytest.approx(1.0)


def _rounds(count: int, verified: int | None = None) -> Rounds:
    """Rounds whose true confidence is sigmoid(z / 2 + 0.7 s - 1), three positions."""
    random = np.random.default_rng(5)
    signals = random.normal(0.5, 2.0, (count, 3, 2)).astype(np.float32)
    happens = random.random((count, 3)) < sigmoid(signals @ [0.5, 0.7] - 1)
    shown = random.integers(0, 4, count) if verified is None else np.full(count, verified)
    accepted = np.minimum(np.logical_and.accumulate(happens, axis=1).sum(axis=1), shown)
    return Rounds(signals, shown, accepted, np.arange(count) // 10)


@pytest.mark.parametrize("verified", [3, None])
def test_the_fit_finds_the_parameters(verified: int | None) -> None:
    """Also from rounds that are trimmed to a random length: censoring biases nothing.

    Of later positions fewer rounds tell, hence the tolerance.
    """
    fitted = fit_positions(_rounds(8_000, verified))
    assert fitted.temperatures == pytest.approx([2, 2, 2], rel=0.3)
    assert fitted.weights == pytest.approx([0.7, 0.7, 0.7], rel=0.3)
    assert fitted.offsets == pytest.approx([-1, -1, -1], abs=0.35)


def test_a_round_tells_about_what_was_verified_in_it_and_no_more() -> None:
    rounds = Rounds(
        np.zeros((4, 3, 2), np.float32),
        np.array([3, 1, 0, 2]),
        np.array([1, 1, 0, 0]),
        np.arange(4),
    )
    survival = np.tile([0.5, 0.25, 0.125], (4, 1))
    known = [outcomes(rounds, survival, k)[1].tolist() for k in range(3)]
    assert known == [[True, True, False], [False, False], [False]]


def test_the_error_falls_to_the_noise_and_is_judged_on_the_other_half() -> None:
    rounds = _rounds(8_000, verified=3)
    scaling = fit(rounds)
    assert min(scaling.ece_before) > 0.1
    assert max(scaling.ece_after) < 0.03
    assert all(0.7 < auc < 0.95 for auc in scaling.auc)
    parameters = (scaling.temperatures, scaling.certainty_weights, scaling.offsets)
    again = Fit(*map(np.array, parameters)).survival(rounds.signals)
    assert max(errors(rounds, again)) < 0.03


def test_nothing_is_measured_again_until_something_changes(measured_build: Path) -> None:
    assert not profile(measured_build, threads=1, max_requests=2, repeats=1)
    assert not calibrate(measured_build, threads=1, num_rounds=60)
    for name in ("cost/cost.png", "calibration/reliability.png"):
        assert (measured_build / "engines" / name).read_bytes().startswith(b"\x89PNG")


def test_the_table_is_good_for_these_engines_threads_and_requests(measured_build: Path) -> None:
    manifest = load_manifest(measured_build / "engines")
    table = load_cost(measured_build / "engines", manifest, threads=1, max_requests=2)
    assert table.segment_lens == (1, 2, 3, 4, 5, 6)
    assert table.requests == (1, 2)
    assert 0 < table.draft_cost(1, 64) < 1
    costs = table.verify_cost(2, 10, 64)
    assert len(costs) == 11
    assert 0 < costs[0] <= costs[-1] < 1
    with pytest.raises(TableError, match="threads"):
        load_cost(measured_build / "engines", manifest, threads=2, max_requests=2)


def test_the_calibration_belongs_to_the_pair(measured_build: Path) -> None:
    manifest = load_manifest(measured_build / "engines")
    calibration = load_calibration(measured_build / "engines", manifest)
    assert calibration.greedy.num_rounds >= 60
    assert len(calibration.sampling.temperatures) == 5
    assert max(calibration.greedy.ece_after) < 0.2


def test_a_measured_model_schedules_by_default_and_stays_exact(measured_build: Path) -> None:
    config = RuntimeConfig(num_threads=1, max_batch_requests=2, kv_cache_mb=64, prefix_cache_mb=0)
    model = Model(measured_build / "engines", measured_build / "hf", config)
    assert str(model.make_loop().scheduler.default) == "throughput"
    requests = [
        validate_request(
            {"prompt_ids": [5, 6, seed + 7], "max_tokens": 24, "ignore_eos": True}, model.limits
        )
        for seed in range(4)
    ]
    expected = [r.token_ids for r in run_all(model.make_loop("off"), requests)]
    for policy in (None, "threshold", "lagged", "fixed"):
        assert [r.token_ids for r in run_all(model.make_loop(policy), requests)] == expected
    model.close()


def test_without_tables_it_warns_and_verifies_whole_drafts(
    tiny_pair_build: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RuntimeConfig(num_threads=1, kv_cache_mb=64, prefix_cache_mb=0)
    model = Model(tiny_pair_build / "engines", tiny_pair_build / "hf", config)
    assert "no cost table of this engine: run `dspark profile`" in caplog.text
    assert str(model.make_loop().scheduler.default) == "fixed"
    with pytest.raises(ConfigError, match="policy throughput needs a cost table"):
        model.make_loop("throughput")
    model.close()
