"""Functions to complete: signature, docstring and examples, put together from parts.

An exercise over a list or over the words of a text is a filter, a map and a reduction, each with
its words and its code. The examples are computed, so they are right.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Part(NamedTuple):
    """One piece of an exercise: for the function's name, for the docstring, and what it does."""

    name: str
    words: str
    apply: Callable[[Any], Any]


_NUMBERS_KEPT = (
    Part("", "the numbers", lambda x: True),
    Part("even", "the even numbers", lambda x: x % 2 == 0),
    Part("odd", "the odd numbers", lambda x: x % 2 == 1),
    Part("positive", "the positive numbers", lambda x: x > 0),
    Part("negative", "the negative numbers", lambda x: x < 0),
    Part("small", "all numbers below 10", lambda x: x < 10),
    Part("large", "all numbers of at least 10", lambda x: x >= 10),
    Part("divisible", "the numbers that can be divided by 3", lambda x: x % 3 == 0),
    Part("two_digit", "the numbers with two digits", lambda x: 9 < abs(x) < 100),
)
_NUMBERS_CHANGED = (
    Part("", "", lambda x: x),
    Part("squared", "square", lambda x: x * x),
    Part("doubled", "double", lambda x: 2 * x),
    Part("negated", "negate", lambda x: -x),
    Part("absolute", "take the absolute value of", abs),
    Part("halved", "halve (rounding down)", lambda x: x // 2),
    Part("incremented", "add one to", lambda x: x + 1),
    Part("digit_sum", "take the sum of the digits of", lambda x: sum(map(int, str(abs(x))))),
)
_NUMBERS_REDUCED = (
    Part("list", "Return them as a list.", list),
    Part("sum", "Return their sum.", sum),
    Part("count", "Return how many there are.", len),
    Part("sorted", "Return them in ascending order.", sorted),
    Part("max", "Return the largest, or None if there is none.", lambda x: max(x, default=None)),
    Part("min", "Return the smallest, or None if there is none.", lambda x: min(x, default=None)),
    Part("reversed", "Return them in reverse order.", lambda x: list(x)[::-1]),
    Part("unique", "Return them without duplicates, in order.", lambda x: list(dict.fromkeys(x))),
    Part(
        "range",
        "Return the difference of the largest and the smallest, 0 for none.",
        lambda x: max(x) - min(x) if x else 0,
    ),
)
_WORDS_KEPT = (
    Part("", "the words", lambda w: True),
    Part("long", "the words of more than four letters", lambda w: len(w) > 4),
    Part("short", "the words of at most three letters", lambda w: len(w) <= 3),
    Part("vowel", "the words that start with a vowel", lambda w: w[0].lower() in "aeiou"),
    Part("capitalized", "the words that start with a capital letter", lambda w: w[0].isupper()),
    Part("double", "the words in which a letter occurs twice", lambda w: len(set(w)) < len(w)),
)
_WORDS_CHANGED = (
    Part("", "", lambda w: w),
    Part("reversed", "reverse", lambda w: w[::-1]),
    Part("upper", "put in capitals", str.upper),
    Part("first", "take the first letter of", lambda w: w[0]),
    Part("lengths", "take the length of", len),
    Part("lower", "put in lower case", str.lower),
    Part("swapped", "swap the case of", str.swapcase),
)
_WORDS_REDUCED = (
    Part("list", "Return them as a list.", list),
    Part("count", "Return how many there are.", len),
    Part("joined", "Return them joined by a hyphen.", lambda x: "-".join(map(str, x))),
    Part("sorted", "Return them in sorted order.", sorted),
    Part("last", "Return the last of them, or None.", lambda x: x[-1] if x else None),
    Part(
        "table",
        "Return how often each occurs, as a dictionary.",
        lambda x: {w: x.count(w) for w in x},
    ),
)
_SENTENCE = """the green Apple tree on our hill Oscar sees a Bottle of ink and seven small keys
    every winter Anna eats warm soup in the old Kitchen my Uncle fixed it"""
_HEADERS = ("", "", "", "from typing import List, Optional\n\n\n", "import math\n\n\n")


def _choose(rng: np.random.Generator, parts: tuple[Part, ...]) -> Part:
    return parts[int(rng.integers(len(parts)))]


def function_stub(rng: np.random.Generator) -> str:
    """Python source of a function without its body: signature, docstring, up to three examples."""
    parts: tuple[tuple[Part, ...], ...]
    over_numbers = rng.random() < 0.6
    if over_numbers:
        parts = (_NUMBERS_KEPT, _NUMBERS_CHANGED, _NUMBERS_REDUCED)
        argument, annotation = ("numbers", "values", "nums", "lst")[int(rng.integers(4))], "list"
    else:
        parts = (_WORDS_KEPT, _WORDS_CHANGED, _WORDS_REDUCED)
        argument, annotation = ("text", "sentence", "s")[int(rng.integers(3))], "str"
    kept, changed, reduced = (_choose(rng, part) for part in parts)
    name = "_".join(part.name for part in (kept, changed, reduced) if part.name)
    steps = f"Find {kept.words}" + (f" and {changed.words} each of them" if changed.words else "")
    source = "" if over_numbers else f" in {argument}"
    doc = f"{steps}{source}. {reduced.words}"
    lines = [f"def {name}({argument}: {annotation}):", f'    """{doc}']
    for _ in range(int(rng.integers(4))):
        if over_numbers:
            given: Any = [int(x) for x in rng.integers(-20, 40, int(rng.integers(1, 7)))]
            items = given
        else:
            words = rng.choice(_SENTENCE.split(), int(rng.integers(2, 7)))
            given = " ".join(map(str, words))
            items = given.split()
        answer = reduced.apply([changed.apply(x) for x in items if kept.apply(x)])
        lines += [f"    >>> {name}({given!r})", f"    {answer!r}"]
    if len(lines) == 2:
        lines[-1] += '"""'
    else:
        lines.append('    """')
    return _HEADERS[int(rng.integers(len(_HEADERS)))] + "\n".join(lines)
