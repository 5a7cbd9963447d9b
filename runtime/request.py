"""Requests, validated once at the door, and what goes back to their clients.

`validate_request` turns untrusted fields into a `Request`; everything behind it takes only that
type and checks nothing again. `PARAMETERS` is the one table of what a client may say.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

MIN_TEMPERATURE = 1e-3  # below it logits / temperature overflows fp32; 0 itself means greedy

FinishReason = Literal["length", "stop", "eos", "cancelled", "error"]

# Where a token came from: a draft token that was accepted, the target's token in place of a
# rejected one, or the target's token where nothing was rejected.
Origin = Literal["draft", "corrected", "target"]


class InvalidRequest(ValueError):  # noqa: N818 (it is the client's fault, not an error of ours)
    """The client's fault; the message is one sentence for the client."""


class QueueFull(RuntimeError):  # noqa: N818
    """The waiting queue is at its limit; the message says so and what to do."""


@dataclass(frozen=True)
class Parameter:
    """One request parameter: how it is named, typed, defaulted and bounded."""

    name: str
    type: type
    default: Any
    low: float | None = None
    high: float | None = None
    low_is_open: bool = False
    choices: tuple[str, ...] = ()
    is_list: bool = False
    help: str = ""

    @property
    def range_text(self) -> str:
        """The allowed values in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        low = (
            "" if self.low is None else f"{'above' if self.low_is_open else 'at least'} {self.low}"
        )
        high = "" if self.high is None else f"at most {self.high}"
        return " and ".join(part for part in (low, high) if part) or "any"

    def parse(self, value: Any) -> Any:
        """Check one value (or list); raises InvalidRequest naming the limit and the value."""
        if self.is_list:
            is_array = isinstance(value, np.ndarray) and value.ndim == 1
            if not is_array and not isinstance(value, list | tuple):
                raise InvalidRequest(f"{self.name} must be a list, got {_shown(value)}")
            return tuple(self._parse_one(item) for item in value)
        return self._parse_one(value)

    def _parse_one(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        is_bool = isinstance(value, bool)
        allowed = int | float if self.type is float else self.type
        if not isinstance(value, allowed) or (is_bool and self.type is not bool):
            raise InvalidRequest(
                f"{self.name} must be of type {self.type.__name__}, got {_shown(value)}"
            )
        in_range = not isinstance(value, int | float) or self._in_range(value)
        if not in_range or (self.choices and value not in self.choices):
            raise InvalidRequest(f"{self.name} must be {self.range_text}, got {_shown(value)}")
        return self.type(value)

    def _in_range(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if self.low is not None and (value < self.low or (self.low_is_open and value == self.low)):
            return False
        return self.high is None or value <= self.high


PARAMETERS: dict[str, Parameter] = {
    p.name: p
    for p in (
        Parameter("prompt_ids", int, None, low=0, is_list=True, help="prompt as token ids"),
        Parameter("max_tokens", int, None, low=1, help="most tokens to generate"),
        Parameter("stream", bool, False, help="one response per step instead of one at the end"),
        Parameter("temperature", float, 0.0, low=0, high=100, help="0 takes the most likely token"),
        Parameter("top_k", int, 0, low=0, help="keep the k most likely tokens; 0 keeps all"),
        Parameter(
            "top_p",
            float,
            1.0,
            low=0,
            high=1,
            low_is_open=True,
            help="keep the smallest set of tokens with this probability",
        ),
        Parameter(
            "min_p",
            float,
            0.0,
            low=0,
            high=1,
            help="drop tokens below this fraction of the most likely one's probability",
        ),
        Parameter(
            "seed",
            int,
            None,
            low=0,
            high=2**64 - 1,
            help="fixes the random numbers; drawn at random when absent",
        ),
        Parameter(
            "stop_words", str, (), is_list=True, help="strings that end the text; not returned"
        ),
        Parameter("ignore_eos", bool, False, help="go on after an end-of-sequence token"),
        Parameter(
            "num_draft_tokens", int, None, low=0, help="most draft tokens verified per round"
        ),
        Parameter("disable_spec_decode", bool, False, help="plain decoding for this request"),
        Parameter(
            "acceptance",
            str,
            "auto",
            choices=("auto", "rejection", "coupled"),
            help="rule above temperature 0; auto is coupled when a seed is given",
        ),
    )
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class RequestLimits:
    """What this server can take, resolved from model, pool and configuration."""

    vocab_size: int
    max_model_tokens: int  # prompt and output together
    max_stop_words: int
    max_stop_word_chars: int
    default_max_tokens: int
    acceptance: str = "auto"


@dataclass(frozen=True)
class Request:
    """A valid request. Made only by `validate_request`."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    stream: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_words: tuple[str, ...]
    ignore_eos: bool
    num_draft_tokens: int | None  # None: as many as the policy wants
    disable_spec_decode: bool
    coupled: bool

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature == 0


@dataclass(frozen=True)
class RequestOutput:
    """What happened to a request since its previous output; the last one has a finish reason."""

    text: str
    token_ids: list[int]
    origins: list[Origin]  # of each token
    finish_reason: FinishReason | None
    error: str | None
    num_input_tokens: int
    num_output_tokens: int  # so far
    stats: dict[str, float] = field(default_factory=dict)  # only on the last output


def validate_request(fields: Mapping[str, Any], limits: RequestLimits) -> Request:
    """Check a client's fields against `PARAMETERS` and this server's limits.

    Args:
        fields: parameter names to plain Python (or numpy) values; absent or None means default.
        limits: of this server.

    Raises InvalidRequest with one sentence that names the limit and the value received.
    """
    unknown = sorted(set(fields) - set(PARAMETERS))
    if unknown:
        raise InvalidRequest(
            f"unknown parameter {unknown[0]!r}; parameters are {', '.join(PARAMETERS)}"
        )
    values = {
        name: p.default if fields.get(name) is None else p.parse(fields[name])
        for name, p in PARAMETERS.items()
    }
    prompt_ids: tuple[int, ...] = values["prompt_ids"] or ()
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty: it must hold at least 1 token")
    if max(prompt_ids) >= limits.vocab_size:
        raise InvalidRequest(
            f"prompt_ids must be below the vocabulary size {limits.vocab_size}, "
            f"got {max(prompt_ids)}"
        )
    room = limits.max_model_tokens - len(prompt_ids)
    if room < 1:
        raise InvalidRequest(
            f"the prompt may have at most {limits.max_model_tokens - 1} tokens, "
            f"got {len(prompt_ids)}"
        )
    max_tokens = values["max_tokens"]
    if max_tokens is None:
        max_tokens = min(limits.default_max_tokens, room)
    if max_tokens > room:
        raise InvalidRequest(
            f"prompt and max_tokens together may have at most {limits.max_model_tokens} tokens, "
            f"got {len(prompt_ids)} + {max_tokens}"
        )
    if 0 < values["temperature"] < MIN_TEMPERATURE:
        raise InvalidRequest(
            f"temperature must be 0 or at least {MIN_TEMPERATURE}, got {values['temperature']}"
        )
    stop_words = values["stop_words"]
    if len(stop_words) > limits.max_stop_words:
        raise InvalidRequest(
            f"stop_words may hold at most {limits.max_stop_words} strings, got {len(stop_words)}"
        )
    for word in stop_words:
        if not 1 <= len(word) <= limits.max_stop_word_chars:
            raise InvalidRequest(
                f"a stop word must have 1 to {limits.max_stop_word_chars} characters, "
                f"got {len(word)}"
            )
    seed = values["seed"]
    rule = values["acceptance"]
    if rule == "auto":
        rule = limits.acceptance
    coupled = rule == "coupled" or (rule == "auto" and seed is not None)
    return Request(
        **{
            **{name: values[name] for name in PARAMETERS if name != "acceptance"},
            "prompt_ids": prompt_ids,
            "max_tokens": max_tokens,
            "seed": secrets.randbits(64) if seed is None else seed,
            "coupled": coupled,
        }
    )
