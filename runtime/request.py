"""Requests, validated once at the door, and what goes back to their clients.

`validate_request` turns untrusted fields into a `Request`; everything behind it takes only that
type and checks nothing again. `PARAMETERS` is the one table of what a client may say.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from runtime.config import ConfigError
from runtime.schedule import Policy, parse_policy

MIN_TEMPERATURE = 1e-3  # below it logits / temperature overflows fp32; 0 itself means greedy
MAX_CACHE_SALT_CHARS = 256
_MAX_POLICY_CHARS = 40

FinishReason = Literal["length", "stop", "eos", "cancelled", "timeout", "error"]

# Where a token came from: a draft token that was accepted, the target's token in place of a
# rejected one, or the target's token where nothing was rejected.
Origin = Literal["draft", "corrected", "target"]


class InvalidRequest(ValueError):  # noqa: N818 (it is the client's fault, not an error of ours)
    """The client's fault; the message is one sentence for the client."""


class QueueFull(RuntimeError):  # noqa: N818
    """The waiting queue is at its limit; the message says so and what to do."""


@dataclass(frozen=True)
class Parameter:
    """One request parameter: how it is named, typed, defaulted and bounded.

    The type `dict` stands for token id -> number, also as the text of a JSON object; the bounds
    are those of the numbers.
    """

    name: str
    type: type
    default: Any
    low: float | None = None
    high: float | None = None
    low_is_open: bool = False
    choices: tuple[str, ...] = ()
    is_list: bool = False
    help: str = ""
    aliases: tuple[str, ...] = ()
    unserved: str = ""  # why only False is taken; clients written for other servers may say so

    @property
    def range_text(self) -> str:
        """The allowed values in words."""
        if self.unserved:
            return "false"
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
                raise InvalidRequest(f"{self.name} must be a list, got {shown(value)}")
            return tuple(self._parse_one(item) for item in value)
        if self.type is dict:
            return self._parse_numbers(value)
        return self._parse_one(value)

    def _parse_numbers(self, value: Any) -> tuple[tuple[int, float], ...]:
        """Pairs in ascending order of token id."""
        try:
            numbers = json.loads(value) if isinstance(value, str) else value
            pairs = sorted((int(token_id), number) for token_id, number in numbers.items())
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRequest(
                f'{self.name} must be a JSON object like {{"50": -100}}, got {shown(value)}'
            ) from error
        for token_id, number in pairs:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if token_id < 0 or not is_number or not self._in_range(number):
                raise InvalidRequest(
                    f"{self.name} must map token ids to numbers, {self.range_text}, "
                    f"got {token_id}: {shown(number)}"
                )
        if len(dict(pairs)) < len(pairs):
            raise InvalidRequest(f"{self.name} names a token id twice, got {shown(value)}")
        return tuple((token_id, float(number)) for token_id, number in pairs)

    def _parse_one(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        is_bool = isinstance(value, bool)
        allowed = int | float if self.type is float else self.type
        if not isinstance(value, allowed) or (is_bool and self.type is not bool):
            raise InvalidRequest(
                f"{self.name} must be of type {self.type.__name__}, got {shown(value)}"
            )
        in_range = not isinstance(value, int | float) or self._in_range(value)
        if not in_range or (self.choices and value not in self.choices):
            raise InvalidRequest(f"{self.name} must be {self.range_text}, got {shown(value)}")
        if self.unserved and value:
            raise InvalidRequest(f"{self.name} is not served: {self.unserved}")
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
            aliases=("random_seed",),
            help="fixes the random numbers; drawn at random when absent",
        ),
        Parameter(
            "repetition_penalty",
            float,
            1.0,
            low=0,
            high=10,
            low_is_open=True,
            help="divides positive and multiplies negative logits of tokens in prompt or output",
        ),
        Parameter(
            "presence_penalty",
            float,
            0.0,
            low=-2,
            high=2,
            help="subtracted once from the logits of tokens in the output",
        ),
        Parameter(
            "frequency_penalty",
            float,
            0.0,
            low=-2,
            high=2,
            help="subtracted for each time the token is in the output",
        ),
        Parameter(
            "logit_bias",
            dict,
            "{}",
            low=-100,
            high=100,
            help="added to the logits of token ids, as the text of a JSON object",
        ),
        Parameter(
            "bad_words",
            str,
            (),
            is_list=True,
            help="strings whose tokens, with or without a space before them, are not generated",
        ),
        Parameter(
            "stop_words", str, (), is_list=True, help="strings that end the text; not returned"
        ),
        Parameter(
            "min_tokens",
            int,
            0,
            low=0,
            aliases=("min_length",),
            help="tokens before the answer may end by an end token or a stop word",
        ),
        Parameter("end_id", int, None, low=0, help="the end token, instead of the model's own"),
        Parameter("ignore_eos", bool, False, help="go on after an end token"),
        Parameter(
            "return_log_probs",
            bool,
            False,
            help="log-probability of each token after penalties, bias and bans, before "
            "temperature and filters, and their sum so far",
        ),
        Parameter(
            "return_context_logits",
            bool,
            False,
            unserved="a prompt is computed without its logits, so ask for log-probs instead",
            help="only false",
        ),
        Parameter(
            "return_generation_logits",
            bool,
            False,
            unserved="logits stay on the server, so ask for log-probs instead",
            help="only false",
        ),
        Parameter(
            "num_draft_tokens", int, None, low=0, help="most draft tokens verified per round"
        ),
        Parameter("disable_spec_decode", bool, False, help="plain decoding for this request"),
        Parameter("policy", str, None, help="scheduling policy; the server's when absent"),
        Parameter(
            "cache_salt",
            str,
            "",
            help="requests with different salts never share a cached prefix",
        ),
        Parameter(
            "disable_prefix_cache",
            bool,
            False,
            help="neither use nor leave cached prefixes for this request",
        ),
        Parameter(
            "acceptance",
            str,
            "auto",
            choices=("auto", "rejection", "coupled"),
            help="rule above temperature 0; auto is coupled when a seed is given",
        ),
    )
}


ALIASES = {alias: p.name for p in PARAMETERS.values() for alias in p.aliases}


def shown(value: Any) -> str:
    """A client's value for a message, shortened."""
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
    max_bad_words: int = 64
    max_logit_bias: int = 300  # token ids
    block_size: int = 0  # of the drafter
    policies: tuple[str, ...] = ("off",)  # names of those that this server can run


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
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[str, ...]
    stop_words: tuple[str, ...]
    min_tokens: int
    end_id: int | None
    ignore_eos: bool
    return_log_probs: bool
    num_draft_tokens: int | None  # None: as many as the policy wants
    disable_spec_decode: bool
    cache_salt: str
    disable_prefix_cache: bool
    policy: Policy | None  # None: the server's
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
    log_probs: list[float] = field(default_factory=list)  # of each token, where asked for
    cum_log_probs: float = 0.0  # of all tokens so far
    stats: dict[str, float] = field(default_factory=dict)  # only on the last output


def validate_request(fields: Mapping[str, Any], limits: RequestLimits) -> Request:
    """Check a client's fields against `PARAMETERS` and this server's limits.

    Args:
        fields: parameter names to plain Python (or numpy) values; absent or None means default.
        limits: of this server.

    Raises InvalidRequest with one sentence that names the limit and the value received.
    """
    unknown = sorted(set(fields) - set(PARAMETERS) - set(ALIASES))
    if unknown:
        raise InvalidRequest(
            f"unknown parameter {shown(unknown[0])}; parameters are {', '.join(PARAMETERS)}"
        )
    values = {name: _value(p, fields) for name, p in PARAMETERS.items()}
    prompt_ids: tuple[int, ...] = values["prompt_ids"] or ()
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty: it must hold at least 1 token")
    _check_token_ids("prompt_ids", prompt_ids, limits)
    _check_token_ids("logit_bias", [token_id for token_id, _ in values["logit_bias"]], limits)
    max_tokens = _max_tokens(values, limits)
    if values["min_tokens"] > max_tokens:
        raise InvalidRequest(
            f"min_tokens may be at most max_tokens, {max_tokens}, got {values['min_tokens']}"
        )
    if values["end_id"] is not None:
        _check_token_ids("end_id", [values["end_id"]], limits)
        if values["ignore_eos"]:
            raise InvalidRequest("give either end_id or ignore_eos, got both")
    if 0 < values["temperature"] < MIN_TEMPERATURE:
        raise InvalidRequest(
            f"temperature must be 0 or at least {MIN_TEMPERATURE}, got {values['temperature']}"
        )
    for name, most in (
        ("stop_words", limits.max_stop_words),
        ("bad_words", limits.max_bad_words),
        ("logit_bias", limits.max_logit_bias),
    ):
        if len(values[name]) > most:
            kind = "token ids" if name == "logit_bias" else "strings"
            raise InvalidRequest(f"{name} may hold at most {most} {kind}, got {len(values[name])}")
    for name in ("stop_words", "bad_words"):
        for word in values[name]:
            if not 1 <= len(word) <= limits.max_stop_word_chars:
                raise InvalidRequest(
                    f"a {name.replace('_', ' ')[:-1]} must have 1 to {limits.max_stop_word_chars} "
                    f"characters, got {len(word)}"
                )
    if len(values["cache_salt"]) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt may have at most {MAX_CACHE_SALT_CHARS} characters, "
            f"got {len(values['cache_salt'])}"
        )
    if values["policy"] is not None:
        values["policy"] = _policy(values["policy"], limits)
    seed = values["seed"]
    rule = values["acceptance"]
    if rule == "auto":
        rule = limits.acceptance
    coupled = rule == "coupled" or (rule == "auto" and seed is not None)
    taken = {f.name for f in dataclasses.fields(Request)} & set(values)
    return Request(
        **{
            **{name: values[name] for name in taken},
            "prompt_ids": prompt_ids,
            "max_tokens": max_tokens,
            "seed": secrets.randbits(64) if seed is None else seed,
            "coupled": coupled,
        }
    )


def _value(parameter: Parameter, fields: Mapping[str, Any]) -> Any:
    """The parsed value of a parameter, by whichever of its names it was given."""
    names = (parameter.name, *parameter.aliases)
    given = [name for name in names if fields.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} mean the same: give one of them")
    value = fields[given[0]] if given else parameter.default
    return None if value is None else parameter.parse(value)


def _check_token_ids(name: str, token_ids: Sequence[int], limits: RequestLimits) -> None:
    if token_ids and max(token_ids) >= limits.vocab_size:
        raise InvalidRequest(
            f"{name} must be below the vocabulary size {limits.vocab_size}, got {max(token_ids)}"
        )


def _max_tokens(values: Mapping[str, Any], limits: RequestLimits) -> int:
    num_prompt = len(values["prompt_ids"])
    room = limits.max_model_tokens - num_prompt
    if room < 1:
        raise InvalidRequest(
            f"the prompt may have at most {limits.max_model_tokens - 1} tokens, got {num_prompt}"
        )
    max_tokens: int | None = values["max_tokens"]
    if max_tokens is None:
        return min(limits.default_max_tokens, room)
    if max_tokens > room:
        raise InvalidRequest(
            f"prompt and max_tokens together may have at most {limits.max_model_tokens} tokens, "
            f"got {num_prompt} + {max_tokens}"
        )
    return max_tokens


def _policy(text: str, limits: RequestLimits) -> Policy:
    if len(text) > _MAX_POLICY_CHARS:
        raise InvalidRequest(
            f"policy may have at most {_MAX_POLICY_CHARS} characters, got {len(text)}"
        )
    try:
        policy = parse_policy(text, limits.block_size)
    except ConfigError as error:
        raise InvalidRequest(str(error)) from error
    if policy.name not in limits.policies:
        raise InvalidRequest(
            f"policy must be one of {', '.join(limits.policies)} on this server, got {text!r}"
        )
    return policy
