"""Runtime configuration: one frozen dataclass, from which CLI and packaging read defaults."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20


class ConfigError(Exception):
    """A configuration value is out of range or unknown."""


@dataclass(frozen=True)
class RuntimeConfig:
    """Everything the decoder can be told. Units are in the names."""

    # Capacity
    max_batch_requests: int = 16  # requests that run at once
    kv_cache_mb: int = 1024  # of running requests, verifier and drafter together
    prefill_chunk_tokens: int = 128  # a prefill delays running requests by one such chunk at most
    max_queued_requests: int = 1024
    num_threads: int = 0  # of the engine; 0 means all cores

    # Limits a client meets
    max_model_tokens: int = 0  # prompt and output together; 0 means the model's own context
    max_prompt_bytes: int = 1 * MIB
    max_stop_words: int = 16
    max_stop_word_chars: int = 256  # of a bad word too
    max_bad_words: int = 64
    max_logit_bias: int = 300  # token ids
    default_max_tokens: int = 256
    request_timeout_s: float = 600.0

    # Prefix cache
    prefix_cache_mb: int = 4096  # on top of kv_cache_mb, at most what is free; 0 is off
    prefix_cache_dir: str = ""  # keeps cached blocks across restarts; empty: in memory alone
    prefix_cache_disk_mb: int = 16384  # of files in prefix_cache_dir

    # Speculation
    # off | fixed[:k] | threshold[:base] | throughput | lagged | auto (throughput where this engine
    # and machine have a cost table and a calibration, fixed where they have not)
    policy: str = "auto"
    # Share of throughput below which a predicted gain is not acted on: neither is a draft trimmed
    # for it, nor drafting taken up again.
    min_gain: float = 0.01
    acceptance: str = "auto"  # rejection | coupled | auto (coupled when the request names a seed)

    # Load, for the policy `threshold`: 0 at steps up to the first mark, 1 from the second on
    load_low_step_ms: float = 50.0
    load_high_step_ms: float = 250.0

    # Health
    stall_timeout_s: float = 60.0  # no finished step for this long, with work waiting, is unhealthy
    drain_timeout_s: float = 30.0  # what running requests get to finish when the server is stopped

    def __post_init__(self) -> None:
        positive = (
            "max_batch_requests",
            "kv_cache_mb",
            "prefill_chunk_tokens",
            "max_queued_requests",
            "max_prompt_bytes",
            "prefix_cache_disk_mb",
            "default_max_tokens",
            "request_timeout_s",
            "stall_timeout_s",
            "drain_timeout_s",
            "load_high_step_ms",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        not_negative = (
            "num_threads",
            "max_model_tokens",
            "max_stop_words",
            "max_stop_word_chars",
            "max_bad_words",
            "max_logit_bias",
            "prefix_cache_mb",
            "min_gain",
            "load_low_step_ms",
        )
        for name in not_negative:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or above, got {getattr(self, name)}")
        if self.prefix_cache_dir and not self.prefix_cache_mb:
            raise ConfigError("prefix_cache_dir needs prefix_cache_mb above 0, got 0")
        if self.min_gain >= 1:
            raise ConfigError(f"min_gain must be below 1, got {self.min_gain}")
        if self.load_low_step_ms >= self.load_high_step_ms:
            raise ConfigError(
                f"load_low_step_ms must be below load_high_step_ms, which is "
                f"{self.load_high_step_ms}, got {self.load_low_step_ms}"
            )
        if self.acceptance not in ("auto", "rejection", "coupled"):
            raise ConfigError(
                f"acceptance must be auto, rejection or coupled, got {self.acceptance!r}"
            )

    @property
    def engine_threads(self) -> int:
        """Threads of the engine with 0 resolved to this machine's cores."""
        return self.num_threads or len(os.sched_getaffinity(0))

    def to_json(self) -> str:
        """The configuration as indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def config_from_mapping(values: dict[str, Any]) -> RuntimeConfig:
    """Build a RuntimeConfig, refusing unknown keys and wrong types.

    Raises ConfigError naming the key and the valid ones.
    """
    fields = {f.name: f for f in dataclasses.fields(RuntimeConfig)}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"unknown option {name!r}; options are {', '.join(sorted(fields))}")
        expected = type(fields[name].default)
        fits = isinstance(value, expected) and not (expected is int and isinstance(value, bool))
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            fits = True
        if not fits:
            raise ConfigError(f"{name} must be of type {expected.__name__}, got {value!r}")
    return RuntimeConfig(**values)


def load_config(path: Path) -> RuntimeConfig:
    """Read a RuntimeConfig from a JSON file of overrides (an empty object means the defaults)."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return config_from_mapping(values)
