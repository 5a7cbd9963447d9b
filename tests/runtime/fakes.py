"""A verifier and a drafter in numpy that check the loop's bookkeeping while they answer.

The "keys and values" of a token are its id and position, so an engine can read a request's whole
history back from the pool and notice at once a wrong block, a stale row or a skipped token. The
logits after a history are a pseudo-random function of that history alone, which makes plain
decoding of any prompt known in advance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.calibration import Calibration, Scaling
from runtime.config import RuntimeConfig
from runtime.cost import CostTable
from runtime.disk_tier import DiskTier
from runtime.engine import Engines
from runtime.kv_blocks import BlockPool
from runtime.loop import Loop
from runtime.manifest import Builder, Manifest
from runtime.prefix_cache import BlockPrefixCache, NoPrefixCache, PrefixCache
from runtime.request import Request, RequestLimits, RequestOutput, validate_request
from runtime.sampling import draw, softmax
from runtime.scheduler import Tables
from runtime.spec import DrafterDims, KvDims, VerifierDims

VOCAB = 24
BLOCK_TOKENS = 4
BLOCK_BYTES = BLOCK_TOKENS * 2 * 8  # of one pool: (token id, position) in int64
BLOCK_SIZE = 5
EOS = 0
LIMITS = RequestLimits(
    vocab_size=VOCAB,
    max_model_tokens=200,
    max_stop_words=4,
    max_stop_word_chars=16,
    default_max_tokens=16,
    block_size=BLOCK_SIZE,
    policies=("off", "fixed", "threshold", "throughput", "lagged"),
)


_TABLE = np.random.default_rng(0).normal(size=(8191, VOCAB)).astype(np.float32) * 2
_TABLE[:, EOS] -= 2  # long enough answers


def target_logits(history: tuple[int, ...]) -> NDArray[np.float32]:
    """[VOCAB] logits after a history: random, but a function of it."""
    return _TABLE[hash(history) % len(_TABLE)]


def greedy_reference(
    prompt: tuple[int, ...], max_tokens: int, stop_at_eos: bool, **rules: Any
) -> list[int]:
    """What plain greedy decoding of the fake target gives; `rules` as in `ruled_logits`."""
    output: list[int] = []
    ends = {EOS} if stop_at_eos else set()
    for _ in range(max_tokens):
        logits = target_logits((*prompt, *output))
        output.append(int(ruled_logits(logits, prompt, output, ends, **rules).argmax()))
        if output[-1] in ends:
            break
    return output


def ruled_logits(
    logits: NDArray[Any],
    prompt: tuple[int, ...],
    output: list[int],
    ends: set[int],
    *,
    repetition_penalty: float = 1,
    presence_penalty: float = 0,
    frequency_penalty: float = 0,
    logit_bias: Mapping[int, float] | None = None,
    bad_words: Sequence[str] = (),
    min_tokens: int = 0,
) -> NDArray[Any]:
    """Penalties, bias and bans one token at a time: independent of `runtime.logits`."""
    result = logits.copy()
    for token in range(len(result)):
        if token in prompt or token in output:
            factor = 1 / repetition_penalty if result[token] > 0 else repetition_penalty
            result[token] *= factor
        if token in output:
            result[token] -= presence_penalty
        result[token] -= frequency_penalty * output.count(token)
        result[token] += (logit_bias or {}).get(token, 0)
        if token in ends and len(output) < min_tokens:
            result[token] = -1e30
        for word in bad_words:
            *start, last = FakeTokenizer().encode(word)
            if token == last and (not start or output[-len(start) :] == start):
                result[token] = -1e30
    return result


class FakeTokenizer:
    """Token i is the i-th letter; EOS has no text, and spaces no token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text.replace(" ", "")]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("a") + i) for i in token_ids if i != EOS)

    def is_byte(self, token_id: int) -> bool | None:
        return None if token_id == EOS else False


class _Pool:
    """[slots, 2] of (token id, position), poisoned so that an unwritten slot shows."""

    def __init__(self, num_blocks: int) -> None:
        self._rows = np.full((num_blocks * BLOCK_TOKENS, 2), -1, np.int64)
        self._new = np.empty((0, 2), np.int64)

    def history(self, table: NDArray[np.int64], count: int) -> list[int]:
        at = np.arange(count)
        rows = self._rows[table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS]
        assert (rows[:, 1] == at).all(), f"pool holds positions {rows[:, 1]}, expected 0..{count}"
        return rows[:, 0].tolist()

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        assert len(set(slots.tolist())) == len(slots), "two tokens went to one slot"
        self._rows[slots] = self._new[rows]

    def read_block(self, block: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._block(block).tobytes(), np.uint8)

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        self._block(block)[:] = data.view(np.int64).reshape(BLOCK_TOKENS, 2)

    def _block(self, block: int) -> NDArray[np.int64]:
        return self._rows[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]

    def close(self) -> None:
        pass


class FakeVerifier(_Pool):
    """See the module; `fail_next` makes the next run raise."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.runs: list[int] = []  # packed tokens of each run
        self.fail_next = False

    def run(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("engine failure on demand")
        token_ids, positions = inputs["token_ids"], inputs["position_ids"]
        self.runs.append(len(token_ids))
        self._new = np.stack([token_ids, positions], axis=1)
        rows = np.empty((len(token_ids), VOCAB), np.float32)
        start = 0
        for r, length in enumerate(inputs["segment_lens"].tolist()):
            context = int(inputs["context_lens"][r])
            history = self.history(inputs["block_table"][r], context)
            assert (inputs["pad_index"][r, :length] == np.arange(start, start + length)).all()
            for i in range(start, start + length):
                assert positions[i] == len(history)
                history.append(int(token_ids[i]))
                rows[i] = target_logits(tuple(history))
            start += length
        assert start == len(token_ids)
        features = self._new.astype(np.float32)
        return {"logits": rows[inputs["logits_index"]], "features": features}


class FakeDrafter(_Pool):
    """Drafts the target's own token with probability `agreement`, else something else.

    Its confidence in a token is a function of the tokens before it, drafted ones included.

    Above temperature 0 it samples from the target's logits tilted by noise of size 1 - agreement.
    """

    def __init__(self, num_blocks: int, agreement: float) -> None:
        super().__init__(num_blocks)
        self._agreement = agreement
        self._random = np.random.default_rng(0)

    def run(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        features = inputs["context_features"].astype(np.int64)
        self._new = features
        count = len(inputs["anchor_ids"])
        ids = np.empty((count, BLOCK_SIZE), np.int64)
        logits = np.empty((count, BLOCK_SIZE, VOCAB), np.float32)
        confidence = np.empty((count, BLOCK_SIZE), np.float32)
        start = 0
        for r, length in enumerate(inputs["segment_lens"].tolist()):
            context = int(inputs["context_lens"][r])
            own = features[start : start + length]
            assert (own[:, 1] == np.arange(context, context + length)).all()
            history = self.history(inputs["block_table"][r], context) + own[:, 0].tolist()
            history.append(int(inputs["anchor_ids"][r]))
            for k in range(BLOCK_SIZE):
                confidence[r, k] = target_logits(tuple(history))[0] + 2
                ids[r, k], logits[r, k] = self._propose(
                    history,
                    float(inputs["temperature"][r]),
                    float(inputs["uniforms"][r, k]),
                    inputs["noise"][r, k],
                )
                history.append(int(ids[r, k]))
            start += length
        outputs = {"draft_ids": ids, "draft_logits": logits}
        return outputs | {"confidence_logits": confidence, "certainty_logits": confidence}

    def _propose(
        self,
        history: list[int],
        temperature: float,
        uniform: float,
        noise: NDArray[np.float32],
    ) -> tuple[int, NDArray[np.float32]]:
        logits = target_logits(tuple(history))
        if temperature == 0:
            token = int(logits.argmax())
            if self._random.random() >= self._agreement:
                token = (token + 1) % VOCAB
            return token, logits
        tilt = np.roll(logits, 1) * np.float32(1 - self._agreement)
        logits = logits + tilt
        scaled = logits / np.float32(temperature)
        if uniform < 0:
            return int((scaled + noise).argmax()), logits
        return draw(softmax(scaled), uniform), logits


def manifest(with_drafter: bool = True) -> Manifest:
    kv = KvDims(num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=BLOCK_TOKENS, dtype="fp32")
    return Manifest(
        name="fake",
        dtype="fp32",
        opset=20,
        builder=Builder("fake", "0"),
        verifier=VerifierDims(kv, 1, VOCAB, 200, (0, 1)),
        drafter=DrafterDims(kv, 2, BLOCK_SIZE, VOCAB, True) if with_drafter else None,
        artifacts={},
        tokenizer_sha256="",
        eos_token_ids=(EOS,),
    )


def make_tables(
    *,
    request_s: float = 0.1,
    token_s: float = 0.02,
    padding_s: float = 0.0,
    draft_s: float = 0.1,
    survival: float = 0.6,
    context_token_s: float = 0.0,
) -> Tables:
    """Tables of a made-up machine on which a step takes 1 s and these for what is in it.

    `survival` is what each position of the calibration's rounds is given.
    """
    requests, segments = (1, 2, 4, 8, 16), tuple(range(1, BLOCK_SIZE + 2))
    cost = CostTable(
        identity={},
        context_lens=(16,),
        requests=requests,
        segment_lens=segments,
        verify_s=(
            tuple(
                tuple(1 + request_s * r + token_s * r * (n - 1) for n in segments) for r in requests
            ),
        ),
        padding_s=(padding_s,),
        draft_s=(tuple(draft_s * (1 + 0.1 * r) for r in requests),),
        context_token_s=context_token_s,
        prefill_token_s=0.1,
        repeats=1,
    )
    ones, none = (1.0,) * BLOCK_SIZE, (0.0,) * BLOCK_SIZE
    scaling = Scaling(ones, none, none, none, none, ones, 4, ((survival,) * BLOCK_SIZE,) * 4)
    return Tables(cost, Calibration("", scaling, scaling))


def make_loop(
    *,
    num_blocks: int = 400,
    agreement: float | None = 0.5,
    max_cached: int = 0,
    disk: DiskTier | None = None,
    tables: Tables | None = None,
    **options: Any,
) -> tuple[Loop, FakeVerifier]:
    """A loop over fakes; `agreement` None means no drafter. `options` go to RuntimeConfig.

    With `max_cached` it has a prefix cache that may keep so many blocks nobody holds.
    """
    verifier = FakeVerifier(num_blocks)
    drafter = None if agreement is None else FakeDrafter(num_blocks, agreement)
    engines, pool = Engines(verifier, drafter), BlockPool(num_blocks, max_cached)
    cache: PrefixCache = NoPrefixCache(pool)
    if max_cached:
        cache = BlockPrefixCache(pool, engines, "fake", BLOCK_TOKENS, 2 * BLOCK_BYTES, disk)
    loop = Loop(
        engines,
        manifest(with_drafter=drafter is not None),
        None,
        FakeTokenizer(),  # type: ignore[arg-type]
        RuntimeConfig(**options),
        cache,
        tables,
    )
    return loop, verifier


def make_request(prompt: tuple[int, ...], **fields: Any) -> Request:
    return validate_request({"prompt_ids": list(prompt), **fields}, LIMITS)


class Collector:
    """Gathers one request's outputs and checks that exactly the last one is final."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []

    def __call__(self, output: RequestOutput) -> None:
        assert not self.done, "an output after the final one"
        self.outputs.append(output)

    @property
    def done(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    @property
    def final(self) -> RequestOutput:
        assert self.done, "the request has not ended"
        return self.outputs[-1]

    @property
    def token_ids(self) -> list[int]:
        return [i for output in self.outputs for i in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)


def run_all(loop: Loop, requests: list[Request]) -> list[Collector]:
    """Run requests to their end, all queued at once."""
    collectors = [Collector() for _ in requests]
    for request, collector in zip(requests, collectors, strict=True):
        loop.add(request, collector)
    while loop.has_work:
        loop.step()
    return collectors
