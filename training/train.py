"""The training run: schedule, steps, averaging, validation, checkpoints.

A run is one or more cosine cycles of the learning rate. Where each of them ends, and where a run
from a trained drafter began, are averaged (stochastic weight averaging, Izmailov et al. 2018).

Everything a run leaves is in its work folder: ``cache/`` (what the target said), ``checkpoint.pt``
(exact state, replaced every few minutes), ``best/`` (the drafter with the best validation, in
DeepSpec's layout), ``last/`` (the newest one), ``log.csv``, ``validation.csv`` and ``curves.png``.
"""

import contextlib
import csv
import ctypes
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from training.batches import BatchSource, SamplerState, split_sequences
from training.checkpoint import load_drafter, save_drafter
from training.config import TrainConfig
from training.drafter import (
    Drafter,
    DrafterConfig,
    initialise_from_target,
    parameter_count,
    target_to_draft,
    with_draft_vocab,
)
from training.evaluate import Validation, validate
from training.features import CacheSpec, FeatureCache
from training.losses import LossParts, LossWeights, drafter_loss, position_weights
from training.plot import plot_curves
from training.products import bf16_products, has_bf16_units, onednn_bf16
from training.store import TokenStore, read_store
from training.target import Target, TargetError, materialise_target

LOSS_FIELDS = ("ce", "l1", "confidence", "kl", "overlap")
LOG_FIELDS = ("step", "minutes", "lr", "loss", *LOSS_FIELDS, "grad_norm", "anchors_per_s", "epoch")


class TrainError(RuntimeError):
    """The run cannot start, continue or go on; the message says what to do."""


@dataclass
class RunState:
    """Progress of a run; plain data, saved with the weights.

    ``elapsed_s`` is the wall time of all sessions of the run, without the time between them.
    ``averaged`` counts the drafters in the average.
    """

    step: int = 0
    elapsed_s: float = 0.0
    averaged: int = 0
    best_length: float = 0.0
    next_validation_s: float = 0.0
    sampler: SamplerState = field(default_factory=SamplerState)


def progress_of(config: TrainConfig, state: RunState) -> float:
    """How much of the run is over, 0..1: by steps or by wall time, as configured."""
    done = state.step / config.steps if config.steps else state.elapsed_s / 60 / config.minutes
    return min(1.0, done)


def cycle_progress(config: TrainConfig, progress: float) -> float:
    """How much of the present cycle is over, 0..1, at ``progress`` of the run."""
    cycle = min(int(progress * config.cycles), config.cycles - 1)
    return progress * config.cycles - cycle


def learning_rate(config: TrainConfig, step: int, progress: float) -> float:
    """Linear warm-up in steps, then a cosine over every cycle to ``final_lr_fraction``."""
    floor = config.final_lr_fraction
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * cycle_progress(config, progress)))
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * cosine * warm


def uses_bf16_products(config: TrainConfig, device_type: str) -> bool:
    """Whether the run multiplies in bfloat16: wished for, and faster here."""
    return config.bf16_products and device_type == "cpu" and has_bf16_units()


def make_optimizer(drafter: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and biases do not."""
    params = list(drafter.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def choose_draft_vocab(
    store: TokenStore, size: int, vocab_size: int, keep: Sequence[int]
) -> Tensor:
    """The ``size`` most frequent answer tokens, ascending ids [size] int64; ``keep`` always in.

    Ties and unused places go to the lower ids, which are the more frequent ones in BPE tokenizers.
    """
    if size > vocab_size:
        raise TrainError(f"draft_vocab_size {size} is above the target's vocabulary {vocab_size}")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for index, meta in enumerate(store.metas):
        np.add.at(counts, store.sequence(index)[meta.a :], 1)
    counts[list(keep)] = np.iinfo(np.int64).max
    order = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(order))


def draft_vocab(size: int, target: Target, store: TokenStore) -> tuple[Tensor | None, Tensor]:
    """Target ids [size] of a draft vocabulary (None: all of them), and lm_head [size, d]."""
    if size == target.vocab_size:
        return None, target.lm_head.float()
    ids = choose_draft_vocab(store, size, target.vocab_size, sorted(target.eos_token_ids))
    return ids, target.lm_head[ids].float()


def feature_scale(cache: FeatureCache, indices: Sequence[int]) -> Tensor:
    """Root mean square of every feature channel over some cached sequences: [m * d] float32."""
    total, count = torch.zeros(cache.spec.feature_size, dtype=torch.float64), 0
    for index in indices:
        features = torch.from_numpy(cache.read(index).features).double()
        # The first token's features are a thousand times larger than all others in many models
        # (an attention sink); one token must not set the scale of a channel.
        features = features[1:]
        total = total + features.square().sum(dim=0)
        count += len(features)
    if not count:
        raise TrainError("no cached sequence to measure the feature scale on")
    return (total / count).sqrt().clamp(min=1e-6).float()


def new_drafter(config: TrainConfig, target: Target, store: TokenStore) -> Drafter:
    """The drafter before its first step: loaded from ``config.init``, or made from the target.

    A loaded drafter with a draft vocabulary of another size than configured gets a new one.
    """
    draft_vocab_size = min(config.draft_vocab_size, target.vocab_size)
    if config.init:
        drafter = load_drafter(
            Path(config.init), target.embedding, target.lm_head, block_size=config.block_size
        )
        if drafter.config.target_layer_ids != config.target_layer_ids:
            raise TrainError(
                f"{config.init} taps layers {list(drafter.config.target_layer_ids)}, the "
                f"configuration says {list(config.target_layer_ids)}"
            )
        if drafter.config.draft_vocab_size != draft_vocab_size:
            return with_draft_vocab(drafter, *draft_vocab(draft_vocab_size, target, store))
        return drafter
    base = target.config
    drafter_config = DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=int(base.intermediate_size),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=int(base.num_attention_heads),
        num_key_value_heads=int(base.num_key_value_heads),
        head_dim=int(
            getattr(base, "head_dim", 0) or target.hidden_size // base.num_attention_heads
        ),
        rms_norm_eps=float(base.rms_norm_eps),
        rope_theta=float(base.rope_parameters["rope_theta"]),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        block_size=config.block_size,
        num_target_layers=int(base.num_hidden_layers),
        target_layer_ids=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type,
        enable_confidence_head=config.enable_confidence_head,
        confidence_head_with_markov=config.confidence_head_with_markov and config.markov_rank > 0,
        max_position_embeddings=int(base.max_position_embeddings),
    )
    torch.manual_seed(config.seed)
    ids, lm_head = draft_vocab(draft_vocab_size, target, store)
    return Drafter(drafter_config, target.embedding.float(), lm_head, ids)


def keep_freed_memory() -> None:
    """Let glibc reuse large freed buffers instead of giving them back to the kernel.

    Activations and gradients of a step are megabytes each; by default each comes fresh from mmap
    and is zeroed page by page. Keeping them made a CPU step 15 % cheaper. No effect without glibc,
    which takes a threshold of at most 32 MiB.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3  # numbers from malloc.h
        libc.mallopt(m_mmap_threshold, 1 << 25)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)


class Trainer:
    """One run: a drafter, its optimiser and its data, advanced step by step."""

    def __init__(
        self,
        config: TrainConfig,
        drafter: Drafter,
        source: BatchSource,
        validation_indices: Sequence[int],
        work_dir: Path,
    ) -> None:
        self.config = config
        self.drafter = drafter
        self.source = source
        self.validation_indices = tuple(validation_indices)
        self.work_dir = work_dir
        self.optimizer = make_optimizer(drafter, config)
        self.state = RunState()
        self.average = {name: torch.zeros_like(w) for name, w in drafter.state_dict().items()}
        device = drafter.draft_to_target.device
        self.bf16 = uses_bf16_products(config, device.type)
        self.decay = position_weights(config.block_size, config.position_decay_tokens).to(device)

    @property
    def progress(self) -> float:
        """How much of the run is over, 0..1."""
        return progress_of(self.config, self.state)

    def step(self) -> tuple[LossParts, float, int]:
        """One optimiser step; returns the loss, the gradient norm and the number of anchors."""
        config, state = self.config, self.state
        rate = learning_rate(config, state.step, self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        soft = cycle_progress(config, self.progress) < config.kl_until
        kl = config.kl_weight if soft else 0.0
        weights = LossWeights(config.ce_weight, config.l1_weight, config.confidence_weight, kl)
        batch = self.source.batch(state.sampler, state.step)
        with bf16_products(self.bf16):
            loss = drafter_loss(self.drafter, batch, self.source.to_draft, weights, self.decay)
            loss.total.backward()
        loss = loss._replace(total=loss.total.detach())
        norm = float(nn.utils.clip_grad_norm_(self.drafter.parameters(), config.clip_norm))
        if not math.isfinite(norm):
            raise TrainError(
                f"the gradient of step {state.step} is not finite; continue from the checkpoint "
                f"with a learning_rate below {config.learning_rate:g}"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        state.step += 1
        return loss, norm, len(batch.packed.anchor_ids)

    def add_to_average(self) -> None:
        """Count the drafter as it is now into the average."""
        self.state.averaged += 1
        for name, weights in self.drafter.state_dict().items():
            self.average[name].lerp_(weights, 1 / self.state.averaged)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this, the drafter has the averaged weights."""
        own = {name: weights.clone() for name, weights in self.drafter.state_dict().items()}
        self.drafter.load_state_dict(self.average)
        try:
            yield
        finally:
            self.drafter.load_state_dict(own)

    def validate(self) -> Validation:
        """Score the held-out sequences that are cached."""
        ready = self.source.cache.ready()
        sequences = [self.source.cache.read(i) for i in self.validation_indices if ready[i]]
        return validate(self.drafter, sequences)

    def save(self) -> None:
        """Write ``checkpoint.pt`` (by a rename) and the drafter in ``last/``."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "checkpoint.pt"
        scratch = self.work_dir / ".checkpoint.pt.tmp"
        torch.save(
            {
                "config": asdict(self.config),
                "drafter": self.drafter.state_dict(),
                "average": self.average,
                "feature_scale": self.drafter.feature_scale,
                "draft_to_target": self.drafter.draft_to_target,
                "optimizer": self.optimizer.state_dict(),
                "state": asdict(self.state),
            },
            scratch,
        )
        os.replace(scratch, path)
        save_drafter(self.drafter, self.work_dir / "last")

    def restore(self) -> None:
        """Continue from ``checkpoint.pt``: weights, optimiser, data position and clock."""
        path = self.work_dir / "checkpoint.pt"
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        wanted, found = asdict(self.config), saved["config"]
        # The length and the bookkeeping of a run may change on the way; the rest makes another run.
        free = {"steps", "minutes", "target", "data", "init"} | {
            key for key in wanted if key.endswith(("_every_minutes", "_every_steps"))
        }
        changed = sorted(k for k in wanted if k not in free and found.get(k) != wanted[k])
        if changed:
            raise TrainError(
                f"{path} was made with other settings ({', '.join(changed)} differ): restore them, "
                f"or start a new run from {self.work_dir / 'last'} (init) in another --work-dir"
            )
        if not torch.equal(saved["draft_to_target"], self.drafter.draft_to_target.cpu()):
            raise TrainError(f"{path} has another draft vocabulary than the configured run")
        self.drafter.load_state_dict(saved["drafter"])
        self.average = saved["average"]
        self.drafter.feature_scale.copy_(saved["feature_scale"])
        self.optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
        self.state = RunState(**state | {"sampler": SamplerState(**state["sampler"])})

    def run(self, show_progress: bool = True) -> None:
        """Train to the end of the schedule, with logs, validations and checkpoints on the way."""
        config, state = self.config, self.state
        log = CsvLog(self.work_dir / "log.csv", LOG_FIELDS, state.step)
        checks = CsvLog(
            self.work_dir / "validation.csv",
            ["step", "minutes", "averaged", "greedy_length", "sampled_length"]
            + [f"match_{k + 1}" for k in range(config.block_size)]
            + [f"overlap_{k + 1}" for k in range(config.block_size)],
            state.step,
        )
        begin_s = time.monotonic() - state.elapsed_s
        saved_s = logged_s = time.monotonic()
        anchors = 0
        bar = tqdm(
            total=1000, initial=round(1000 * self.progress), disable=not show_progress,
            bar_format="{l_bar}{bar}| {elapsed} < {remaining}{postfix}", mininterval=5.0,
        )  # fmt: skip
        if state.step == 0:
            self._check(checks, bar)
            if config.init:
                self.add_to_average()
            state.next_validation_s = config.validate_every_minutes * 60
        while self.progress < 1.0:
            cycle = int(self.progress * config.cycles)
            loss, norm, count = self.step()
            anchors += count
            now = time.monotonic()
            state.elapsed_s = now - begin_s
            bar.update(round(1000 * self.progress) - bar.n)
            if state.step % config.log_every_steps == 0:
                rate = anchors / max(now - logged_s, 1e-9)
                logged_s, anchors = now, 0
                log.write(
                    step=state.step,
                    minutes=state.elapsed_s / 60,
                    lr=self.optimizer.param_groups[0]["lr"],
                    loss=float(loss.total),
                    **{name: float(getattr(loss, name)) for name in LOSS_FIELDS},
                    grad_norm=norm,
                    anchors_per_s=rate,
                    epoch=state.sampler.epoch,
                )
                bar.set_postfix_str(
                    f"step {state.step} loss {float(loss.total):.3f} {rate:.0f} anchors/s"
                )
            if state.elapsed_s >= state.next_validation_s:
                self._check(checks, bar)
                state.next_validation_s = state.elapsed_s + config.validate_every_minutes * 60
            if int(self.progress * config.cycles) > cycle:
                self._end_cycle(checks, bar)
            if now - saved_s >= config.checkpoint_every_minutes * 60:
                self.save()
                saved_s = time.monotonic()
        self.save()
        bar.close()

    def _end_cycle(self, checks: "CsvLog", bar: "tqdm[Any]") -> None:
        """Check where the cycle ended, and the average that this is now part of."""
        self._check(checks, bar)
        self.add_to_average()
        if self.state.averaged > 1:
            with self.averaged():
                self._check(checks, bar, self.state.averaged)

    def _check(self, checks: "CsvLog", bar: "tqdm[Any]", averaged: int = 1) -> None:
        """Validate, print, log, and keep the drafter if it is the best so far."""
        result, state = self.validate(), self.state
        mean_of = f", mean of {averaged}" if averaged > 1 else ""
        bar.write(
            f"step {state.step}, {state.elapsed_s / 60:.1f} min{mean_of}: accepted length greedy "
            f"{result.greedy_length:.3f}, temperature 1 {result.sampled_length:.3f}; "
            f"accepted by position, greedy {_percent(result.position_match)}, "
            f"temperature 1 {_percent(result.position_overlap)}"
        )
        row: dict[str, float] = {
            "step": state.step,
            "minutes": state.elapsed_s / 60,
            "averaged": averaged,
            "greedy_length": result.greedy_length,
            "sampled_length": result.sampled_length,
        }
        for name, values in (
            ("match", result.position_match),
            ("overlap", result.position_overlap),
        ):
            row |= {f"{name}_{k + 1}": value for k, value in enumerate(values)}
        checks.write(**row)
        # A set without greedy (or without sampled) texts is judged by the other kind; without any,
        # the newest is the best.
        lengths = [result.greedy_length, result.sampled_length]
        length = float(np.mean([x for x in lengths if not math.isnan(x)] or [math.inf]))
        if length >= state.best_length:
            state.best_length = length
            save_drafter(self.drafter, self.work_dir / "best")
        plot_curves(self.work_dir)


class CsvLog:
    """A CSV file with a header; rows of steps after ``last_step`` are dropped when it is opened."""

    def __init__(self, path: Path, names: Sequence[str], last_step: int) -> None:
        self.path = path
        self.names = list(names)
        rows: list[dict[str, str]] = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if int(row["step"]) <= last_step]
        if last_step == 0:
            rows = []
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    def write(self, **row: float) -> None:
        """Append one row; numbers get six digits."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            values = {k: v if isinstance(v, int) else f"{v:.6g}" for k, v in row.items()}
            csv.DictWriter(file, self.names).writerow(values)


def _percent(values: Sequence[float]) -> str:
    return "/".join(f"{100 * value:.0f}" for value in values) + " %"


def train(
    config: TrainConfig,
    work_dir: Path,
    device: str = "cpu",
    resume: bool = False,
    fill_cache: bool = True,
    show_progress: bool = True,
) -> Path:
    """Run ``config`` in ``work_dir`` and return the folder of the best drafter.

    With ``resume`` the checkpoint in ``work_dir`` is continued; without it, an existing checkpoint
    is an error, so that a run is never overwritten by accident. ``fill_cache`` False trains on the
    sequences that are cached so far (another process may be filling the cache).
    """
    checkpoint = work_dir / "checkpoint.pt"
    if resume and not checkpoint.is_file():
        raise TrainError(f"nothing to resume: no {checkpoint}")
    if not resume and checkpoint.is_file():
        raise TrainError(
            f"{checkpoint} exists: continue it with --resume, or choose another --work-dir"
        )
    keep_freed_memory()
    work_dir.mkdir(parents=True, exist_ok=True)
    store = read_store(Path(config.data))
    target = Target.load(
        materialise_target(Path(config.target), work_dir / "hf"), config.target_layer_ids, device
    )
    cache = open_cache(config, work_dir, store, target)
    train_indices, validation_indices = split_sequences(
        len(store), config.validation_fraction, config.seed
    )
    if fill_cache:
        bf16 = uses_bf16_products(config, torch.device(device).type)
        with tqdm(
            total=store.num_tokens, unit="tok", desc="target", disable=not show_progress,
            mininterval=5.0,
        ) as bar, onednn_bf16(bf16):  # fmt: skip
            cache.fill(target, [*validation_indices, *train_indices], bar.update, device)
    ready = cache.ready()
    usable = [index for index in train_indices if ready[index]]
    if not usable:
        raise TrainError(f"no training sequence is cached in {cache.folder} yet")
    drafter = new_drafter(config, target, store).to(device)
    drafter.set_feature_scale(feature_scale(cache, usable[:100]).to(device))
    if not config.init:
        initialise_from_target(drafter, target.model, config.seed)
    del target  # half a gigabyte that training does not need
    to_draft = target_to_draft(drafter.draft_to_target, drafter.config.vocab_size)
    source = BatchSource(
        cache,
        train_indices,
        config.sequences_per_step,
        config.anchor_fraction,
        config.block_size,
        config.seed,
        to_draft,
        device,
    )
    trainer = Trainer(config, drafter, source, validation_indices, work_dir)
    if resume:
        trainer.restore()
    print(
        f"{parameter_count(drafter):,} trained parameters, {len(train_indices)} training and "
        f"{len(validation_indices)} validation sequences, {int(ready.sum())} cached",
        flush=True,
    )
    trainer.run(show_progress)
    return work_dir / "best"


def open_cache(
    config: TrainConfig, work_dir: Path, store: TokenStore, target: Target
) -> FeatureCache:
    """The feature cache of a run, in its work folder."""
    highest = int(store.tokens.max())
    if highest >= target.vocab_size:
        raise TargetError(
            f"{config.data} holds token id {highest}, the target's vocabulary ends at "
            f"{target.vocab_size - 1}: it was made for another model"
        )
    spec = CacheSpec(
        num_sequences=len(store),
        num_tokens=store.num_tokens,
        feature_size=len(config.target_layer_ids) * target.hidden_size,
        layer_ids=config.target_layer_ids,
        vocab_size=target.vocab_size,
        top_k=min(config.top_k, target.vocab_size),
    )
    return FeatureCache(work_dir / "cache", store, spec)
