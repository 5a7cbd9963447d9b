"""`dspark generate` and `dspark eval` on a tiny model, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import main

pytestmark = pytest.mark.slow


def dspark(*args: str, build: Path) -> int:
    place = ["--name", build.name, "--build-dir", str(build.parent), "--threads", "1"]
    return main([args[0], *place, *args[1:]])


def test_generate_prints_the_text_and_a_line_of_statistics(
    tiny_build: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dspark("generate", "--prompt", "the dog", "--max-tokens", "8", build=tiny_build) == 0
    shown = capsys.readouterr()
    for words in ("prompt tokens", "tokens/s", "first token after", "tokens per round"):
        assert words in shown.err
    code = dspark(
        "generate", "--prompt", "the dog", "--max-tokens", "8", "--json", build=tiny_build
    )
    assert code == 0
    result = json.loads(capsys.readouterr().out)
    assert shown.out.strip() == result["text"].strip()
    assert len(result["output_ids"]) == result["num_output_tokens"] <= 8


def test_generate_takes_every_request_parameter(
    tiny_pair_build: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["generate", "--prompt", "the dog", "--max-tokens", "8", "--json", "--return-log-probs"]
    args += ["--ignore-eos", "--bad-words", "dog", "fox", "--repetition-penalty", "1.1"]
    assert dspark(*args, build=tiny_pair_build) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["log_probs"]) == 8
    bias = json.dumps(dict.fromkeys(map(str, result["output_ids"]), -100))
    assert dspark(*args, "--logit-bias", bias, build=tiny_pair_build) == 0
    assert not set(json.loads(capsys.readouterr().out)["output_ids"]) & set(result["output_ids"])


def test_generate_colours_drafts(tiny_pair_build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "--prompt", "the dog", "--max-tokens", "24")
    assert dspark(*args, "--show-drafts", build=tiny_pair_build) == 0
    coloured = capsys.readouterr().out
    assert "\033[33m" in coloured  # a random drafter is corrected nearly always
    assert dspark(*args, "--policy", "off", build=tiny_pair_build) == 0
    plain = capsys.readouterr().out
    for code in ("\033[32m", "\033[33m", "\033[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == plain


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "x", "--temperature", "-1"), "temperature must be at least 0"),
        (("--prompt", "x", "--policy", "fast"), "policy must be off, fixed, fixed:k"),
        (("--prompt", "x", "--max-tokens", "100000"), "together may have at most"),
    ],
)
def test_a_mistake_is_one_sentence(
    args: tuple[str, ...], sentence: str, tiny_pair_build: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dspark("generate", *args, build=tiny_pair_build) == 1
    assert sentence in capsys.readouterr().err


def test_a_missing_build_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dspark("generate", "--prompt", "x", build=tmp_path / "none") == 1
    assert "make engines" in capsys.readouterr().err


def test_eval_compares_policies_and_finds_them_identical(
    tiny_pair_build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"turns": [f"the dog {i}"]}) + "\n" for i in range(5)))
    args = ["eval", "--prompts", str(prompts), "--limit", "4", "--max-new-tokens", "12"]
    args += ["--policies", "off,fixed:2,fixed", "--batch", "2", "--json", str(out)]
    assert dspark(*args, build=tiny_pair_build) == 0
    report = json.loads(out.read_text())
    assert list(report["policies"]) == ["off", "fixed:2", "fixed"]
    assert report["num_prompts"] == 4
    for policy in report["policies"].values():
        assert policy["identical_to_off"] is True
        assert policy["accepted_length"] >= 1
        assert policy["tokens_per_s"] > 0
    assert report["policies"]["off"]["acceptance_at_position"] == {}
    assert set(report["policies"]["fixed:2"]["acceptance_at_position"]) == {"1", "2"}


def test_eval_names_the_bad_line(
    tiny_pair_build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["x"]}\n{"turn": "y"}\n')
    assert dspark("eval", "--prompts", str(prompts), build=tiny_pair_build) == 1
    assert f"{prompts}:2 is not a JSON object" in capsys.readouterr().err
