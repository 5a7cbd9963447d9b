"""Self-made prompts: forms filled from word lists, each prompt a function of a random generator.

Forms and words are in ``prompts.toml``. None uses the wrapper sentences of the evaluation sets, so
that scores there measure more than their memory.
"""

import re
import tomllib
from pathlib import Path

import numpy as np

from training.exercises import function_stub

with (Path(__file__).parent / "prompts.toml").open("rb") as _file:
    _LISTS = tomllib.load(_file)
# Short entries share one comma-separated string, sentences are an array.
_WORDS: dict[str, list[str]] = {
    name: " ".join(entries.split()).split(", ") if isinstance(entries, str) else entries
    for name, entries in _LISTS["words"].items()
}
_FORMS: dict[str, list[str]] = _LISTS["forms"]
_NUMBERS = {"a": (12, 90), "b": (2, 12), "c": (2, 30)}  # each from the first up to below the second

# Shares of the prompts that come from forms; the rest of the data is invented by the model.
_SHARES = {
    "problem": 0.11,
    "story": 0.11,  # an arithmetic one: an opening, events, a question
    "mathematics": 0.06,
    "completion": 0.18,
    "program": 0.14,
    "explanation": 0.14,
    "extraction": 0.04,
    "rewriting": 0.03,
    "listing": 0.06,
    "writing": 0.07,
    "role_play": 0.06,
}


def template_prompt(rng: np.random.Generator) -> str:
    """One user message from the forms."""
    kind = str(rng.choice(list(_SHARES), p=list(_SHARES.values())))
    if kind == "story":
        events = rng.choice(_FORMS["event"], int(rng.integers(1, 5)), replace=False)
        form = " ".join((_pick(rng, _FORMS["opening"]), *events, _pick(rng, _FORMS["question"])))
    else:
        form = _pick(rng, _FORMS[kind])
    ending = _pick(rng, _FORMS["ending"]) if kind in ("problem", "story") else ""
    drawn: dict[str, str] = {}  # a placeholder that occurs twice stands for one thing

    def draw(match: re.Match[str]) -> str:
        name = match[1]
        if name not in drawn:
            drawn[name] = _draw(rng, name)
        return drawn[name]

    return re.sub(r"{(\w+)}", draw, form) + ending


def _draw(rng: np.random.Generator, placeholder: str) -> str:
    name = placeholder.rstrip("0123456789")
    if name in _NUMBERS:
        return str(rng.integers(*_NUMBERS[name]))
    if placeholder == "stub":
        return f"```python\n{function_stub(rng)}\n```"
    if placeholder == "text":
        return " ".join(_pick(rng, _WORDS["sentences"]) for _ in range(int(rng.integers(1, 4))))
    return _pick(rng, _WORDS[name])


def _pick(rng: np.random.Generator, options: list[str]) -> str:
    return options[int(rng.integers(len(options)))]
