"""The door: what a client may say, and the sentence that answers anything else."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from runtime.request import (
    MIN_TEMPERATURE,
    PARAMETERS,
    InvalidRequest,
    Request,
    RequestLimits,
    validate_request,
)

LIMITS = RequestLimits(
    vocab_size=100,
    max_model_tokens=20,
    max_stop_words=2,
    max_stop_word_chars=5,
    default_max_tokens=8,
    max_bad_words=2,
    max_logit_bias=2,
)


def validate(limits: RequestLimits = LIMITS, **fields: Any) -> Request:
    return validate_request({"prompt_ids": [1, 2, 3], **fields}, limits)


def refusal(limits: RequestLimits = LIMITS, **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        validate(limits, **fields)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults() -> None:
    request = validate()
    assert dataclasses.asdict(request) == {
        "prompt_ids": (1, 2, 3),
        "max_tokens": 8,
        "stream": False,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": request.seed,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": (),
        "bad_words": (),
        "stop_words": (),
        "min_tokens": 0,
        "end_id": None,
        "ignore_eos": False,
        "return_log_probs": False,
        "num_draft_tokens": None,
        "disable_spec_decode": False,
        "cache_salt": "",
        "disable_prefix_cache": False,
        "policy": None,
        "coupled": False,
    }
    assert request.greedy


def test_none_means_the_default() -> None:
    fields = dict.fromkeys(set(PARAMETERS) - {"prompt_ids"})
    request = validate(**fields)
    assert dataclasses.replace(request, seed=0) == dataclasses.replace(validate(), seed=0)


def test_a_seed_is_drawn_when_absent() -> None:
    """A fixed default would give every client the same "random" text."""
    seeds = {validate().seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("max_tokens", 17, 17),
        ("max_tokens", np.int32(4), 4),
        ("stream", True, True),
        ("stream", np.True_, True),
        ("temperature", 1, 1.0),
        ("temperature", 100, 100.0),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", MIN_TEMPERATURE, MIN_TEMPERATURE),
        ("top_k", 0, 0),
        ("top_p", 1e-9, 1e-9),
        ("min_p", 1, 1.0),
        ("seed", 0, 0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("stop_words", ["ab", "€€€€€"], ("ab", "€€€€€")),
        ("stop_words", np.array(["ab"], object), ("ab",)),
        ("ignore_eos", True, True),
        ("num_draft_tokens", 0, 0),
        ("disable_spec_decode", True, True),
        ("repetition_penalty", 10, 10.0),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("logit_bias", '{"99": -100, "5": 1.5}', ((5, 1.5), (99, -100.0))),
        ("logit_bias", {7: 100}, ((7, 100.0),)),
        ("bad_words", ["ab"], ("ab",)),
        ("min_tokens", 8, 8),
        ("end_id", 99, 99),
        ("return_log_probs", True, True),
        ("prompt_ids", np.array([0, 99]), (0, 99)),
        ("prompt_ids", (5,), (5,)),
    ],
)
def test_accepted_values(name: str, value: Any, stored: Any) -> None:
    result = getattr(validate(**{name: value}), name)
    assert result == stored
    assert type(result) is type(stored)  # plain Python types: numpy ones would not serialise


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("max_tokens", -5, "max_tokens must be at least 1, got -5"),
        ("max_tokens", True, "max_tokens must be of type int, got True"),
        ("max_tokens", 2.0, "max_tokens must be of type int, got 2.0"),
        ("max_tokens", "2", "max_tokens must be of type int, got '2'"),
        (
            "max_tokens",
            18,
            "prompt and max_tokens together may have at most 20 tokens, got 3 + 18",
        ),
        ("stream", 1, "stream must be of type bool, got 1"),
        ("temperature", -1, "temperature must be at least 0 and at most 100, got -1"),
        ("temperature", math.nan, "temperature must be at least 0 and at most 100, got nan"),
        ("temperature", math.inf, "temperature must be at least 0 and at most 100, got inf"),
        ("temperature", -math.inf, "temperature must be at least 0 and at most 100, got -inf"),
        ("temperature", 100.5, "temperature must be at least 0 and at most 100, got 100.5"),
        ("temperature", 10**20, f"temperature must be at least 0 and at most 100, got {10**20}"),
        ("temperature", 1e-300, "temperature must be 0 or at least 0.001, got 1e-300"),
        ("temperature", True, "temperature must be of type float, got True"),
        ("temperature", "hot", "temperature must be of type float, got 'hot'"),
        ("temperature", [1.0], "temperature must be of type float, got [1.0]"),
        ("top_k", -1, "top_k must be at least 0, got -1"),
        ("top_k", 1.5, "top_k must be of type int, got 1.5"),
        ("top_p", 0, "top_p must be above 0 and at most 1, got 0"),
        ("top_p", 2, "top_p must be above 0 and at most 1, got 2"),
        ("top_p", math.nan, "top_p must be above 0 and at most 1, got nan"),
        ("min_p", -0.1, "min_p must be at least 0 and at most 1, got -0.1"),
        ("min_p", 1.1, "min_p must be at least 0 and at most 1, got 1.1"),
        ("seed", -1, f"seed must be at least 0 and at most {2**64 - 1}, got -1"),
        ("seed", 2**64, f"seed must be at least 0 and at most {2**64 - 1}, got {2**64}"),
        ("stop_words", "END", "stop_words must be a list, got 'END'"),
        ("stop_words", b"END", "stop_words must be a list, got b'END'"),
        ("stop_words", {"END": 1}, "stop_words must be a list, got {'END': 1}"),
        ("stop_words", np.array("END"), "stop_words must be a list, got array('END'"),
        ("stop_words", 5, "stop_words must be a list, got 5"),
        ("stop_words", [5], "stop_words must be of type str, got 5"),
        ("stop_words", [None], "stop_words must be of type str, got None"),
        ("stop_words", ["a", "b", "c"], "stop_words may hold at most 2 strings, got 3"),
        ("stop_words", [""], "a stop word must have 1 to 5 characters, got 0"),
        ("stop_words", ["123456"], "a stop word must have 1 to 5 characters, got 6"),
        ("ignore_eos", "yes", "ignore_eos must be of type bool, got 'yes'"),
        ("num_draft_tokens", -1, "num_draft_tokens must be at least 0, got -1"),
        ("disable_spec_decode", 0, "disable_spec_decode must be of type bool, got 0"),
        (
            "acceptance",
            "always",
            "acceptance must be one of auto, rejection, coupled, got 'always'",
        ),
        ("acceptance", 1, "acceptance must be of type str, got 1"),
        ("repetition_penalty", 0, "repetition_penalty must be above 0 and at most 10, got 0"),
        ("presence_penalty", 2.1, "presence_penalty must be at least -2 and at most 2, got 2.1"),
        ("frequency_penalty", math.nan, "frequency_penalty must be at least -2 and at most 2"),
        ("logit_bias", "5", "logit_bias must be a JSON object like {\"50\": -100}, got '5'"),
        ("logit_bias", "{", "logit_bias must be a JSON object like"),
        ("logit_bias", "[" * 9999, "logit_bias must be a JSON object like"),
        ("logit_bias", '{"x": 1}', "logit_bias must be a JSON object like"),
        ("logit_bias", '{"-1": 1}', "logit_bias must map token ids to numbers, at least -100"),
        ("logit_bias", '{"1": "1"}', "logit_bias must map token ids to numbers"),
        ("logit_bias", '{"1": NaN}', "logit_bias must map token ids to numbers"),
        ("logit_bias", '{"1": 101}', "logit_bias must map token ids to numbers"),
        ("logit_bias", '{"1": 1, "01": 2}', "logit_bias names a token id twice"),
        ("logit_bias", {100: 1}, "logit_bias must be below the vocabulary size 100, got 100"),
        ("logit_bias", {1: 1, 2: 1, 3: 1}, "logit_bias may hold at most 2 token ids, got 3"),
        ("bad_words", ["a", "b", "c"], "bad_words may hold at most 2 strings, got 3"),
        ("bad_words", [""], "a bad word must have 1 to 5 characters, got 0"),
        ("min_tokens", 9, "min_tokens may be at most max_tokens, 8, got 9"),
        ("end_id", 100, "end_id must be below the vocabulary size 100, got 100"),
        ("return_context_logits", True, "return_context_logits is not served: a prompt is"),
        ("return_generation_logits", True, "return_generation_logits is not served: logits"),
        ("prompt_ids", [], "the prompt is empty: it must hold at least 1 token"),
        ("prompt_ids", None, "the prompt is empty: it must hold at least 1 token"),
        ("prompt_ids", [100], "prompt_ids must be below the vocabulary size 100, got 100"),
        ("prompt_ids", [3, -1], "prompt_ids must be at least 0, got -1"),
        ("prompt_ids", [True], "prompt_ids must be of type int, got True"),
        ("prompt_ids", [[1]], "prompt_ids must be of type int, got [1]"),
        ("prompt_ids", np.array([[1]]), "prompt_ids must be a list, got array([[1]])"),
        ("prompt_ids", [1] * 20, "the prompt may have at most 19 tokens, got 20"),
    ],
)
def test_refusals_name_the_limit_and_the_value(name: str, value: Any, message: str) -> None:
    assert refusal(**{name: value}).startswith(message)


def test_an_alias_is_the_parameter_itself() -> None:
    assert validate(random_seed=7).seed == validate(seed=7).seed == 7
    assert validate(min_length=3).min_tokens == 3
    assert refusal(random_seed=7, seed=7) == "seed and random_seed mean the same: give one of them"


def test_an_end_token_of_the_requests_own_contradicts_ignoring_it() -> None:
    assert refusal(end_id=3, ignore_eos=True) == "give either end_id or ignore_eos, got both"


def test_an_integer_too_large_for_a_float_is_refused_like_any_other() -> None:
    """float(10**400) raises OverflowError, which would have been our fault, not the client's."""
    assert "temperature must be at least 0 and at most 100, got 1000" in refusal(
        temperature=10**400
    )


def test_unknown_parameters_are_refused_with_the_known_ones() -> None:
    """Ignored, a misspelt `max_token` would run to the default length and look accepted."""
    message = refusal(max_token=5)
    assert message == f"unknown parameter 'max_token'; parameters are {', '.join(PARAMETERS)}"


def test_a_long_value_is_shortened_in_the_sentence() -> None:
    for name in ("temperature", "acceptance", "policy", "logit_bias"):
        assert len(refusal(**{name: "x" * 10_000})) < 200, name
    assert "xxx..." in refusal(**{"x" * 10_000: 1})


def test_max_tokens_defaults_to_what_fits() -> None:
    assert validate(prompt_ids=[1] * 15).max_tokens == 5
    assert validate(prompt_ids=[1] * 19).max_tokens == 1
    assert validate(prompt_ids=[1] * 15, max_tokens=5).max_tokens == 5


@pytest.mark.parametrize(
    ("server", "asked", "seed", "coupled"),
    [
        ("auto", None, None, False),
        ("auto", None, 7, True),
        ("auto", "rejection", 7, False),
        ("auto", "coupled", None, True),
        ("rejection", None, 7, False),
        ("rejection", "coupled", None, True),
        ("coupled", None, None, True),
        ("coupled", "rejection", 7, False),
    ],
)
def test_the_rule_is_the_requests_then_the_servers_then_by_seed(
    server: str, asked: str | None, seed: int | None, coupled: bool
) -> None:
    limits = dataclasses.replace(LIMITS, acceptance=server)
    assert validate(limits, acceptance=asked, seed=seed).coupled is coupled


def test_every_parameter_explains_itself_and_accepts_its_default() -> None:
    for parameter in PARAMETERS.values():
        assert parameter.help or parameter.name == "seed"
        if parameter.default is not None:
            accepted = parameter.parse(parameter.default)
            assert accepted == (() if parameter.name == "logit_bias" else parameter.default)
