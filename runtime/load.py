"""The load gauge: how busy the server is, in [0, 1], for the `threshold` policy and for metrics.

It is the largest of three parts, each in [0, 1]: where the step latency lies between two configured
marks, how many slots are taken (a request that waits takes one too), and how busy NVML says the GPU
is, where there is one. Steps of the past enter, never the drafts that are being scheduled.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from runtime.config import RuntimeConfig

SMOOTHING = 0.1  # weight of the newest step in the latency's moving average
NVML_PERIOD_S = 0.5  # asking takes longer than a small step

Utilisation = Callable[[], float]


class LoadGauge:
    """Follows the load from step to step."""

    def __init__(self, config: RuntimeConfig, utilisation: Utilisation | None = None) -> None:
        """Start at load 0.

        Args:
            config: its latency marks and slots.
            utilisation: the GPU's, in [0, 1]; None where there is none.
        """
        self._low_s = config.load_low_step_ms / 1e3
        self._high_s = config.load_high_step_ms / 1e3
        self._slots = config.max_batch_requests
        self._utilisation = utilisation
        self._gpu = 0.0
        self._gpu_next_s = 0.0
        self._step_s = 0.0
        self.value = 0.0

    def update(self, step_s: float, running: int, waiting: int) -> float:
        """Take in a step's seconds and the requests that run and wait now; returns the load."""
        self._step_s += (SMOOTHING if self._step_s else 1.0) * (step_s - self._step_s)
        latency = (self._step_s - self._low_s) / (self._high_s - self._low_s)
        slots = (running + waiting) / self._slots
        self.value = min(1.0, max(0.0, latency, slots, self._gpu_load()))
        return self.value

    def _gpu_load(self) -> float:
        if self._utilisation is not None and time.monotonic() >= self._gpu_next_s:
            self._gpu_next_s = time.monotonic() + NVML_PERIOD_S
            self._gpu = self._utilisation()
        return self._gpu


def nvml_utilisation() -> Utilisation | None:
    """The first visible GPU's utilisation through NVML; None without a GPU or pynvml."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # not installed, no driver, no GPU: pynvml has an error class for each
        return None

    def utilisation() -> float:
        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except pynvml.NVMLError:  # not worth a failed step
            return 0.0

    return utilisation
