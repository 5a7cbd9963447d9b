"""The configuration refuses what it does not know, naming the option, the limit and the value."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from runtime.config import ConfigError, RuntimeConfig, config_from_mapping, load_config


def test_an_empty_object_means_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert load_config(path) == RuntimeConfig() == config_from_mapping({})


def test_json_round_trips(tmp_path: Path) -> None:
    config = RuntimeConfig(max_batch_requests=3, request_timeout_s=1.5, policy="off")
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    assert load_config(path) == config


def test_an_integer_is_a_valid_number_of_seconds() -> None:
    assert config_from_mapping({"request_timeout_s": 5}).request_timeout_s == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_batch": 4}, "unknown option 'max_batch'; options are acceptance, default_max"),
        ({"max_batch_requests": "4"}, "max_batch_requests must be of type int, got '4'"),
        ({"max_batch_requests": 4.0}, "max_batch_requests must be of type int, got 4.0"),
        ({"max_batch_requests": True}, "max_batch_requests must be of type int, got True"),
        ({"request_timeout_s": True}, "request_timeout_s must be of type float, got True"),
        ({"policy": None}, "policy must be of type str, got None"),
        ({"acceptance": "greedy"}, "acceptance must be auto, rejection or coupled, got 'greedy'"),
        ({"request_timeout_s": math.nan}, "request_timeout_s must be above 0, got nan"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(values)
    assert str(caught.value).startswith(message)


NUMBERS = {
    f.name: f.default for f in dataclasses.fields(RuntimeConfig) if f.type in ("int", "float")
}
ZERO_ALLOWED = {
    "num_threads",
    "max_model_tokens",
    "max_stop_words",
    "max_stop_word_chars",
    "max_bad_words",
    "max_logit_bias",
    "prefix_cache_mb",
    "min_gain",
    "load_low_step_ms",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_lower_bound(name: str) -> None:
    """A field added without one would let a negative size through."""
    bound = "0 or above" if name in ZERO_ALLOWED else "above 0"
    with pytest.raises(ConfigError, match=f"{name} must be {bound}, got -1"):
        config_from_mapping({name: -1})
    if name in ZERO_ALLOWED:
        assert getattr(config_from_mapping({name: 0}), name) == 0
    else:
        with pytest.raises(ConfigError, match=f"{name} must be above 0, got 0"):
            config_from_mapping({name: 0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("3", "must hold a JSON object, got int"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path} {message}")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_config(path)


def test_defaults_serialise_with_every_option() -> None:
    assert json.loads(RuntimeConfig().to_json()).keys() == {
        f.name for f in dataclasses.fields(RuntimeConfig)
    }


def test_zero_threads_means_this_processs_cores() -> None:
    assert RuntimeConfig().engine_threads == len(os.sched_getaffinity(0))
    assert RuntimeConfig(num_threads=3).engine_threads == 3


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RuntimeConfig().policy = "off"  # type: ignore[misc]
