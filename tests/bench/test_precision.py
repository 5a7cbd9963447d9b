"""Deviations are measured where they are and not where they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import main


@pytest.mark.slow
def test_twins_deviate_as_their_dtype_does(
    tiny_pair_build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp32 by summation order alone, fp16 by its 11 bits, bf16 by its 8."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text('{"turns": ["the quick brown fox"]}\n{"turns": ["to the user"]}\n')
    command = ["bench", "precision", "--name", "tiny", "--threads", "1"]
    command += ["--build-dir", str(tiny_pair_build.parent), "--prompts", str(prompts)]
    command += ["--max-new-tokens", "12", "--twins", "fp32,fp16,bf16", "--json", str(out)]
    assert main(command) == 1
    assert "needs --drafter" in capsys.readouterr().err
    assert main([*command, "--drafter", str(tiny_pair_build.parent / "drafter")]) == 0
    report = json.loads(out.read_text())
    assert list(report) == ["tiny", "twin fp32", "twin fp16", "twin bf16"]
    itself, fp32, fp16, bf16 = report.values()
    assert itself["logits_max"] == 0
    assert 0 < fp32["logits_max"] < 1e-4
    for exact in (itself, fp32):
        assert exact["argmax_agreement"] == exact["same_answers"] == 1
        assert exact["accepted_length"] == itself["accepted_length"] >= 1
    assert 4 < bf16["logits_mean"] / fp16["logits_mean"] < 16  # three bits fewer
    assert fp16["logits_mean"] > 100 * fp32["logits_mean"]
    assert fp16["argmax_agreement"] > 0.9
    assert 0 < fp16["total_variation"] < bf16["total_variation"] < 0.2
