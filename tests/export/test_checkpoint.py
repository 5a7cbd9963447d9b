"""What is loaded, and how everything else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from export.checkpoint import (
    CheckpointError,
    convert_gguf,
    draft_vocab,
    load_drafter,
    load_target,
)
from tests.helpers import make_tiny_drafter, make_tiny_llama, make_tiny_model

Edit = Callable[[dict[str, Any]], object]


def edit_json(path: Path, edit: Edit) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def edit_tensors(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_reads_a_target(tmp_path: Path) -> None:
    config, weights = load_target(make_tiny_llama(tmp_path))
    assert (config.architecture, config.vocab_size, config.max_positions) == ("llama", 320, 512)
    assert config.eos_token_ids == (2, 0)  # generation_config's, in its order
    assert not config.tied
    assert weights["model.norm.weight"].shape == (64,)


def test_eos_falls_back_to_the_config(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert load_target(tmp_path)[0].eos_token_ids == (2,)


def test_reads_shards(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    names = sorted(whole)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: whole[n] for n in part}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = load_target(tmp_path)[1]
    assert all(torch.equal(weights[n], whole[n]) for n in names)


def test_a_tied_head_may_be_stored_twice(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(320, 64)}))
    assert load_target(tmp_path)[0].tied


TARGET_REFUSALS: dict[str, tuple[Edit, str]] = {
    "architecture": (
        lambda c: c.update(model_type="gpt2"),
        "'gpt2' model; supported are Llama, Mistral, Qwen2, Qwen3",
    ),
    "mixture of experts": (lambda c: c.update(model_type="mixtral"), "'mixtral' model; supported"),
    "window": (
        lambda c: c.update(model_type="mistral", sliding_window=64),
        "sliding-window attention \\(sliding_window 64\\)",
    ),
    "layer types": (
        lambda c: c.update(
            model_type="qwen3", layer_types=["full_attention", "sliding_attention"] * 2
        ),
        "sliding-window",
    ),
    "rope": (
        lambda c: c.update(
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "rope type 'dynamic'; supported are default, linear, llama3, yarn",
    ),
    "activation": (lambda c: c.update(hidden_act="gelu"), "activation 'gelu'"),
    "quantised": (
        lambda c: c.update(quantization_config={"quant_method": "gptq"}),
        "quantised \\(gptq\\)",
    ),
}


@pytest.mark.parametrize("case", TARGET_REFUSALS)
def test_refuses_a_target(case: str, tmp_path: Path) -> None:
    edit, sentence = TARGET_REFUSALS[case]
    edit_json(make_tiny_llama(tmp_path) / "config.json", edit)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load_target(tmp_path)
    assert "\n" not in str(caught.value)


def test_refuses_missing_unexpected_and_misshapen_tensors(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    norm = "model.norm.weight"
    original = load_file(tmp_path / "model.safetensors")
    cases: list[tuple[Edit, str]] = [
        (lambda t: t.pop(norm), "lacks model.norm.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "holds model.extra, which"),
        (
            lambda t: t.update({norm: torch.zeros(65)}),
            r"shape \[65\], config.json calls for \[64\]",
        ),
    ]
    for edit, sentence in cases:
        save_file(original, tmp_path / "model.safetensors")
        edit_tensors(tmp_path, edit)
        with pytest.raises(CheckpointError, match=sentence):
            load_target(tmp_path)


def test_refuses_pickles_and_damaged_files(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        load_target(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin, which is a pickle"):
        load_target(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        load_target(tmp_path)


DRAFTER_REFUSALS: dict[str, tuple[Edit, str]] = {
    "layout": (
        lambda c: c.update(architectures=["DSparkDraftModel"]),
        "DSparkDraftModel.*supported is 'Qwen3DSparkModel'",
    ),
    "hidden size": (lambda c: c.update(hidden_size=32), "hidden_size is 32, the target has 64"),
    "vocabulary": (lambda c: c.update(vocab_size=319), "vocab_size is 319, the target has 320"),
    "layers": (lambda c: c.update(num_target_layers=5), "num_target_layers is 5, the target has 4"),
    "layer order": (lambda c: c.update(target_layer_ids=[2, 0]), "strictly increasing"),
    "layer twice": (lambda c: c.update(target_layer_ids=[2, 2]), "strictly increasing"),
    "last layer": (lambda c: c.update(target_layer_ids=[0, 3]), "last layer \\(3\\), got 3"),
    "no layers": (lambda c: c.update(target_layer_ids=[]), "needs target_layer_ids"),
    "block": (lambda c: c.update(block_size=0), "block_size must be 1 or more, got 0"),
    "mask": (lambda c: c.update(mask_token_id=320), "vocabulary size 320, got 320"),
    "no mask": (lambda c: c.pop("mask_token_id"), "needs mask_token_id of type int, got None"),
    "head": (lambda c: c.update(markov_head_type="lstm"), "vanilla, gated, rnn.*got 'lstm'"),
    "rank": (lambda c: c.update(markov_rank=8), "has shape \\[320, 16\\], config.json calls for"),
    "head dropped": (
        lambda c: c.update(markov_rank=0, confidence_head_with_markov=False),
        "holds markov_head.markov_w1.weight.*does not account for",
    ),
    "confidence": (
        lambda c: c.update(markov_rank=0),
        "confidence_head_with_markov needs a sequential head",
    ),
    "no confidence": (
        lambda c: c.update(enable_confidence_head=False),
        "holds confidence_head.proj.bias",
    ),
    "draft vocabulary": (lambda c: c.update(draft_vocab_size=100), "lacks d2t, t2d"),
}


@pytest.mark.parametrize("case", DRAFTER_REFUSALS)
def test_refuses_a_drafter(case: str, tmp_path: Path, target_dir: Path) -> None:
    edit, sentence = DRAFTER_REFUSALS[case]
    edit_json(make_tiny_drafter(tmp_path) / "config.json", edit)
    target = load_target(target_dir)[0]
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load_drafter(tmp_path, target)
    assert "\n" not in str(caught.value)


def test_refuses_a_drafter_of_another_kind(tmp_path: Path, target_dir: Path) -> None:
    make_tiny_model(tmp_path, "qwen3")
    with pytest.raises(CheckpointError, match="Qwen3ForCausalLM"):
        load_drafter(tmp_path, load_target(target_dir)[0])


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda t: t["d2t"].__setitem__(-1, 10_000), "within the target's 320 ids"),
        (lambda t: t["d2t"].__setitem__(3, 0), "must rise strictly"),
        (lambda t: t["t2d"].logical_not_(), "name different draft vocabularies"),
    ],
)
def test_refuses_a_wrong_draft_vocabulary(
    edit: Edit, sentence: str, tmp_path: Path, target_dir: Path
) -> None:
    make_tiny_drafter(tmp_path, draft_vocab_size=100, seed=3)
    edit_tensors(tmp_path, edit)
    config, weights = load_drafter(tmp_path, load_target(target_dir)[0])
    with pytest.raises(CheckpointError, match=sentence):
        draft_vocab(config, weights)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, folder: Path, architecture: str = "llama") -> None:
    """The tiny Llama of `folder` as llama.cpp would store it, in fp32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(4)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(320)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(tokenizer["vocab"], key=tokenizer["vocab"].get))
    writer.add_token_types([3] * 3 + [1] * 317)  # the first three are control tokens
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        for heads, projection in ((4, "q_proj"), (2, "k_proj")):
            if projection in name:  # llama.cpp rotates neighbours, Hugging Face halves
                values = values.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(values.shape)
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            stem = f"blk.{layer}.{GGUF_NAMES[rest]}"
        else:
            stem = GGUF_NAMES[stem]
        writer.add_tensor(f"{stem}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_converts_a_gguf(tmp_path: Path, target_dir: Path) -> None:
    """Every tensor comes back as it was, and the tokenizer tokenizes as before."""
    write_gguf(tmp_path / "model.gguf", target_dir)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    config, weights = load_target(tmp_path / "hf")
    original = load_file(target_dir / "model.safetensors")
    assert weights.shapes.keys() == original.keys()
    assert all(torch.equal(weights[name], original[name]) for name in original)
    assert config.eos_token_ids == (2,)
    tokenizers = [AutoTokenizer.from_pretrained(d) for d in (tmp_path / "hf", target_dir)]
    text = "The model drafts, é 日本."
    assert len({tuple(t(text)["input_ids"]) for t in tokenizers}) == 1


def test_refuses_a_gguf_of_another_architecture(tmp_path: Path, target_dir: Path) -> None:
    write_gguf(tmp_path / "model.gguf", target_dir, "stablelm")
    with pytest.raises(CheckpointError, match="'stablelm' model; supported are Llama"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
