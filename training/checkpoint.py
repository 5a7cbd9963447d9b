"""Drafter checkpoints on disk in DeepSpec's layout: ``config.json`` and ``model.safetensors``."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.drafter import Drafter, DrafterConfig

# Kept in fp32: their products decide norms, and a few of them overflow or underflow in fp16.
FP32_PARTS = ("norm", "fc.weight", "confidence_head.proj.bias")


class DrafterCheckpointError(ValueError):
    """A drafter's files are missing, damaged or do not fit their config or target."""


def load_drafter(
    folder: Path,
    target_embedding: Tensor | None = None,
    target_lm_head: Tensor | None = None,
    block_size: int | None = None,
) -> Drafter:
    """Load a drafter in fp32, strictly: no tensor missing, none unexpected, every shape right.

    Embedding and lm_head [V, d] may be absent from the file; they are then the target's, which must
    be given. ``block_size`` overrides the config's (a block mask has no weights of its own).
    """
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    for path in (config_path, weights_path):
        if not path.is_file():
            raise DrafterCheckpointError(f"no {path.name} in {folder}")
    raw = json.loads(config_path.read_text(encoding="utf-8"))
    if block_size is not None:
        raw["block_size"] = block_size
    config = DrafterConfig.from_json(raw)
    tensors = load_file(weights_path)

    draft_to_target = None
    if config.has_reduced_vocab:
        for name in ("d2t", "t2d"):
            if name not in tensors:
                raise DrafterCheckpointError(
                    f"{weights_path} lacks {name}, needed for draft_vocab_size "
                    f"{config.draft_vocab_size} of {config.vocab_size}"
                )
        draft_to_target = torch.arange(config.draft_vocab_size) + tensors.pop("d2t").long()
        drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        if not 0 <= int(draft_to_target.min()) <= int(draft_to_target.max()) < config.vocab_size:
            raise DrafterCheckpointError(f"d2t of {weights_path} points outside the vocabulary")
        drafted[draft_to_target] = True
        if not torch.equal(drafted, tensors.pop("t2d").bool()):
            raise DrafterCheckpointError(f"d2t and t2d of {weights_path} contradict each other")

    embedding = tensors.pop("embed_tokens.weight", target_embedding)
    lm_head = tensors.pop("lm_head.weight", None)
    if lm_head is None and target_lm_head is not None:
        lm_head = target_lm_head if draft_to_target is None else target_lm_head[draft_to_target]
    if embedding is None or lm_head is None:
        raise DrafterCheckpointError(
            f"{weights_path} has no embedding or lm_head of its own: the target's are needed"
        )
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
        raise DrafterCheckpointError(
            f"embedding is {tuple(embedding.shape)}, the drafter expects "
            f"{(config.vocab_size, config.hidden_size)}"
        )
    drafter = Drafter(config, embedding.float(), lm_head.float(), draft_to_target)
    expected = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if expected != found:
        missing = sorted(expected.keys() - found.keys())
        unexpected = sorted(found.keys() - expected.keys())
        shapes = [
            f"{name} is {found[name]}, expected {expected[name]}"
            for name in sorted(expected.keys() & found.keys())
            if expected[name] != found[name]
        ]
        raise DrafterCheckpointError(
            f"{weights_path} does not fit its config: missing {missing}, unexpected {unexpected}, "
            f"shapes {shapes}"
        )
    drafter.load_state_dict({name: value.float() for name, value in tensors.items()})
    return drafter


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The tensors of a checkpoint, fp16 but for those in ``FP32_PARTS``; without the target's."""
    tensors: dict[str, Tensor] = {}
    for name, value in drafter.state_dict().items():
        value = value.detach().cpu().float()
        if name == "fc.weight":
            value = value / drafter.feature_scale.cpu()
        if not any(part in name for part in FP32_PARTS):
            value = value.half()
        if not torch.isfinite(value).all():
            raise DrafterCheckpointError(
                f"{name} is not finite in {value.dtype}; training diverged"
            )
        tensors[name] = value.contiguous()
    config = drafter.config
    if config.has_reduced_vocab:
        ids = drafter.draft_to_target.cpu()
        tensors["d2t"] = ids - torch.arange(config.draft_vocab_size)
        drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        drafted[ids] = True
        tensors["t2d"] = drafted
    return tensors


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors``; each file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = drafter.config.to_json() | {"dtype": "float16"}
    scratch = folder / ".config.json.tmp"
    scratch.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, folder / "config.json")
    scratch = folder / ".model.safetensors.tmp"
    save_file(drafter_tensors(drafter), scratch, metadata={"format": "pt"})
    os.replace(scratch, folder / "model.safetensors")
