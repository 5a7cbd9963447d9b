"""Policies: how they are written, and how many draft tokens they let through."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.config import ConfigError
from runtime.schedule import Policy, choose_lengths, parse_policy

CAPS = np.array([0, 1, 3, 7])


@pytest.mark.parametrize(
    ("text", "policy", "lengths"),
    [
        ("off", Policy("off"), [0, 0, 0, 0]),
        ("fixed", Policy("fixed"), [0, 1, 3, 7]),
        ("fixed:0", Policy("fixed", 0), [0, 0, 0, 0]),
        ("fixed:2", Policy("fixed", 2), [0, 1, 2, 2]),
        ("fixed:7", Policy("fixed", 7), [0, 1, 3, 7]),
    ],
)
def test_policies(text: str, policy: Policy, lengths: list[int]) -> None:
    assert parse_policy(text, 7) == policy
    assert choose_lengths(policy, CAPS).tolist() == lengths
    assert policy.speculates == any(lengths)


@pytest.mark.parametrize(
    "text",
    ["", "on", "OFF", "fixed:8", "fixed:-1", "fixed:x", "fixed:", "fixed:2.0", "off:", "off:3"],
)
def test_anything_else_is_refused_with_what_is_valid(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy(text, 7)
    expected = f"policy must be off, fixed or fixed:k with k from 0 to 7, got {text!r}"
    assert str(caught.value) == expected
