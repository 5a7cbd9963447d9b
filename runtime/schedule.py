"""Scheduling: how many draft tokens of each request are verified. Pure functions over arrays.

Whatever is chosen, the output distribution is the verifier's (`runtime.accept`); a policy decides
about speed alone. Whether token k of a draft is verified must never depend on that token's value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.config import ConfigError


@dataclass(frozen=True)
class Policy:
    """A parsed policy: its name and, for `fixed`, the tokens per round (None: the full block)."""

    name: str
    num_tokens: int | None = None

    @property
    def speculates(self) -> bool:
        """Whether the drafter runs at all."""
        return self.name != "off" and self.num_tokens != 0


def parse_policy(text: str, block_size: int) -> Policy:
    """Parse `off`, `fixed` or `fixed:k` with k from 0 to the drafter's block size.

    Raises ConfigError naming the valid policies and the value.
    """
    if text in ("off", "fixed"):
        return Policy(text)
    name, _, argument = text.partition(":")
    if name == "fixed" and argument.isdecimal() and int(argument) <= block_size:
        return Policy("fixed", int(argument))
    raise ConfigError(
        f"policy must be off, fixed or fixed:k with k from 0 to {block_size}, got {text!r}"
    )


def choose_lengths(policy: Policy, caps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Draft tokens to verify for each request, [R], each from 0 to its cap.

    Args:
        policy: the active policy.
        caps: [R] what each request's block, parameters and remaining tokens allow.
    """
    if not policy.speculates:
        return np.zeros_like(caps)
    if policy.num_tokens is None:
        return caps
    return np.minimum(caps, policy.num_tokens)
