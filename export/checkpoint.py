"""Checkpoints: what a folder of config.json and safetensors holds, checked before any use.

Reads a verifier (a Hugging Face causal LM) and a DSpark drafter (DeepSpec's layout). Only
safetensors and JSON are ever opened: no pickles, no code from the checkpoint. Every refusal is one
sentence that names what is supported and what was found.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DRAFTER_ARCHITECTURE = "Qwen3DSparkModel"
HEADS = ("vanilla", "gated", "rnn")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class RopeConfig:
    """RoPE after scaling: frequencies in radians per position, and a factor on cos and sin."""

    inv_freq: tuple[float, ...]  # D / 2 of them, fp32 values
    attention_factor: float


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder stack, verifier or drafter."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig

    def layer_shapes(self, prefix: str) -> Shapes:
        """Names and shapes of every tensor of the layers under `prefix`."""
        d, head = self.hidden_size, self.head_dim
        linears = {
            "self_attn.q_proj": (self.num_heads * head, d, self.qkv_bias),
            "self_attn.k_proj": (self.num_kv_heads * head, d, self.qkv_bias),
            "self_attn.v_proj": (self.num_kv_heads * head, d, self.qkv_bias),
            "self_attn.o_proj": (d, self.num_heads * head, self.output_bias),
            "mlp.gate_proj": (self.intermediate_size, d, self.mlp_bias),
            "mlp.up_proj": (self.intermediate_size, d, self.mlp_bias),
            "mlp.down_proj": (d, self.intermediate_size, self.mlp_bias),
        }
        one: Shapes = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        if self.qk_norm:
            one |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        for name, (rows, columns, bias) in linears.items():
            one[f"{name}.weight"] = (rows, columns)
            if bias:
                one[f"{name}.bias"] = (rows,)
        return {
            f"{prefix}layers.{i}.{name}": shape
            for i in range(self.num_layers)
            for name, shape in one.items()
        }


@dataclass(frozen=True)
class TargetConfig:
    """A verifier: its decoder, vocabulary and where it stops."""

    architecture: str
    decoder: DecoderConfig
    vocab_size: int
    max_positions: int
    tied: bool  # lm_head is the embedding
    eos_token_ids: tuple[int, ...]

    def tensor_shapes(self) -> Shapes:
        """Names and shapes of every tensor the checkpoint must hold."""
        table = (self.vocab_size, self.decoder.hidden_size)
        shapes: Shapes = {"model.embed_tokens.weight": table}
        if not self.tied:
            shapes["lm_head.weight"] = table
        shapes["model.norm.weight"] = (self.decoder.hidden_size,)
        return shapes | self.decoder.layer_shapes("model.")


class Weights:
    """Tensors of a safetensors file or a sharded set of them, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Index the safetensors in `folder`; raises CheckpointError when there are none."""
        from safetensors import SafetensorError, safe_open

        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(read_json(index).get("weight_map", {}).values()))
        else:
            files = ["model.safetensors"]
        missing = [name for name in files if not (folder / name).is_file()]
        if missing or not files:
            found = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
            instead = f", only {found[0]}, which is a pickle" if found else ""
            raise CheckpointError(
                f"{folder} holds no {', '.join(missing) or 'weights'}{instead}: "
                "weights must be safetensors"
            )
        self.paths = [folder / name for name in files]
        self.shapes: Shapes = {}
        self._files = {}
        for path in self.paths:
            try:
                handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                self._files[name] = handle
                self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def check(self, expected: Shapes, ignored: tuple[str, ...] = ()) -> None:
        """Raise CheckpointError unless the tensors are exactly `expected`.

        Names that end in one of `ignored` may be there in any shape.
        """
        folder = self.paths[0].parent
        missing = sorted(expected.keys() - self.shapes.keys())
        if missing:
            raise CheckpointError(f"{folder} lacks {_some(missing)}")
        unexpected = sorted(
            n for n in self.shapes.keys() - expected.keys() if not n.endswith(ignored)
        )
        if unexpected:
            raise CheckpointError(
                f"{folder} holds {_some(unexpected)}, which its config.json does not account for"
            )
        for name, shape in expected.items():
            if self.shapes[name] != shape:
                raise CheckpointError(
                    f"{folder}: {name} has shape {list(self.shapes[name])}, "
                    f"config.json calls for {list(shape)}"
                )


def _some(names: list[str]) -> str:
    """The first names of a list, for a sentence."""
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError naming the file."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def _check_architecture(source: Path, model_type: str | None) -> None:
    if model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"{source} is a {model_type!r} model; supported are {', '.join(ARCHITECTURES.values())}"
        )


def _decoder_config(folder: Path, raw: dict[str, Any]) -> tuple[DecoderConfig, Any]:
    """The decoder of `folder`'s config.json, and the configuration as transformers reads it."""
    import torch
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model_type = raw.get("model_type")
    _check_architecture(folder, model_type)
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{folder} is quantised ({method}); supported are fp32, fp16 and bf16 weights"
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if layer_types != {"full_attention"} or (
        window is not None and getattr(config, "use_sliding_window", True)
    ):
        raise CheckpointError(
            f"{folder} uses sliding-window attention (sliding_window {window}); "
            "only full attention is supported"
        )
    rope = config.rope_parameters
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{folder} uses rope type {rope_type!r}"
            + (" on part of each head" if rope_type in ROPE_TYPES else "")
            + f"; supported are {', '.join(ROPE_TYPES)}, over whole heads"
        )
    if config.hidden_act != "silu":
        raise CheckpointError(
            f"{folder} uses the activation {config.hidden_act!r}; only 'silu' is supported"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rope_type == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq, factor = 1.0 / rope["rope_theta"] ** steps, 1.0
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, device="cpu")
    bias = bool(getattr(config, "attention_bias", False))
    decoder = DecoderConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        qkv_bias=bias or model_type == "qwen2",
        output_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        rope=RopeConfig(tuple(inv_freq.tolist()), float(factor)),
    )
    return decoder, config


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """EOS ids of generation_config.json, or of config.json where that says nothing."""
    path = folder / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = config.eos_token_id
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(int(i) for i in ids))


def load_target(folder: Path) -> tuple[TargetConfig, Weights]:
    """Read and check a Hugging Face causal LM.

    Raises CheckpointError for anything but a dense, full-attention Llama, Mistral, Qwen2 or Qwen3
    whose tensors are exactly those its configuration implies.
    """
    decoder, config = _decoder_config(folder, read_json(folder / "config.json"))
    target = TargetConfig(
        architecture=config.model_type,
        decoder=decoder,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        tied=bool(config.tie_word_embeddings),
        eos_token_ids=_eos_token_ids(folder, config),
    )
    weights = Weights(folder)
    # Buffers that old checkpoints carry, and a tied head stored twice.
    ignored = ("rotary_emb.inv_freq", *(("lm_head.weight",) if target.tied else ()))
    weights.check(target.tensor_shapes(), ignored)
    return target, weights


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file into `folder` as fp32 safetensors with its tokenizer.

    Quantised weights are dequantised exactly; nothing else is lost. Raises CheckpointError when
    transformers cannot read the file, or its architecture is not supported.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _check_architecture(gguf, config.model_type)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file makes the parser fail anywhere
        raise CheckpointError(f"{gguf} cannot be read as a GGUF model: {error}") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class DrafterConfig:
    """A DSpark drafter in DeepSpec's layout, checked against its verifier."""

    decoder: DecoderConfig
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # V'
    block_size: int  # g
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int  # 0 without a sequential head (DFlash)
    head: str  # vanilla, gated, rnn or none
    has_confidence: bool
    confidence_with_markov: bool
    own_embedding: bool  # False: the target's
    own_lm_head: bool  # False: the target's rows of the draft vocabulary

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is a part of the target's."""
        return self.draft_vocab_size != self.vocab_size

    def tensor_shapes(self) -> Shapes:
        """Names and shapes of every tensor the checkpoint must hold."""
        d, r = self.decoder.hidden_size, self.markov_rank
        shapes: Shapes = {
            "fc.weight": (d, len(self.target_layer_ids) * d),
            "hidden_norm.weight": (d,),
            "norm.weight": (d,),
        }
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (self.vocab_size, d)
        if self.own_lm_head:
            shapes["lm_head.weight"] = (self.draft_vocab_size, d)
        if self.reduced:
            shapes |= {"d2t": (self.draft_vocab_size,), "t2d": (self.vocab_size,)}
        if self.head != "none":
            shapes["markov_head.markov_w1.weight"] = (self.vocab_size, r)
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab_size, r)
        if self.head == "gated":
            shapes["markov_head.gate_proj.weight"] = (r, d + r)
            shapes["markov_head.gate_proj.bias"] = (r,)
        if self.head == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + d)
            shapes["markov_head.joint_proj.bias"] = (3 * r,)
        if self.has_confidence:
            width = d + (r if self.confidence_with_markov else 0)
            shapes["confidence_head.proj.weight"] = (1, width)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes | self.decoder.layer_shapes("")


def tapped_layers(folder: Path) -> tuple[int, ...]:
    """The target layers that the drafter in `folder` reads; raises CheckpointError."""
    ids = read_json(folder / "config.json").get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{folder}/config.json needs target_layer_ids, a list of layer numbers, got {ids!r}"
        )
    return tuple(ids)


def load_drafter(folder: Path, target: TargetConfig) -> tuple[DrafterConfig, Weights]:
    """Read a DSpark drafter and check it against the verifier it is to draft for.

    Raises CheckpointError for another layout, and for anything that does not fit the target or
    is ambiguous: an off-by-one here would only show as drafts that are never accepted.
    """
    raw = read_json(folder / "config.json")
    if raw.get("architectures") != [DRAFTER_ARCHITECTURE]:
        raise CheckpointError(
            f"{folder} has architectures {raw.get('architectures')!r}; supported is "
            f"{DRAFTER_ARCHITECTURE!r}, the DSpark drafter in DeepSpec's layout"
        )

    def value(name: str, kind: type) -> Any:
        if type(raw.get(name)) is not kind:
            raise CheckpointError(
                f"{folder}/config.json needs {name} of type {kind.__name__}, got {raw.get(name)!r}"
            )
        return raw[name]

    def expect(name: str, actual: int, wanted: int) -> None:
        if actual != wanted:
            raise CheckpointError(
                f"{folder} does not fit the target: its {name} is {actual}, the target has {wanted}"
            )

    decoder, config = _decoder_config(folder, raw)
    if not decoder.qk_norm:
        raise CheckpointError(
            f"{folder} is a {config.model_type!r} drafter; only 'qwen3' drafters are supported"
        )
    expect("hidden_size", decoder.hidden_size, target.decoder.hidden_size)
    expect("vocab_size", config.vocab_size, target.vocab_size)
    num_layers = target.decoder.num_layers
    expect("num_target_layers", value("num_target_layers", int), num_layers)
    layer_ids = tapped_layers(folder)
    if list(layer_ids) != sorted(set(layer_ids)) or layer_ids[0] < 0:
        raise CheckpointError(
            f"{folder}: target_layer_ids must be strictly increasing from 0, got {list(layer_ids)}"
        )
    if layer_ids[-1] >= num_layers - 1:
        raise CheckpointError(
            f"{folder}: target_layer_ids must stay below the target's last layer "
            f"({num_layers - 1}), got {layer_ids[-1]}"
        )
    block_size, mask = value("block_size", int), value("mask_token_id", int)
    if block_size < 1:
        raise CheckpointError(f"{folder}: block_size must be 1 or more, got {block_size}")
    if not 0 <= mask < target.vocab_size:
        raise CheckpointError(
            f"{folder}: mask_token_id must be below the vocabulary size {target.vocab_size}, "
            f"got {mask}"
        )
    rank = value("markov_rank", int)
    head = value("markov_head_type", str) if rank else "none"
    if rank < 0 or head not in (*HEADS, "none"):
        raise CheckpointError(
            f"{folder}: the sequential head must be one of {', '.join(HEADS)} with a positive "
            f"markov_rank, got {head!r} with rank {rank}"
        )
    has_confidence = value("enable_confidence_head", bool)
    with_markov = has_confidence and value("confidence_head_with_markov", bool)
    if with_markov and head == "none":
        raise CheckpointError(
            f"{folder}: confidence_head_with_markov needs a sequential head, but markov_rank is 0"
        )
    weights = Weights(folder)
    drafter = DrafterConfig(
        decoder=decoder,
        vocab_size=target.vocab_size,
        draft_vocab_size=raw.get("draft_vocab_size") or target.vocab_size,
        block_size=block_size,
        target_layer_ids=layer_ids,
        mask_token_id=mask,
        markov_rank=rank,
        head=head,
        has_confidence=has_confidence,
        confidence_with_markov=with_markov,
        own_embedding="embed_tokens.weight" in weights,
        own_lm_head="lm_head.weight" in weights,
    )
    weights.check(drafter.tensor_shapes())
    return drafter, weights


def draft_vocab(config: DrafterConfig, weights: Weights) -> Tensor:
    """Target ids [V'] int64 of the draft vocabulary, checked: `d + d2t[d]`.

    Raises CheckpointError when `d2t` and `t2d` disagree or leave the target's vocabulary.
    """
    import torch

    ids = torch.arange(config.draft_vocab_size)
    if not config.reduced:
        return ids
    ids = ids + weights["d2t"].long()
    folder = weights.paths[0].parent
    if ids.min() < 0 or ids.max() >= config.vocab_size or bool((ids.diff() <= 0).any()):
        raise CheckpointError(
            f"{folder}: d + d2t[d] must rise strictly within the target's {config.vocab_size} ids"
        )
    kept = weights["t2d"].bool()
    if int(kept.sum()) != len(ids) or not bool(kept[ids].all()):
        raise CheckpointError(f"{folder}: d2t and t2d name different draft vocabularies")
    return ids
