"""Token store: chats of the target as flat token ids plus one line of facts a sequence.

``NAME.tok.bin`` holds uint16 token ids of all sequences, one after the other. ``NAME.meta.jsonl``
holds one JSON object a sequence, in the same order: ``n`` tokens, the answer starts at token
``a``, sampling temperature ``t``, ``mag`` (the model invented the user message itself), ``done``
(the answer ended with an end-of-sequence token), and ``job`` (number of the job that made it, may
be absent). This module knows nothing of models.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAX_TOKEN_ID = 65535  # the file format is uint16


class StoreError(ValueError):
    """A token store is missing, damaged or does not fit the target."""


@dataclass(frozen=True)
class SequenceMeta:
    """Facts of one sequence; the field names are those of the file."""

    n: int
    a: int
    t: float
    mag: bool
    done: bool
    job: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.a <= self.n:
            raise StoreError(f"answer start {self.a} is outside the sequence of {self.n} tokens")


@dataclass(frozen=True)
class TokenStore:
    """All sequences of one store, read-only.

    ``tokens`` [sum of n] uint16 (memory-mapped), ``offsets`` [sequences + 1] int64: sequence i is
    ``tokens[offsets[i]:offsets[i + 1]]``.
    """

    tokens: npt.NDArray[np.uint16]
    offsets: npt.NDArray[np.int64]
    metas: tuple[SequenceMeta, ...]

    def __len__(self) -> int:
        return len(self.metas)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, prompts included."""
        return int(self.offsets[-1])

    def sequence(self, index: int) -> npt.NDArray[np.int64]:
        """Token ids of sequence ``index``: [n] int64."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)


def store_paths(stem: Path) -> tuple[Path, Path]:
    """Paths of the token file and the meta file of the store ``stem`` (a path without suffix)."""
    return stem.with_name(stem.name + ".tok.bin"), stem.with_name(stem.name + ".meta.jsonl")


def read_store(stem: Path) -> TokenStore:
    """Open the store ``stem``.

    A crash of the writer can leave tokens whose line was never written, or half a last line; both
    are ignored, because the line is written after its tokens. Tokens missing for a written line
    are an error.
    """
    token_path, meta_path = store_paths(stem)
    if not token_path.is_file() or not meta_path.is_file():
        raise StoreError(
            f"no training data at {token_path} and {meta_path}; make it with `dspark train-data`"
        )
    lines = meta_path.read_text(encoding="utf-8").split("\n")
    # The piece after the last newline is empty, or a line whose writing was cut off.
    metas = tuple(SequenceMeta(**json.loads(line)) for line in lines[:-1])
    if not metas:
        raise StoreError(f"{meta_path} holds no complete sequence")
    offsets = np.zeros(len(metas) + 1, dtype=np.int64)
    np.cumsum([meta.n for meta in metas], out=offsets[1:])
    num_stored = token_path.stat().st_size // 2
    if num_stored < offsets[-1]:
        raise StoreError(
            f"{token_path} holds {num_stored} tokens but {meta_path} lists {int(offsets[-1])}"
        )
    tokens = np.memmap(token_path, dtype=np.uint16, mode="r", shape=(int(offsets[-1]),))
    return TokenStore(tokens, offsets, metas)


class StoreWriter:
    """Appends sequences to a store; opening an existing store continues it.

    What a crash left half-written is cut off when the store is opened again, so that the files
    always agree. Use as a context manager or call ``close()`` (repeatable).
    """

    def __init__(self, stem: Path) -> None:
        token_path, meta_path = store_paths(stem)
        token_path.parent.mkdir(parents=True, exist_ok=True)
        self.num_sequences = 0
        self.num_tokens = 0
        if meta_path.is_file() and meta_path.stat().st_size:
            text = meta_path.read_text(encoding="utf-8")
            complete = text[: text.rfind("\n") + 1]
            if len(complete) != len(text):
                os.truncate(meta_path, len(complete.encode()))
            for line in complete.splitlines():
                self.num_tokens += SequenceMeta(**json.loads(line)).n
                self.num_sequences += 1
            if token_path.stat().st_size < 2 * self.num_tokens:
                raise StoreError(
                    f"{token_path} holds {token_path.stat().st_size // 2} tokens but {meta_path} "
                    f"lists {self.num_tokens}; move both away and start again"
                )
        self._tokens = token_path.open("ab")
        self._tokens.truncate(2 * self.num_tokens)
        self._meta = meta_path.open("a", encoding="utf-8")

    def append(self, token_ids: Sequence[int], meta: SequenceMeta) -> None:
        """Write one sequence, tokens first: a line in the meta file means they are on disk."""
        if len(token_ids) != meta.n:
            raise StoreError(f"meta says {meta.n} tokens, the sequence has {len(token_ids)}")
        if max(token_ids) > MAX_TOKEN_ID or min(token_ids) < 0:
            raise StoreError(
                f"token id {max(token_ids)} does not fit the uint16 store (at most {MAX_TOKEN_ID})"
            )
        self._tokens.write(np.asarray(token_ids, dtype=np.uint16).tobytes())
        self._tokens.flush()
        facts = {name: value for name, value in asdict(meta).items() if value is not None}
        self._meta.write(json.dumps(facts) + "\n")
        self._meta.flush()
        self.num_sequences += 1
        self.num_tokens += meta.n

    def close(self) -> None:
        """Close both files; may be called again."""
        self._tokens.close()
        self._meta.close()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
