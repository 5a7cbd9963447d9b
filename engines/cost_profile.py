"""Measures what steps cost on this machine: `build/<name>/engines/cost/cost.json` and a plot.

Steps of made-up tokens run through the engines themselves, since how long they take depends on
shapes alone. Repeats go round all points, so that whatever else the machine does meets all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from export.publish import content_key, publish
from runtime.batch import DraftSegment, VerifySegment, pack_draft, pack_verify, slots
from runtime.config import RuntimeConfig
from runtime.cost import CostTable, identity_of
from runtime.decoder import Model, within_limits
from runtime.kv_blocks import blocks_for
from runtime.manifest import hash_file, load_manifest
from runtime.randomness import DraftNoise

CONTEXT_LENS = (64, 512)
REPEATS = 5
SLOW_REPEATS = 3  # of points that take longer than this
SLOW_S = 0.1
NEW_CONTEXT_TOKENS = 256  # of one request, to tell what each costs the drafter
PREFILL_TOKENS = 128

Step = Callable[[], None]


class Point(NamedTuple):
    """A step to time, and one that runs between its first time and that."""

    step: Step
    before: Step | None = None


def profile(folder: Path, threads: int, max_requests: int, repeats: int = REPEATS) -> bool:
    """Measure the engines of `folder` and publish `engines/cost`.

    Returns False when that is up to date: same engines, machine, threads, requests and code.
    Raises ManifestError and EngineError when the engines cannot run, PublishError when the disk
    is full.
    """
    engine_dir = folder / "engines"
    manifest = load_manifest(engine_dir)
    identity = identity_of(manifest, threads)
    key = content_key(identity, max_requests, repeats, hash_file(Path(__file__)))

    def make(partial: Path) -> None:
        config = RuntimeConfig(
            num_threads=threads,
            max_batch_requests=max_requests,
            policy="off",
            prefix_cache_mb=0,
        )
        model = Model(engine_dir, folder / "hf", within_limits(manifest, config))
        table = measure(model, repeats)
        model.close()
        (partial / "cost.json").write_text(table.to_json())
        plot(table, partial / "cost.png")

    return publish(engine_dir / "cost", key, make)


def measure(model: Model, repeats: int = REPEATS) -> CostTable:
    """Time the model's engines at every point of the table."""
    stage = _Stage(model)
    block_size = 0 if model.manifest.drafter is None else model.manifest.drafter.block_size
    contexts = [n for n in CONTEXT_LENS if n < stage.longest] or [max(1, stage.longest // 2)]
    requests = _doubling(model.config.max_batch_requests)
    segments = _segment_lens(block_size)
    points: dict[tuple, Point] = {
        (c, r, n): Point(stage.verify([n] * r, c))
        for c in contexts
        for r in requests
        for n in segments
    }
    chunk = min(PREFILL_TOKENS, model.config.prefill_chunk_tokens)
    prefill_tokens = min(chunk, stage.longest - contexts[0])
    points["prefill",] = Point(stage.verify([prefill_tokens], contexts[0], num_logits=1))
    if block_size:
        more = min(NEW_CONTEXT_TOKENS, stage.longest - contexts[0])
        uneven = [block_size + 1] + [1] * (requests[-1] - 1)
        for c in contexts:
            points["uneven", c] = Point(stage.verify(uneven, c))
            for r in requests:
                # A draft finds the caches full of what the verifier has just read.
                points["draft", c, r] = Point(stage.draft(r, 1, c), points[c, r, 1].step)
        first = contexts[0]
        points["context",] = Point(stage.draft(1, more, first), points[first, 1, 1].step)
    seconds = _median_seconds(points, repeats)

    draft_s = np.array([[seconds["draft", c, r] for r in requests if block_size] for c in contexts])
    verify_s = np.array(
        [[[seconds[c, r, n] for n in segments] for r in requests] for c in contexts]
    )
    verify_s, draft_s = monotone(verify_s), monotone(draft_s)
    context_token_s, padding_s = 0.0, [0.0] * len(contexts)
    if block_size:
        further_s = seconds["context",] - seconds["draft", contexts[0], 1]
        context_token_s = max(0.0, further_s) / (more - 1)
        num_missing = max(1, sum(max(uneven) - n for n in uneven))
        for k, c in enumerate(contexts):
            even_s = float(np.interp(np.mean(uneven), segments, verify_s[k, -1]))
            padding_s[k] = max(0.0, seconds["uneven", c] - even_s) / num_missing
    return CostTable(
        identity=identity_of(model.manifest, model.config.engine_threads),
        context_lens=tuple(contexts),
        requests=tuple(requests),
        segment_lens=tuple(segments),
        verify_s=_nested(verify_s),
        padding_s=tuple(padding_s),
        draft_s=_nested(draft_s),
        context_token_s=context_token_s,
        prefill_token_s=seconds["prefill",] / prefill_tokens,
        repeats=repeats,
    )


def monotone(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values that fall along no axis, halfway between those raised to and those lowered to that."""
    for axis in range(values.ndim):
        if values.shape[axis]:
            raised = np.maximum.accumulate(values, axis)
            lowered = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
            values = (raised + lowered) / 2
    return values


class _Stage:
    """A model's engines with steps of any shape set up on them."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._block_tokens = model.manifest.verifier.kv.block_tokens
        self.longest = min(
            model.limits.max_model_tokens, model.num_blocks * self._block_tokens
        ) - max(PREFILL_TOKENS // 2, 1)

    def verify(
        self, segment_lens: list[int], context_len: int, num_logits: int | None = None
    ) -> Step:
        """A verifier pass with its packing and commit; logits of all tokens or the last ones."""
        engine = self._model.engines.verifier
        longest = max(segment_lens)
        blocks = self._blocks(len(segment_lens), context_len + longest)
        segments = [
            VerifySegment([1] * n, context_len, own, num_logits or n)
            for n, own in zip(segment_lens, blocks, strict=True)
        ]
        rows = np.arange(segment_lens[0])
        into = slots(segments[0].blocks, context_len, segment_lens[0], self._block_tokens)

        def run() -> None:
            engine.run(pack_verify(segments, self._block_tokens).inputs)
            engine.commit(rows, into)

        return run

    def draft(self, requests: int, new_tokens: int, context_len: int) -> Step:
        """A drafter pass with its packing and commit."""
        engine, dims = self._model.engines.drafter, self._model.manifest.drafter
        assert engine is not None
        assert dims is not None
        features = np.zeros((new_tokens, dims.feature_size), np.float32)
        zeros = np.zeros((dims.block_size, 1), np.float32)
        noise = DraftNoise(zeros[:, 0], zeros)
        segments = [
            DraftSegment(features, context_len, blocks, 1, noise)
            for blocks in self._blocks(requests, context_len + new_tokens)
        ]

        def run() -> None:
            batch = pack_draft(segments, self._block_tokens)
            engine.run(batch.inputs)
            engine.commit(np.arange(len(batch.slots)), batch.slots)

        return run

    def _blocks(self, requests: int, num_tokens: int) -> Iterator[list[int]]:
        """Blocks of each request; of a small pool some serve several, which only reading shows."""
        count = blocks_for(num_tokens, self._block_tokens)
        for r in range(requests):
            yield [(r * count + i) % self._model.num_blocks for i in range(count)]


def _median_seconds(points: dict[tuple, Point], repeats: int) -> dict[tuple, float]:
    seconds: dict[tuple, list[float]] = {key: [] for key in points}
    for key in tqdm(list(points) * repeats, unit="step", desc="profile"):
        own = seconds[key]
        if len(own) >= SLOW_REPEATS and statistics.median(own) > SLOW_S:
            continue
        # Steps of a kind follow each other; the first finds buffers and caches of another one.
        points[key].step()
        if before := points[key].before:
            before()
        start = time.perf_counter()
        points[key].step()
        own.append(time.perf_counter() - start)
    return {key: statistics.median(own) for key, own in seconds.items()}


def _doubling(last: int) -> list[int]:
    """1, 2, 4, ... and `last`."""
    powers = [1 << i for i in range(last.bit_length()) if 1 << i < last]
    return [*powers, last]


def _segment_lens(block: int) -> list[int]:
    """Anchor and 0 .. block draft tokens; all of the first few, then every other one."""
    return sorted({*range(1, min(block, 3) + 2), *range(1, block + 1, 2), block + 1})


def _nested(values: NDArray[np.float64]) -> tuple:
    return tuple(_nested(v) for v in values) if values.ndim > 1 else tuple(values.tolist())


def plot(table: CostTable, path: Path) -> None:
    """Draw verify cost against packed tokens for each number of requests, and draft cost."""
    # The plain Agg canvas: no display, no global pyplot state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for q, requests in enumerate(table.requests):
        for k, style in zip(range(len(table.context_lens)), ("-", "--", ":"), strict=False):
            label = f"{requests} requests" if k == 0 else None
            packed = [requests * n for n in table.segment_lens]
            costs_ms = [1e3 * s for s in table.verify_s[k][q]]
            left.plot(packed, costs_ms, style, color=f"C{q}", marker=".", label=label)
    left.set(xlabel="packed tokens", ylabel="ms", title="verifying", xscale="log")
    for k, context in enumerate(table.context_lens):
        if table.draft_s[k]:
            costs_ms = [1e3 * s for s in table.draft_s[k]]
            right.plot(table.requests, costs_ms, marker=".", label=f"context {context}")
    right.set(xlabel="requests", ylabel="ms", title="drafting a block")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        if axes.lines:
            axes.legend(fontsize=7)
    figure.suptitle(f"{table.identity['machine']}, {table.identity['threads']} threads", fontsize=9)
    figure.savefig(path)
