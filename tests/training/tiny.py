"""Tiny random models and data for the tests of `training`: no download, milliseconds each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.drafter import Drafter, DrafterConfig
from training.store import SequenceMeta, StoreWriter
from training.target import Target

VOCAB, HIDDEN, LAYERS = 48, 16, 4
LAYER_IDS = (0, 2)
EOS = 2


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=EOS,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def tiny_target(seed: int = 0) -> Target:
    return Target(tiny_model(seed), LAYER_IDS)


def tiny_drafter(
    head: str = "vanilla", rank: int = 4, draft_vocab: int = 32, block_size: int = 4, seed: int = 1
) -> Drafter:
    torch.manual_seed(seed)
    config = DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        block_size=block_size,
        num_target_layers=LAYERS,
        target_layer_ids=LAYER_IDS,
        mask_token_id=3,
        markov_rank=rank,
        markov_head_type=head,
        enable_confidence_head=True,
        confidence_head_with_markov=rank > 0,
    )
    ids = None
    if draft_vocab != VOCAB:
        ids = torch.randperm(VOCAB)[:draft_vocab].sort().values
    lm_head = torch.randn(draft_vocab, HIDDEN)
    drafter = Drafter(config, torch.randn(VOCAB, HIDDEN), lm_head, ids)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter


def write_store(stem: Path, sequences: int = 12, seed: int = 0, greedy: bool = False) -> None:
    """Random token sequences; or, with ``greedy``, what the tiny target really answers."""
    rng = np.random.default_rng(seed)
    target = tiny_target() if greedy else None
    with StoreWriter(stem) as writer:
        for _ in range(sequences):
            prompt = rng.integers(4, VOCAB, size=int(rng.integers(2, 6))).tolist()
            if target is None:
                answer = rng.integers(4, VOCAB, size=int(rng.integers(4, 20))).tolist()
            else:
                answer = greedy_answer(target.model, prompt, 24)
            ids = prompt + answer
            writer.append(ids, SequenceMeta(len(ids), len(prompt), 0.0, False, False))


@torch.inference_mode()
def greedy_answer(
    model: torch.nn.Module,
    prompt: list[int],
    count: int,
    eos_token_ids: frozenset[int] = frozenset([EOS]),
) -> list[int]:
    """The plainest possible greedy decoding: the whole text again for every token."""
    ids = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids])).logits
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in eos_token_ids:
            break
    return ids[len(prompt) :]
