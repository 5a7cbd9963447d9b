"""The load gauge: the largest of latency, slots and GPU, in [0, 1]."""

from __future__ import annotations

import sys
import types

import pytest

from runtime.config import RuntimeConfig
from runtime.load import SMOOTHING, LoadGauge, nvml_utilisation

CONFIG = RuntimeConfig(max_batch_requests=8, load_low_step_ms=100, load_high_step_ms=300)


@pytest.mark.parametrize(
    ("step_s", "running", "waiting", "load"),
    [
        (0.05, 0, 0, 0.0),
        (0.1, 2, 0, 0.25),  # slots
        (0.2, 2, 0, 0.5),  # latency, halfway between the marks
        (0.2, 4, 2, 0.75),  # who waits wants a slot too
        (9.0, 1, 0, 1.0),
        (0.0, 8, 100, 1.0),
    ],
)
def test_the_largest_part_counts(step_s: float, running: int, waiting: int, load: float) -> None:
    gauge = LoadGauge(CONFIG)
    assert gauge.value == 0
    assert gauge.update(step_s, running, waiting) == pytest.approx(load)
    assert gauge.value == pytest.approx(load)


def test_one_slow_step_moves_it_a_little() -> None:
    gauge = LoadGauge(CONFIG)
    gauge.update(0.1, 0, 0)
    gauge.update(0.3, 0, 0)
    assert gauge.value == pytest.approx(SMOOTHING)


def test_a_gpu_is_asked_now_and_then_only() -> None:
    asked = []

    def utilisation() -> float:
        asked.append(1)
        return 0.6

    gauge = LoadGauge(CONFIG, utilisation)
    for _ in range(50):
        assert gauge.update(0.1, 0, 0) == pytest.approx(0.6)
    assert len(asked) == 1


def test_nvml_is_used_where_it_is_and_its_failures_are_no_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = types.SimpleNamespace(
        NVMLError=ValueError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=75),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    utilisation = nvml_utilisation()
    assert utilisation is not None
    assert utilisation() == 0.75

    def broken(handle: int) -> None:
        raise ValueError

    fake.nvmlDeviceGetUtilizationRates = broken
    assert utilisation() == 0.0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_utilisation() is None
