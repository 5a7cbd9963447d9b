"""Makes docs/parameters.md from the tables: `python -m triton_repo.reference > docs/parameters.md`.

A test holds the two together.
"""

from __future__ import annotations

from runtime.request import PARAMETERS, Parameter
from triton_repo.contract import INPUTS, OUTPUTS, SERVING_PARAMETERS

_INTRODUCTION = """\
# Parameters

Inputs of the model `dspark`, all optional but the prompt (`text_input` or `prompt_ids`). Scalars
are `[1]` behind the batch dimension; /generate takes them as plain JSON. Unknown names, and values
out of range, are refused with a sentence. Limits on lengths and counts are the server's
(`dspark serve --help`).

"""

_EXPLANATION = """
## What acts on the logits

In this order: repetition penalty (tokens of prompt and output), presence and frequency penalty
(tokens of the output), `logit_bias`, `bad_words`, end tokens before `min_tokens`; then temperature,
`top_k`, `top_p`, `min_p`. They act on the verifier's logits at each position with the tokens before
it, accepted draft tokens included, so that speculation changes nothing. The draft knows only
temperature and filters: strong penalties cost acceptance, never exactness.

`output_log_probs` are taken before temperature and filters: without penalties, bias and bans they
are the model's own log-probabilities.

`bad_words` are banned as token sequences. A string that the model can spell with other tokens is
not found.

A batched request gets each row's responses by `batch_index`; the final flag comes with the last of
all. A row that is refused or fails ends the whole request with its sentence.
"""


def render_reference() -> str:
    """The page as Markdown."""
    rows = [_row(p) for p in (*SERVING_PARAMETERS.values(), *PARAMETERS.values())]
    table = _table(("input", "type", "default", "allowed", "meaning"), rows)
    outputs = _table(
        ("output", "type", "meaning"),
        [(f"`{t.name}`", _type(t.name, OUTPUTS), t.help) for t in OUTPUTS.values()],
    )
    return f"{_INTRODUCTION}{table}\n## Responses\n\n{outputs}{_EXPLANATION}"


def _row(parameter: Parameter) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in (parameter.name, *parameter.aliases))
    default = parameter.default
    shown = "" if default is None or default == () else f"`{str(default).lower()}`"
    return names, _type(parameter.name, INPUTS), shown, parameter.range_text, parameter.help


def _type(name: str, tensors: dict) -> str:
    tensor = tensors[name]
    return f"{tensor.datatype}{' list' if tensor.is_list else ''}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(render_reference(), end="")
