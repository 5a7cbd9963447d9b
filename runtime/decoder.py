"""The decoder: an engine folder opened, and (for servers) a thread that keeps its loop stepping."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.calibration import load_calibration
from runtime.config import MIB, ConfigError, RuntimeConfig
from runtime.cost import TableError, load_cost
from runtime.disk_tier import DiskTier
from runtime.engine import LoadEngines, load_engines
from runtime.kv_blocks import BlockPool, blocks_for
from runtime.load import LoadGauge, nvml_utilisation
from runtime.loop import Loop
from runtime.manifest import Manifest, ManifestError, load_manifest, tokenizer_hash
from runtime.memory import free_bytes
from runtime.prefix_cache import BlockPrefixCache, NoPrefixCache, PrefixCache
from runtime.request import FinishReason, QueueFull, Request, RequestLimits, RequestOutput
from runtime.scheduler import AUTO, Tables, available_policies
from runtime.sequence import OnOutput, Sequence
from runtime.text import Tokenizer

log = logging.getLogger("dspark")

MEMORY_RESERVE_BYTES = 1024 * MIB  # left free by the prefix cache

MAX_FAILED_STEPS = 3  # in a row; more means that the engine is broken, not one request


class Model:
    """An engine folder opened for decoding: engines, pools, tokenizer and the loop over them.

    Raises ManifestError or EngineError when the folder does not fit this machine or version, and
    ConfigError when the configuration does not fit the model. `load` takes the place of
    `load_engines` where other things than the folder's engines are to run.
    """

    def __init__(
        self,
        engine_dir: Path,
        tokenizer_dir: Path,
        config: RuntimeConfig,
        load: LoadEngines = load_engines,
    ) -> None:
        manifest = load_manifest(engine_dir)
        if tokenizer_hash(tokenizer_dir) != manifest.tokenizer_sha256:
            raise ManifestError(
                f"the tokenizer in {tokenizer_dir} is not the one {engine_dir} was built with: "
                "run `make engines` to build both from one checkpoint"
            )
        self.config = config
        self.manifest = manifest
        self.tokenizer = Tokenizer.load(tokenizer_dir)
        running_blocks, max_model_tokens = _capacity(manifest, config)
        cache_blocks = _cache_blocks(manifest, config, running_blocks, free_bytes(manifest.on_cpu))
        self.num_blocks = running_blocks + cache_blocks
        self.tables = _load_tables(engine_dir, manifest, config)
        self.limits = RequestLimits(
            vocab_size=manifest.verifier.vocab_size,
            max_model_tokens=max_model_tokens,
            max_stop_words=config.max_stop_words,
            max_stop_word_chars=config.max_stop_word_chars,
            default_max_tokens=config.default_max_tokens,
            acceptance=config.acceptance,
            max_bad_words=config.max_bad_words,
            max_logit_bias=config.max_logit_bias,
            block_size=0 if manifest.drafter is None else manifest.drafter.block_size,
            policies=available_policies(manifest.drafter, self.tables),
        )
        self._draft_vocab = _load_draft_vocab(engine_dir, manifest)
        self.engines = load(engine_dir, manifest, self.num_blocks, config.engine_threads)
        self.cache = self._make_cache(cache_blocks)

    def make_loop(self, policy: str | None = None) -> Loop:
        """A fresh loop over the engines, with another policy if one is named.

        Loops of one model share its pools and prefix cache: run one at a time to its end.
        """
        config = self.config if policy is None else replace(self.config, policy=policy)
        return Loop(
            self.engines,
            self.manifest,
            self._draft_vocab,
            self.tokenizer,
            config,
            self.cache,
            self.tables,
            LoadGauge(config, None if self.manifest.on_cpu else nvml_utilisation()),
        )

    def close(self) -> None:
        """Free the engines; may be called again."""
        self.cache.close()
        self.engines.close()

    def _make_cache(self, num_blocks: int) -> PrefixCache:
        """The prefix cache with a budget of `num_blocks`, or none of either kind."""
        config, manifest = self.config, self.manifest
        pool = BlockPool(self.num_blocks, max_idle=num_blocks)
        block_tokens = manifest.verifier.kv.block_tokens
        block_bytes = _token_bytes(manifest) * block_tokens
        log.info(
            "KV pool: %d MB for running requests, %d MB for cached prefixes (%d MB asked for), "
            "in blocks of %d tokens and %.2f MB",
            (self.num_blocks - num_blocks) * block_bytes // MIB,
            num_blocks * block_bytes // MIB,
            config.prefix_cache_mb,
            block_tokens,
            block_bytes / MIB,
        )
        if not num_blocks:
            return NoPrefixCache(pool)
        disk = None
        if config.prefix_cache_dir:
            verifier_bytes = manifest.verifier.kv.token_bytes * block_tokens
            disk = DiskTier(
                Path(config.prefix_cache_dir),
                config.prefix_cache_disk_mb * MIB,
                verifier_bytes,
                block_bytes - verifier_bytes,
            )
            log.info(
                "prefix cache on disk: at most %d MB (%d MB asked for) in %s, %s",
                disk.budget_bytes // MIB,
                config.prefix_cache_disk_mb,
                config.prefix_cache_dir,
                f"{disk.metrics()['prefix_cache_disk_blocks']} blocks found",
            )
        return BlockPrefixCache(
            pool, self.engines, manifest.fingerprint, block_tokens, block_bytes, disk
        )


def _capacity(manifest: Manifest, config: RuntimeConfig) -> tuple[int, int]:
    """Pool blocks and the longest request (prompt and output, in tokens) that fits them."""
    kv = manifest.verifier.kv
    token_bytes = _token_bytes(manifest)
    draft_tokens = 0 if manifest.drafter is None else manifest.drafter.block_size
    built_for = manifest.serving_limits
    longest = built_for.get("max_model_tokens", manifest.verifier.max_positions)
    max_model_tokens = config.max_model_tokens or longest
    for name, limit in built_for.items():
        if not name.endswith("_mb") and getattr(config, name) > limit:  # engines know their pools
            raise ConfigError(
                f"{name} may be at most {limit}, for which the engines were built, got "
                f"{getattr(config, name)}: build with it in SERVING"
            )
    if max_model_tokens > manifest.verifier.max_positions:
        raise ConfigError(
            f"max_model_tokens may be at most the model's context of "
            f"{manifest.verifier.max_positions} tokens, got {max_model_tokens}"
        )
    most = config.max_batch_requests * blocks_for(max_model_tokens + draft_tokens, kv.block_tokens)
    num_blocks = min(most, config.kv_cache_mb * MIB // (token_bytes * kv.block_tokens))
    fitting = num_blocks * kv.block_tokens - draft_tokens
    if fitting < 2:
        raise ConfigError(
            f"kv_cache_mb must hold at least 2 blocks of "
            f"{token_bytes * kv.block_tokens / MIB:.2f} MB each, got {config.kv_cache_mb}"
        )
    return num_blocks, min(max_model_tokens, fitting)


def within_limits(manifest: Manifest, config: RuntimeConfig) -> RuntimeConfig:
    """`config`, lowered where the engines were built to serve less."""
    limits = manifest.serving_limits.items()
    return replace(config, **{n: min(getattr(config, n), limit) for n, limit in limits})


def _cache_blocks(manifest: Manifest, config: RuntimeConfig, running_blocks: int, free: int) -> int:
    """Blocks for cached prefixes: what is asked for, or what `free` bytes leave room for.

    Weights and the running requests' blocks come first, and `MEMORY_RESERVE_BYTES` stay free.
    """
    block_bytes = _token_bytes(manifest) * manifest.verifier.kv.block_tokens
    weights = sum(artifact.bytes for artifact in manifest.artifacts.values())
    room = free - weights - running_blocks * block_bytes - MEMORY_RESERVE_BYTES
    return max(0, min(config.prefix_cache_mb * MIB, room) // block_bytes)


def _token_bytes(manifest: Manifest) -> int:
    """Bytes that one token occupies in both pools."""
    drafter = 0 if manifest.drafter is None else manifest.drafter.kv.token_bytes
    return manifest.verifier.kv.token_bytes + drafter


def _load_tables(engine_dir: Path, manifest: Manifest, config: RuntimeConfig) -> Tables | None:
    """What was measured of these engines here; None, and a warning if it matters, without it."""
    if manifest.drafter is None or not manifest.drafter.has_confidence:
        return None
    try:
        cost = load_cost(engine_dir, manifest, config.engine_threads, config.max_batch_requests)
        return Tables(cost, load_calibration(engine_dir, manifest))
    except TableError as error:
        if config.policy in (AUTO, "throughput", "lagged"):
            log.warning("%s; until then every draft is verified as a whole", error)
        return None


def _load_draft_vocab(engine_dir: Path, manifest: Manifest) -> NDArray[np.int64] | None:
    if "draft_vocab" not in manifest.artifacts:
        return None
    vocab: NDArray[np.int64] = np.load(
        engine_dir / manifest.artifacts["draft_vocab"].path, allow_pickle=False
    )
    if not (np.diff(vocab) > 0).all():
        raise ManifestError(
            f"the draft vocabulary in {engine_dir} is not in ascending order: run `make engines`"
        )
    return vocab


class Decoder:
    """A `Model` whose loop runs in a thread of its own. All methods are thread-safe.

    Every submitted request ends in exactly one final output, whatever happens.
    """

    def __init__(self, engine_dir: Path, tokenizer_dir: Path, config: RuntimeConfig) -> None:
        self._model = Model(engine_dir, tokenizer_dir, config)
        self._loop = self._model.make_loop()
        self._config = config
        self._wake = threading.Condition()
        self._arrivals: list[tuple[int, Request, OnOutput]] = []
        self._cancelled: set[int] = set()
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0
        self._closing = False
        self._failed_steps = 0
        self._last_progress_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dspark-loop", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> RequestLimits:
        """What a request must satisfy."""
        return self._model.limits

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    def submit(self, request: Request, on_output: OnOutput) -> int:
        """Queue a request; returns its id.

        `on_output` is called from the loop's thread and must not block; the one output with a
        finish reason is the last. Raises QueueFull.
        """
        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise QueueFull("the server is shutting down: send the request to another one")
            waiting = len(self._arrivals) + len(self._loop.admission.waiting)
            if waiting >= self._config.max_queued_requests:
                raise QueueFull(
                    f"the queue holds its limit of {self._config.max_queued_requests} requests: "
                    "try again later"
                )
            self._next_id += 1
            if not self._sequences and not self._arrivals:
                self._last_progress_s = time.monotonic()
            guarded = self._guard(self._next_id, on_output)
            self._arrivals.append((self._next_id, request, guarded))
            self._wake.notify()
            return self._next_id

    def _guard(self, request_id: int, on_output: OnOutput) -> OnOutput:
        def deliver(output: RequestOutput) -> None:
            try:
                on_output(output)
            except Exception:  # one client's trouble must not fail the step of all others
                log.exception("an output could not be delivered; its request is cancelled")
                self.cancel(request_id)

        return deliver

    def cancel(self, request_id: int) -> None:
        """End a request within one step; one that has ended already is left alone."""
        with self._wake:
            self._cancelled.add(request_id)
            self._wake.notify()

    def is_healthy(self) -> bool:
        """Whether the loop is alive and, where work waits, making progress."""
        if not self._thread.is_alive() or self._failed_steps >= MAX_FAILED_STEPS:
            return False
        idle = not self._sequences and not self._arrivals
        stalled_s = time.monotonic() - self._last_progress_s
        return idle or stalled_s < self._config.stall_timeout_s

    def take_observations(self) -> list[tuple[str, float]]:
        """What `runtime.metrics.HISTOGRAMS` observed since the last call, by name."""
        waiting = self._loop.metrics.observations
        return [waiting.popleft() for _ in range(len(waiting))]

    def metrics(self) -> dict[str, float]:
        """Counters (names ending in `_total`) and gauges by name, labels in braces."""
        loop = self._loop
        metrics = loop.metrics
        pool = loop.admission.pool
        values: dict[str, float] = {f"{name}_total": n for name, n in dict(metrics.counts).items()}
        values |= {f"step_{name}_seconds_total": s for name, s in dict(metrics.seconds).items()}
        for name, at in (("verified", metrics.verified_at), ("accepted", metrics.accepted_at)):
            for position in dict(metrics.verified_at):
                values[f'{name}_at_position_total{{position="{position}"}}'] = at[position]
        values |= {
            "predicted_decoding_seconds_total": metrics.predicted_decoding_s,
            "measured_decoding_seconds_total": metrics.measured_decoding_s,
            **loop.scheduler.metrics(),
            "running_requests": len(loop.admission.running),
            "waiting_requests": len(loop.admission.waiting) + len(self._arrivals),
            "kv_blocks": pool.num_blocks,
            "kv_blocks_free": pool.num_free,
            "kv_blocks_used": pool.num_blocks - pool.num_free,
            "kv_blocks_shared": pool.num_shared,
        }
        return values | loop.cache.metrics()

    def close(self) -> None:
        """Cancel what runs, stop the thread and free the engines; may be called again."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._model.close()

    def _run(self) -> None:
        loop = self._loop
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: self._closing or self._arrivals or self._cancelled or loop.has_work
                )
                arrivals, self._arrivals = self._arrivals, []
                cancelled, self._cancelled = self._cancelled, set()
                closing = self._closing
            for request_id, request, on_output in arrivals:
                self._sequences[request_id] = loop.add(request, on_output)
            for request_id in self._sequences if closing else cancelled:
                self._abort(request_id, "cancelled")
            self._expire()
            if closing:
                return
            if loop.has_work:
                self._step()
            self._forget_finished()

    def _step(self) -> None:
        try:
            self._loop.step()
            self._failed_steps = 0
        except Exception as error:
            log.exception("a decoding step failed")
            self._failed_steps += 1
            for request_id in self._sequences:
                self._abort(request_id, "error", f"the decoder failed: {error}")
        self._last_progress_s = time.monotonic()

    def _expire(self) -> None:
        oldest = time.monotonic() - self._config.request_timeout_s
        for request_id, sequence in self._sequences.items():
            if sequence.arrival_s < oldest:
                limit = f"{self._config.request_timeout_s:g} s"
                self._abort(request_id, "timeout", f"the request took longer than {limit}")

    def _abort(self, request_id: int, reason: FinishReason, error: str | None = None) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None and not sequence.ended:
            self._loop.abort(sequence, reason, error)

    def _forget_finished(self) -> None:
        self._sequences = {i: s for i, s in self._sequences.items() if not s.ended}
