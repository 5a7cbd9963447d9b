"""Text on both ends of a request: prompts to token ids, token ids to streamed text.

The streamed pieces of an answer always concatenate to the decoding of all its tokens at once: no
split UTF-8, no lost spaces. Stop strings are matched on that text, wherever token borders fall.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from runtime.request import InvalidRequest

_REPLACEMENT = "\ufffd"  # how decoders show bytes that are not (yet) a character
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """A model folder's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no tokenizer.json")
        self._folder = folder
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {i for i, token in added.items() if token.special}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `folder`/tokenizer.json; raises FileNotFoundError naming what is missing."""
        return cls(folder)

    @cached_property
    def _chat(self) -> Any:
        # Only prompts need it, and it takes seconds to import.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts can be sent as chat messages."""
        return self._chat.chat_template is not None

    def encode_prompt(self, text: str | bytes, raw_prompt: bool, max_bytes: int) -> list[int]:
        """Token ids of a prompt: as one user message in the chat template, or as it is.

        Args:
            text: the prompt; bytes must be UTF-8.
            raw_prompt: encode without the chat template (also done when the model has none).
            max_bytes: refuse a longer prompt before the tokenizer sees it.

        Raises InvalidRequest for an empty, over-long or undecodable prompt.
        """
        try:
            data = text.encode() if isinstance(text, str) else text
            size = len(data)
            if size > max_bytes:
                raise InvalidRequest(f"the prompt may have at most {max_bytes} bytes, got {size}")
            text = data.decode()
        except UnicodeError as error:
            raise InvalidRequest(f"the prompt is not valid UTF-8: {error}") from error
        if not text:
            raise InvalidRequest("the prompt is empty: it must hold at least 1 character")
        if raw_prompt or not self.has_chat_template:
            return list(self._tokenizer.encode(text).ids)
        message = [{"role": "user", "content": text}]
        rendered = self._chat.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer.encode(rendered, add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Text of the tokens, special tokens left out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def is_byte(self, token_id: int) -> bool | None:
        """Whether the token is a byte-fallback token; None for one without any text."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return None
        return _BYTE_TOKEN.fullmatch(token) is not None


class Detokenizer:
    """Turns a growing list of tokens into text, piece by piece.

    Tokens before `_read` are in the text already. They are decoded again from `_prefix` on as
    context for the next piece, since a decoder may treat the first token it sees differently.
    A run of byte-fallback tokens waits for its end: decoders turn the whole run into U+FFFD if any
    of it is not UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._prefix_text = ""  # decoding of tokens _prefix.._read
        self._in_byte_run = False

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain (possibly none)."""
        is_byte = self._tokenizer.is_byte(token_id)
        if is_byte is None:  # decoders leave it out; kept, an endless run would be read ever again
            return ""
        self._token_ids.append(token_id)
        self._in_byte_run = is_byte
        if self._in_byte_run:
            return ""
        text = self._tokenizer.decode(self._token_ids[self._prefix :])
        if text.endswith(_REPLACEMENT):
            return ""
        return self._take(text)

    def flush(self) -> str:
        """The text still held back at the end of the answer."""
        return self._take(self._tokenizer.decode(self._token_ids[self._prefix :]))

    def _take(self, text: str) -> str:
        piece = text[len(self._prefix_text) :]
        tail = self._tokenizer.decode(self._token_ids[self._read :])
        if tail:  # else keep the old context: special tokens alone are none
            self._prefix, self._prefix_text = self._read, tail
        else:
            self._prefix_text = text
        self._read = len(self._token_ids)
        return piece


class StopMatch(NamedTuple):
    """Text that may be sent, and whether a stop string ends the answer there."""

    text: str
    stopped: bool


class StopMatcher:
    """Finds the first stop string to complete, holding back only what could still begin one."""

    def __init__(self, stop_words: tuple[str, ...]) -> None:
        # A word with another one inside, before its end, never completes first.
        self._words = [w for w in stop_words if not any(other in w[:-1] for other in stop_words)]
        self._longest = max((len(word) for word in self._words), default=0)
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Add text; returns what may be sent. After a match nothing more may be pushed."""
        text = self._held + text
        matches = [
            (start + len(word), start) for word in self._words if (start := text.find(word)) >= 0
        ]
        if matches:
            _, start = min(matches)
            self._held = ""
            return StopMatch(text[:start], True)
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return StopMatch(text[: len(text) - keep], False)

    def flush(self) -> str:
        """The held-back text, at an end that is not a stop string's."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(word.startswith(tail) for word in self._words if len(word) > length):
                return length
        return 0
