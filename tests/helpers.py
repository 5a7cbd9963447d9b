"""Tiny models made on the spot and access to the shared reference data.

Tests never reach the network. What needs the shared data skips with a message that says how to
provide it; everything else runs on random checkpoints of a few hundred kilobytes whose tokenizer
is a real byte-level BPE, so that text round-trips.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

TINY_VOCAB_SIZE = 320
TINY_TARGET_LAYERS = (0, 2)
EOS_TOKEN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Enough repetition for the BPE trainer to find its merges.
TOKENIZER_TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps under the old oak tree.",
    "A model drafts tokens and another model verifies them; then the text goes to the user.",
    "user assistant system user assistant the the and and of of to to in in is is that that",
)


def make_tiny_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer of `TINY_VOCAB_SIZE` tokens with EOS and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    assert tokenizer.get_vocab_size() == TINY_VOCAB_SIZE
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token=EOS_TOKEN,
        pad_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def make_tiny_model(
    directory: Path, architecture: str = "llama", *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a random fp32 causal LM (config, safetensors, tokenizer) and return `directory`.

    `architecture` is llama, mistral, qwen2 or qwen3; `overrides` go to its configuration. The
    weights are drawn wide enough that logits differ by more than rounding.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": TINY_VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
            "sliding_window": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            **overrides,
        },
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with (
        torch.no_grad()
    ):  # norms start at 1 and biases at 0: an exporter that drops them would pass
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 0], pad_token_id=2)
    model.save_pretrained(directory)
    make_tiny_tokenizer(directory)
    return directory


def make_tiny_llama(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Llama checkpoint; see `make_tiny_model`."""
    return make_tiny_model(directory, "llama", seed=seed, **overrides)


def make_tiny_drafter(
    directory: Path,
    *,
    head: str = "vanilla",
    confidence: bool = True,
    confidence_with_markov: bool = True,
    own_embeddings: bool = True,
    draft_vocab_size: int | None = None,
    block_size: int = 5,
    target_layer_ids: tuple[int, ...] = TINY_TARGET_LAYERS,
    num_target_layers: int = 4,
    hidden_size: int = 64,
    vocab_size: int = TINY_VOCAB_SIZE,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a random DSpark drafter in DeepSpec's layout for a `make_tiny_model` target.

    `head` is vanilla, gated, rnn or none. With `own_embeddings` False the embedding and lm_head
    are the target's; with `draft_vocab_size` the draft vocabulary is reduced (every tensor that
    needs it, `d2t` and `t2d` included). `overrides` go to config.json.
    """
    import torch
    from safetensors.torch import save_file

    rank, heads, kv_heads, head_dim, intermediate = 16, 4, 2, 16, 128
    with_markov = confidence_with_markov and head != "none"
    drafts = draft_vocab_size or vocab_size
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False,
        "max_position_embeddings": 512,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "num_target_layers": num_target_layers,
        "target_layer_ids": list(target_layer_ids),
        "mask_token_id": vocab_size - 1,
        "markov_rank": 0 if head == "none" else rank,
        "enable_confidence_head": confidence,
    }
    if head != "none":
        config["markov_head_type"] = head
    if confidence:
        config["confidence_head_with_markov"] = with_markov
    if draft_vocab_size:
        config["draft_vocab_size"] = draft_vocab_size
    config |= overrides

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.15) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    def norm(size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    tensors = {
        "fc.weight": normal(hidden_size, len(target_layer_ids) * hidden_size),
        "hidden_norm.weight": norm(hidden_size),
        "norm.weight": norm(hidden_size),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": norm(hidden_size),
            f"{layer}.post_attention_layernorm.weight": norm(hidden_size),
            f"{layer}.self_attn.q_proj.weight": normal(heads * head_dim, hidden_size),
            f"{layer}.self_attn.k_proj.weight": normal(kv_heads * head_dim, hidden_size),
            f"{layer}.self_attn.v_proj.weight": normal(kv_heads * head_dim, hidden_size),
            f"{layer}.self_attn.o_proj.weight": normal(hidden_size, heads * head_dim),
            f"{layer}.self_attn.q_norm.weight": norm(head_dim),
            f"{layer}.self_attn.k_norm.weight": norm(head_dim),
            f"{layer}.mlp.gate_proj.weight": normal(intermediate, hidden_size),
            f"{layer}.mlp.up_proj.weight": normal(intermediate, hidden_size),
            f"{layer}.mlp.down_proj.weight": normal(hidden_size, intermediate),
        }
    if own_embeddings:
        tensors["embed_tokens.weight"] = normal(vocab_size, hidden_size)
        tensors["lm_head.weight"] = normal(drafts, hidden_size)
    if head != "none":
        tensors["markov_head.markov_w1.weight"] = normal(vocab_size, rank, std=1.0)
        tensors["markov_head.markov_w2.weight"] = normal(drafts, rank, std=0.5)
    if head == "gated":
        tensors["markov_head.gate_proj.weight"] = normal(rank, hidden_size + rank)
        tensors["markov_head.gate_proj.bias"] = normal(rank)
    if head == "rnn":
        tensors["markov_head.joint_proj.weight"] = normal(3 * rank, 2 * rank + hidden_size)
        tensors["markov_head.joint_proj.bias"] = normal(3 * rank)
    if confidence:
        width = hidden_size + (rank if with_markov else 0)
        tensors["confidence_head.proj.weight"] = normal(1, width)
        tensors["confidence_head.proj.bias"] = normal(1)
    if draft_vocab_size:
        kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab_size)
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[kept] = True
        tensors["t2d"] = t2d
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, directory / "model.safetensors")
    return directory


def shared_data_dir() -> Path:
    """The folder of shared reference data; skips the test when it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("DSPARK_SHARED_DATA", beside))
    if not path.is_dir():
        pytest.skip(f"shared data not found at {path}: set DSPARK_SHARED_DATA to its folder")
    return path


Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GoldenRound:
    """One speculative round as DeepSpec's code computed it (greedy, fp32)."""

    anchor: int
    context_features: Floats  # [c, m*d] of the tokens that became context since the last round
    draft_ids: Ints  # [g]
    draft_logits: Floats  # [g, V]
    confidence_logits: Floats | None  # [g]
    verify_ids: Ints  # [g + 1]
    target_logits: Floats  # [g + 1, V]
    accepted: int


@dataclass(frozen=True)
class GoldenPrompt:
    """A prompt, what plain greedy decoding of the target makes of it, and the rounds."""

    prompt: Ints  # [n]
    prompt_features: Floats  # [n, m*d]
    first_token: int
    output: Ints
    rounds: list[GoldenRound]


def load_golden(head: str) -> list[GoldenPrompt]:
    """Read golden/`head`.npz (vanilla, gated, rnn or dflash); skips when it is absent."""
    arrays = np.load(shared_data_dir() / "golden" / f"{head}.npz")
    prompts = []
    for p in range(sum(name.endswith("_prompt") for name in arrays)):
        num_rounds = sum(name.startswith(f"p{p}_r") and name.endswith("_anchor") for name in arrays)
        rounds = []
        for r in range(num_rounds):
            key = f"p{p}_r{r}_"
            confidence = key + "confidence_logits"
            rounds.append(
                GoldenRound(
                    anchor=int(arrays[key + "anchor"].item()),
                    context_features=arrays[key + "context_features"],
                    draft_ids=arrays[key + "draft_ids"],
                    draft_logits=arrays[key + "draft_logits"],
                    confidence_logits=arrays.get(confidence),
                    verify_ids=arrays[key + "verify_ids"],
                    target_logits=arrays[key + "target_logits"],
                    accepted=int(arrays[key + "accepted"]),
                )
            )
        prompts.append(
            GoldenPrompt(
                prompt=arrays[f"p{p}_prompt"],
                prompt_features=arrays[f"p{p}_prompt_features"],
                first_token=int(arrays[f"p{p}_first_token"].item()),
                output=arrays[f"p{p}_output"],
                rounds=rounds,
            )
        )
    return prompts
