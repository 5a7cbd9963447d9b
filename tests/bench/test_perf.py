"""What goes into perf_analyzer and what is made of its export."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import perf
from bench.perf import (
    ATTEMPTS,
    Row,
    concurrencies,
    make_inputs,
    measure,
    prepare_perf_analyzer,
    summarise,
)
from runtime.config import ConfigError
from triton_repo.contract import INPUTS
from triton_repo.server import Address


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", [3]), ("1:4", [1, 2, 3, 4]), ("1:8:3", [1, 4, 7]), ("5:4", [])],
)
def test_concurrencies(text: str, numbers: list[int]) -> None:
    assert concurrencies(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "1:", "a:b", "1:2:3:4", "-1"])
def test_a_wrong_concurrency_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="concurrency must be FROM:TO"):
        concurrencies(text)


def test_inputs_are_what_the_served_model_takes() -> None:
    inputs = make_inputs(["a", "b"], "fixed:3", 7)
    common = {"max_tokens": [7], "stream": [True], "ignore_eos": [True], "policy": ["fixed:3"]}
    assert inputs["data"] == [{"text_input": [p], **common} for p in "ab"]
    assert all(set(item) <= set(INPUTS) for item in inputs["data"])


def test_summary_of_an_export() -> None:
    ms = 1_000_000
    requests = [
        {"timestamp": 0, "response_timestamps": [10 * ms, 20 * ms, 50 * ms]},
        {"timestamp": 40 * ms, "response_timestamps": [70 * ms, 100 * ms]},
        {"timestamp": 90 * ms, "response_timestamps": []},  # unfinished when measuring ended
    ]
    experiment = {"experiment": {"mode": "concurrency", "value": 2}, "requests": requests}
    row = summarise({"experiments": [experiment]}, num_tokens=5)
    assert row == Row(
        concurrency=2,
        requests=2,
        tokens_per_s=pytest.approx(100.0),
        first_token_ms=pytest.approx(20.0),
        first_token_p99_ms=pytest.approx(30.0),
        inter_token_ms=pytest.approx((40 / 4 + 30 / 4) / 2),
        request_ms=pytest.approx(55.0),
    )


HALF_AN_EXPORT = """#!/bin/sh
for argument; do case $argument in --profile-export-file=*) export=${argument#*=}; esac; done
echo run >> runs
whole='{"experiments": [{"experiment": {"value": 1}, "requests":
  [{"timestamp": 0, "response_timestamps": [1000000, 3000000]}]}]}'
if [ $(wc -l < runs) -lt WHOLE_AT ]; then echo '{"experiments": [{"ex' > "$export"
else echo "$whole" > "$export"; fi
"""


@pytest.mark.parametrize(("whole_at", "num_runs"), [(2, 2), (9, 5)])
def test_half_an_export_is_measured_again(
    whole_at: int, num_runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "perf_analyzer"
    program.write_text(HALF_AN_EXPORT.replace("WHOLE_AT", str(whole_at)))
    program.chmod(0o755)
    args = argparse.Namespace(requests=1, max_tokens=3)
    measured = (program, dict(os.environ), Address(), tmp_path / "inputs-off.json", 1, args)
    if whole_at <= ATTEMPTS:
        assert measure(*measured).inter_token_ms == pytest.approx(1.0)
    else:
        with pytest.raises(ConfigError, match=r"left only a part of .*export-off-1\.json, 5 times"):
            measure(*measured)
    assert len((tmp_path / "runs").read_text().split()) == num_runs


def test_a_missing_system_library_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "perf_analyzer"
    said = "error while loading shared libraries: libb64.so.0d: cannot open shared object file"
    program.write_text(f"#!/bin/sh\necho '{program}: {said}' >&2; exit 127\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match=r"libb64\.so\.0d: install it.*apt-get install libb64-0d"):
        prepare_perf_analyzer(tmp_path)
    assert os.readlink(tmp_path / "libcudart.so.12")


def test_a_wheel_that_cannot_be_fetched_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "no network")

    monkeypatch.setattr(perf.subprocess, "run", no_network)
    with pytest.raises(ConfigError, match=r"tritonclient==2\.50\.0 could not be fetched.*no net"):
        prepare_perf_analyzer(tmp_path / "tools")
