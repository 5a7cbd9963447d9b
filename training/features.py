"""Disk cache of what the frozen target says about every training token.

The target costs about seven times what the drafter does, and says the same every time, so it
runs once per sequence. Per token the cache holds the tapped features (fp16, m * d) and, from the
answer on, the K most probable next tokens with their log-probabilities. With both distributions
summing to 1, ``||q - p||_1 = 2 (1 - sum min(p, q))`` needs q only where p is not small, so the top
K replace the whole row; what is cut is at most the probability mass outside them.

Files are fixed-size arrays at the store's own offsets (sparse until filled); ``done.bin`` has one
byte a sequence, set after its arrays are written. Several processes may read while one fills.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from training.store import TokenStore
from training.target import Target, TargetOutput

FP16_MAX = 65504.0
BATCH_TOKENS = 2048  # of one pass of the target, padding included
SORTED_SEQUENCES = 64  # put in order of length before they are batched


class CacheError(ValueError):
    """The cache does not belong to this store and target, or a value does not fit it."""


@dataclass(frozen=True)
class CacheSpec:
    """What a cache was made from; a cache with another spec is refused."""

    num_sequences: int
    num_tokens: int
    feature_size: int
    layer_ids: tuple[int, ...]
    vocab_size: int
    top_k: int


class CachedSequence(NamedTuple):
    """One cached sequence of n tokens.

    ``token_ids`` [n] int64; ``features`` [n, m * d] float16; ``top_ids`` [n, K] int64 and
    ``top_logprobs`` [n, K] float16: row i is the target's distribution of token i + 1, best first,
    and is filled for i >= ``answer_start`` - 1 only.
    """

    token_ids: npt.NDArray[np.int64]
    features: npt.NDArray[np.float16]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float16]
    answer_start: int
    temperature: float


class FeatureCache:
    """The cache of one token store in ``folder``."""

    def __init__(self, folder: Path, store: TokenStore, spec: CacheSpec) -> None:
        if spec.num_sequences != len(store) or spec.num_tokens != store.num_tokens:
            raise CacheError(
                f"the store has {len(store)} sequences and {store.num_tokens} tokens, the cache "
                f"was to be made for {spec.num_sequences} and {spec.num_tokens}"
            )
        self.folder = folder
        self.store = store
        self.spec = spec
        folder.mkdir(parents=True, exist_ok=True)
        spec_path = folder / "cache.json"
        wanted = json.loads(json.dumps(asdict(spec)))
        if spec_path.is_file():
            found = json.loads(spec_path.read_text(encoding="utf-8"))
            if found != wanted:
                changed = sorted(k for k in wanted if found.get(k) != wanted[k])
                raise CacheError(
                    f"{folder} was made with other settings ({', '.join(changed)} differ): "
                    f"delete the folder or choose another --work-dir"
                )
        id_type = np.uint16 if spec.vocab_size <= 65536 else np.int32
        n, k = spec.num_tokens, spec.top_k
        self._features = _array(folder / "features.bin", np.float16, (n, spec.feature_size))
        self._top_ids = _array(folder / "top_ids.bin", id_type, (n, k))
        self._top_logprobs = _array(folder / "top_logprobs.bin", np.float16, (n, k))
        self._done = _array(folder / "done.bin", np.uint8, (len(store),))
        if not spec_path.is_file():
            spec_path.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")

    def ready(self) -> npt.NDArray[np.bool_]:
        """Which sequences are complete: [sequences] bool."""
        return np.asarray(self._done) == 1

    def read(self, index: int) -> CachedSequence:
        """Sequence ``index``; it must be complete."""
        if self._done[index] != 1:
            raise CacheError(f"sequence {index} is not in the cache {self.folder} yet")
        rows = slice(int(self.store.offsets[index]), int(self.store.offsets[index + 1]))
        meta = self.store.metas[index]
        return CachedSequence(
            token_ids=self.store.sequence(index),
            features=np.array(self._features[rows]),
            top_ids=self._top_ids[rows].astype(np.int64),
            top_logprobs=np.array(self._top_logprobs[rows]),
            answer_start=meta.a,
            temperature=meta.t,
        )

    def fill(
        self,
        target: Target,
        order: Iterable[int],
        progress: Callable[[int], None] = lambda tokens: None,
        device: str = "cpu",
    ) -> None:
        """Run the target over the sequences of ``order`` that are missing.

        ``progress`` is called with the number of tokens of each sequence done. An overflow of the
        fp16 features is an error that names layer and value: clipping would be silent damage.
        """
        missing = [index for index in order if self._done[index] != 1]
        for batch in self._batches(missing):
            metas = [self.store.metas[index] for index in batch]
            ids = [torch.from_numpy(self.store.sequence(index)).to(device) for index in batch]
            outputs = target.forward_batch(ids, [meta.a - 1 for meta in metas])
            for index, meta, out in zip(batch, metas, outputs, strict=True):
                self._write(index, out)
                progress(meta.n)

    def _batches(self, indices: list[int]) -> Iterator[list[int]]:
        """Sequences of like lengths together, in nearly the given order."""
        for start in range(0, len(indices), SORTED_SEQUENCES):
            window = indices[start : start + SORTED_SEQUENCES]
            batch: list[int] = []
            for index in sorted(window, key=lambda index: self.store.metas[index].n):
                if batch and (len(batch) + 1) * self.store.metas[index].n > BATCH_TOKENS:
                    yield batch
                    batch = []
                batch.append(index)
            yield batch

    def _write(self, index: int, out: TargetOutput) -> None:
        meta = self.store.metas[index]
        begin = int(self.store.offsets[index])
        peak = float(out.features.abs().max())
        if not peak < FP16_MAX:
            raise CacheError(
                f"a feature of sequence {index} is {peak:.3g}, above the fp16 limit "
                f"{FP16_MAX:.0f}; tap other layers than {list(self.spec.layer_ids)}"
            )
        top = torch.topk(out.logits, self.spec.top_k, dim=-1)
        logprobs = top.values - torch.logsumexp(out.logits, dim=-1, keepdim=True)
        self._features[begin : begin + meta.n] = out.features.half().cpu().numpy()
        rows = slice(begin + meta.a - 1, begin + meta.n)
        self._top_ids[rows] = top.indices.cpu().numpy()
        self._top_logprobs[rows] = logprobs.half().cpu().numpy()
        self._done[index] = 1  # last: readers look at nothing of a sequence before this


def _array(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> np.memmap:
    """Memory-map ``path``, creating it as a sparse file of the right size."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not path.is_file():
        with path.open("wb") as file:
            os.truncate(file.fileno(), num_bytes)
    elif path.stat().st_size != num_bytes:
        raise CacheError(
            f"{path} has {path.stat().st_size} bytes, expected {num_bytes}: delete its folder"
        )
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)
