"""The DSpark drafter as a trainable module (paper, sections 3.1 and 3.2).

Tensor names are those of DeepSpec's checkpoints. Shapes below: C context tokens of all sequences
packed one after the other, A anchors, g block size, d hidden, m tapped layers, r rank, V (V')
target (draft) vocabulary. The target's embedding and output projection are frozen buffers and not
part of the state dict. Nothing here knows about losses, data or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.products import Linear, linear

HEAD_TYPES = ("vanilla", "gated", "rnn")
REQUIRED_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "block_size",
    "num_target_layers",
    "mask_token_id",
    "target_layer_ids",
)


class DrafterConfigError(ValueError):
    """A drafter's configuration is contradictory or of a kind this module does not implement."""


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter; field names are the keys of DeepSpec's ``config.json``.

    ``draft_vocab_size`` equal to ``vocab_size`` means no reduced vocabulary. ``markov_rank`` 0
    means no sequential head (DFlash).
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise DrafterConfigError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise DrafterConfigError(
                f"draft_vocab_size {self.draft_vocab_size} must be 1..{self.vocab_size}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DrafterConfigError(
                f"mask_token_id {self.mask_token_id} must be 0..{self.vocab_size - 1}"
            )
        if self.markov_rank and self.markov_head_type not in HEAD_TYPES:
            raise DrafterConfigError(
                f"markov_head_type {self.markov_head_type!r}: known are {', '.join(HEAD_TYPES)}"
            )
        bad = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers - 1]
        if bad or not self.target_layer_ids:
            raise DrafterConfigError(
                f"target_layer_ids {list(self.target_layer_ids)}: each must be "
                f"0..{self.num_target_layers - 2} (the last layer is not tapped)"
            )
        if self.confidence_head_with_markov and not self.markov_rank:
            raise DrafterConfigError("confidence_head_with_markov needs markov_rank above 0")

    @property
    def feature_size(self) -> int:
        """Width m * d of the tapped features of one token."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def has_reduced_vocab(self) -> bool:
        """Whether draft ids differ from target ids (``d2t`` and ``t2d`` exist)."""
        return self.draft_vocab_size != self.vocab_size

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "DrafterConfig":
        """Read DeepSpec's ``config.json``; what this module does not implement is refused."""
        if raw.get("architectures") != ["Qwen3DSparkModel"]:
            raise DrafterConfigError(
                f"architectures is {raw.get('architectures')}, expected ['Qwen3DSparkModel']"
            )
        if raw.get("attention_bias") or raw.get("hidden_act", "silu") != "silu":
            raise DrafterConfigError("only bias-free attention and silu are implemented")
        kinds = set(raw.get("layer_types") or ["full_attention"])
        if kinds != {"full_attention"}:
            raise DrafterConfigError(f"layer_types {sorted(kinds)}: only full_attention is known")
        rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta")}
        if rope.get("rope_type", "default") != "default" or rope.get("rope_theta") is None:
            raise DrafterConfigError(f"rope_parameters {rope}: only plain rope_theta is known")
        missing = [key for key in REQUIRED_KEYS if key not in raw]
        if missing:
            raise DrafterConfigError(f"config.json lacks {', '.join(missing)}")
        values = {key: raw[key] for key in REQUIRED_KEYS}
        values["target_layer_ids"] = tuple(raw["target_layer_ids"])
        values["rope_theta"] = float(rope["rope_theta"])
        values["draft_vocab_size"] = raw.get("draft_vocab_size") or raw["vocab_size"]
        for key in (
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "confidence_head_with_markov",
            "max_position_embeddings",
        ):
            if raw.get(key) is not None:
                values[key] = raw[key]
        if not values.get("enable_confidence_head") or not values.get("markov_rank"):
            values["confidence_head_with_markov"] = False
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Inverse of ``from_json``."""
        raw: dict[str, Any] = {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "attention_bias": False,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "target_layer_ids": list(self.target_layer_ids),
            "mask_token_id": self.mask_token_id,
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "enable_confidence_head": self.enable_confidence_head,
            "confidence_head_with_markov": self.confidence_head_with_markov,
        }
        if self.has_reduced_vocab:
            raw["draft_vocab_size"] = self.draft_vocab_size
        return raw


class PackedContext(NamedTuple):
    """Context of one or more sequences, and the anchors that look at it.

    ``features`` [C, m * d] float: tapped features of tokens 0.. of each sequence, packed;
    ``context_lens``: C split by sequence; ``anchor_positions`` [A] int64: position of the anchor in
    its sequence, which is also the number of context tokens its block sees; ``anchor_counts``: A
    split by sequence; ``anchor_ids`` [A] int64: target ids.
    """

    features: Tensor
    context_lens: tuple[int, ...]
    anchor_positions: Tensor
    anchor_counts: tuple[int, ...]
    anchor_ids: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., size]."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N, 1, head_dim] fp32 for ``positions`` [N]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[:, None] / theta**exponents
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``x`` [N, heads, head_dim] (halves are paired, as in Hugging Face's models)."""
    cos, sin = tables
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class BlockAttention(nn.Module):
    """Attention of every block to the context before its anchor and, both ways, to itself."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, size = config.hidden_size, config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = size
        self.q_proj = Linear(d, self.num_heads * size)
        self.k_proj = Linear(d, self.num_kv_heads * size)
        self.v_proj = Linear(d, self.num_kv_heads * size)
        self.o_proj = Linear(self.num_heads * size, d)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
        packed: PackedContext,
    ) -> Tensor:
        """Attend. ``block`` [A * g, d], ``context`` [C, d]; returns [A * g, d]."""
        # Context and block go through the same projections, so they share one product.
        both = torch.cat([context, block])
        num_context = context.shape[0]
        keys = self.k_norm(self.k_proj(both).view(-1, self.num_kv_heads, self.head_dim))
        values = self.v_proj(both).view(-1, self.num_kv_heads, self.head_dim)
        context_keys = apply_rope(keys[:num_context], context_rope)
        block_keys = apply_rope(keys[num_context:], block_rope)
        queries = self.q_norm(self.q_proj(block).view(-1, self.num_heads, self.head_dim))
        queries = apply_rope(queries, block_rope) * self.head_dim**-0.5

        g = block.shape[0] // packed.anchor_positions.shape[0]
        outputs = []
        c = a = 0
        for length, count in zip(packed.context_lens, packed.anchor_counts, strict=True):
            rows = slice(a * g, (a + count) * g)
            outputs.append(
                self._one_sequence(
                    queries[rows].view(count, g, self.num_heads, self.head_dim),
                    context_keys[c : c + length],
                    values[c : c + length],
                    block_keys[rows].view(count, g, self.num_kv_heads, self.head_dim),
                    values[num_context:][rows].view(count, g, self.num_kv_heads, self.head_dim),
                    packed.anchor_positions[a : a + count],
                )
            )
            c += length
            a += count
        return self.o_proj(torch.cat(outputs))

    def _one_sequence(
        self,
        queries: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        block_keys: Tensor,
        block_values: Tensor,
        anchor_positions: Tensor,
    ) -> Tensor:
        """Attend within one sequence.

        ``queries`` [A, g, heads, D]; context keys and values [C, kv heads, D]; block keys and
        values [A, g, kv heads, D]; returns [A * g, heads * D].

        The mask has structure (one row per anchor, and blocks that never see each other), so the
        block part is a small batched product instead of a dense [A * g, A * g] one.
        """
        count, g, heads, size = queries.shape
        kv = self.num_kv_heads
        repeat = heads // kv
        length = context_keys.shape[0]
        # [kv, A, repeat * g, D]
        q = queries.view(count, g, kv, repeat, size).permute(2, 0, 3, 1, 4)
        q = q.reshape(kv, count, repeat * g, size)
        k_block = block_keys.permute(2, 0, 3, 1)  # [kv, A, D, g]
        v_block = block_values.permute(2, 0, 1, 3)  # [kv, A, g, D]
        own = q @ k_block
        far = q.reshape(kv, count * repeat * g, size) @ context_keys.permute(1, 2, 0)
        far = far.view(kv, count, repeat * g, length)
        unseen = torch.arange(length, device=q.device) >= anchor_positions[:, None]  # [A, C]
        far = far.masked_fill(unseen[None, :, None], float("-inf"))
        weights = torch.cat([far, own], dim=-1).softmax(dim=-1)
        out = weights[..., length:] @ v_block
        context_part = weights[..., :length].reshape(kv, count * repeat * g, length)
        out = out + (context_part @ context_values.permute(1, 0, 2)).view_as(out)
        out = out.view(kv, count, repeat, g, size).permute(1, 3, 0, 2, 4)
        return out.reshape(count * g, heads * size)


class Mlp(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(d, wide)
        self.up_proj = Linear(d, wide)
        self.down_proj = Linear(wide, d)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [N, d] to [N, d]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """One pre-norm layer over blocks."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
        packed: PackedContext,
    ) -> Tensor:
        """Map ``block`` [A * g, d] to [A * g, d]; ``context`` [C, d] is read only."""
        block = block + self.self_attn(
            self.input_layernorm(block), context, block_rope, context_rope, packed
        )
        return block + self.mlp(self.post_attention_layernorm(block))


class MarkovHead(nn.Module):
    """Sequential head: a bias on the draft logits that depends on the previous token.

    It works through a state [..., r] that is multiplied by W2, so that a caller can drop rows it
    does not need before the expensive product with the vocabulary.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, r = config.hidden_size, config.markov_rank
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, r)
        self.markov_w2 = Linear(r, config.draft_vocab_size)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(d + r, r)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * r + d, 3 * r)

    def initial_state(self, rows: int) -> Tensor:
        """Recurrent state before position 1: [rows, r] zeros (unused but by ``rnn``)."""
        return self.markov_w1.weight.new_zeros(rows, self.markov_w1.embedding_dim)

    def step(self, state: Tensor, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """One position: ``hidden`` [A, d], ``previous`` [A, r] -> W2's input [A, r], new state."""
        if self.kind == "vanilla":
            return previous, state
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], dim=-1)))
            return gate * previous, state
        joint = self.joint_proj(torch.cat([state, previous, hidden], dim=-1))
        keep, candidate, out = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(keep)
        return torch.tanh(out), keep * state + (1 - keep) * torch.tanh(candidate)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """All positions at once, teacher forced: [A, g, d] and [A, g, r] -> [A, g, r]."""
        if self.kind != "rnn":  # these keep no state between positions
            return self.step(previous, hidden, previous)[0]
        state = self.initial_state(hidden.shape[0])
        outputs = []
        for k in range(hidden.shape[1]):
            out, state = self.step(state, hidden[:, k], previous[:, k])
            outputs.append(out)
        return torch.stack(outputs, dim=1)


class ConfidenceHead(nn.Module):
    """Estimates whether a draft token will be accepted, before it is drawn."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        extra = config.markov_rank if self.with_markov else 0
        self.proj = nn.Linear(config.hidden_size + extra, 1)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """Logits [...] from ``hidden`` [..., d] and the previous token's W1 row [..., r]."""
        if self.with_markov:
            assert previous is not None
            hidden = torch.cat([hidden, previous], dim=-1)
        return self.proj(hidden).squeeze(-1)


class Drafter(nn.Module):
    """The whole drafter. ``embedding`` [V, d] and ``lm_head`` [V', d] are the target's, frozen."""

    embedding: Tensor
    lm_head: Tensor
    d2t: Tensor
    feature_scale: Tensor

    def __init__(
        self,
        config: DrafterConfig,
        embedding: Tensor,
        lm_head: Tensor,
        draft_to_target: Tensor | None = None,
    ) -> None:
        """Make a drafter with random weights.

        ``draft_to_target`` [V'] int64 maps draft ids to target ids and must be given exactly if
        the draft vocabulary is reduced.
        """
        super().__init__()
        self.config = config
        if config.has_reduced_vocab != (draft_to_target is not None):
            raise DrafterConfigError(
                f"draft_vocab_size {config.draft_vocab_size} of {config.vocab_size} "
                f"{'needs' if config.has_reduced_vocab else 'forbids'} a draft-to-target map"
            )
        expected = (config.draft_vocab_size, config.hidden_size)
        if tuple(lm_head.shape) != expected:
            raise DrafterConfigError(f"lm_head is {tuple(lm_head.shape)}, expected {expected}")
        if draft_to_target is None:
            draft_to_target = torch.arange(config.vocab_size)
        self.fc = Linear(config.feature_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("lm_head", lm_head.detach().contiguous(), persistent=False)
        self.register_buffer("draft_to_target", draft_to_target.clone(), persistent=False)
        # Features are divided by this before fc while training. Target features have channels a
        # thousand times larger than others, and Adam moves every weight by the same amount.
        # Checkpoints hold fc with the scale multiplied in.
        self.register_buffer("feature_scale", torch.ones(config.feature_size), persistent=False)

    draft_to_target: Tensor

    def set_feature_scale(self, scale: Tensor) -> None:
        """Divide features by ``scale`` [m * d] from now on; what is computed stays the same."""
        with torch.no_grad():
            self.fc.weight.mul_(scale / self.feature_scale)
            self.feature_scale.copy_(scale)

    def backbone(self, packed: PackedContext) -> Tensor:
        """Hidden states [A, g, d] of the blocks ``[anchor, MASK x (g - 1)]``."""
        config = self.config
        g = config.block_size
        device = packed.anchor_ids.device
        if sum(packed.context_lens) != packed.features.shape[0]:
            raise ValueError(
                f"context_lens {packed.context_lens} do not add up to {packed.features.shape[0]}"
            )
        context = self.hidden_norm(self.fc(packed.features / self.feature_scale))
        context_positions = torch.cat(
            [torch.arange(length, device=device) for length in packed.context_lens]
        )
        offsets = torch.arange(g, device=device)
        block_positions = (packed.anchor_positions[:, None] + offsets).flatten()
        context_rope = rope_tables(context_positions, config.head_dim, config.rope_theta)
        block_rope = rope_tables(block_positions, config.head_dim, config.rope_theta)
        ids = torch.full((packed.anchor_ids.shape[0], g), config.mask_token_id, device=device)
        ids[:, 0] = packed.anchor_ids
        block = F.embedding(ids.flatten(), self.embedding)
        for layer in self.layers:
            block = layer(block, context, block_rope, context_rope, packed)
        return self.norm(block).view(-1, g, config.hidden_size)

    def previous_embedding(self, previous_ids: Tensor) -> Tensor | None:
        """W1 rows [..., r] of target ids, None without a sequential head."""
        return self.markov_head.markov_w1(previous_ids) if self.markov_head else None

    def logits(self, hidden: Tensor, markov_state: Tensor | None) -> Tensor:
        """Draft logits [N, V'] from ``hidden`` [N, d] and the head's ``markov_state`` [N, r]."""
        logits = linear(hidden, self.lm_head)
        if self.markov_head is None:
            return logits
        assert markov_state is not None
        return logits + self.markov_head.markov_w2(markov_state)

    def forward(
        self, packed: PackedContext, previous_ids: Tensor, keep: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Teacher-forced pass.

        ``previous_ids`` [A, g] int64: target id before each predicted one (column 0 the anchor);
        ``keep`` [A, g] bool: positions that are wanted, N of them. Returns draft logits [N, V'] and
        confidence logits [N] (None without that head).
        """
        hidden = self.backbone(packed)
        previous = self.previous_embedding(previous_ids)
        state = None
        if self.markov_head is not None:
            assert previous is not None
            state = self.markov_head(hidden, previous)[keep]
        confidence = None
        if self.confidence_head is not None:
            confidence = self.confidence_head(
                hidden[keep], None if previous is None else previous[keep]
            )
        return self.logits(hidden[keep], state), confidence

    @torch.no_grad()
    def draft(self, packed: PackedContext) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draft greedily, token after token.

        Returns target ids [A, g] int64, draft logits [A, g, V'] and confidence logits [A, g] (None
        without that head).
        """
        hidden = self.backbone(packed)
        previous_ids = packed.anchor_ids
        rows = previous_ids.shape[0]
        state = self.markov_head.initial_state(rows) if self.markov_head else None
        ids, logits, confidences = [], [], []
        for k in range(self.config.block_size):
            previous = self.previous_embedding(previous_ids)
            markov = None
            if self.markov_head is not None:
                assert previous is not None
                assert state is not None
                markov, state = self.markov_head.step(state, hidden[:, k], previous)
            if self.confidence_head is not None:
                confidences.append(self.confidence_head(hidden[:, k], previous))
            logits.append(self.logits(hidden[:, k], markov))
            previous_ids = self.draft_to_target[logits[-1].argmax(dim=-1)]
            ids.append(previous_ids)
        confidence = torch.stack(confidences, dim=1) if confidences else None
        return torch.stack(ids, dim=1), torch.stack(logits, dim=1), confidence


def target_to_draft(draft_to_target: Tensor, vocab_size: int) -> Tensor:
    """Inverse map [V] int64 of ``draft_to_target`` [V']; -1 where a target id is not drafted."""
    inverse = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_to_target.device)
    inverse[draft_to_target] = torch.arange(len(draft_to_target), device=draft_to_target.device)
    return inverse


def initialise_from_target(drafter: Drafter, target: nn.Module, seed: int) -> None:
    """Start from the target instead of from noise.

    Layers copy the target's last ones, the final norm the target's; the feature projection passes
    the last tapped layer through (call after ``set_feature_scale``); W1 starts as a random
    projection of the embedding, W2 at zero; confidence starts at one half everywhere.
    """
    config = drafter.config
    model: Any = target.get_submodule("model")
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    with torch.no_grad():
        for layer, source in zip(
            drafter.layers, model.layers[-config.num_hidden_layers :], strict=True
        ):
            pairs: list[tuple[Any, Any]] = [
                (getattr(layer.self_attn, name), getattr(source.self_attn, name)) for name in names
            ]
            pairs += [
                (getattr(layer.mlp, name), getattr(source.mlp, name))
                for name in ("gate_proj", "up_proj", "down_proj")
            ]
            pairs += [
                (layer.input_layernorm, source.input_layernorm),
                (layer.post_attention_layernorm, source.post_attention_layernorm),
            ]
            for name in ("q_norm", "k_norm"):
                if hasattr(source.self_attn, name):
                    pairs.append((getattr(layer.self_attn, name), getattr(source.self_attn, name)))
            for own, other in pairs:
                own.weight.copy_(other.weight)
        drafter.norm.weight.copy_(model.norm.weight)
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -config.hidden_size :].fill_diagonal_(1.0)
        if drafter.markov_head is not None:
            generator = torch.Generator().manual_seed(seed)
            table = drafter.embedding.float().cpu()
            mix = torch.randn(table.shape[1], config.markov_rank, generator=generator)
            rows = table @ mix
            drafter.markov_head.markov_w1.weight.copy_(rows / rows.std())
            drafter.markov_head.markov_w2.weight.zero_()
        if drafter.confidence_head is not None:
            drafter.confidence_head.proj.weight.zero_()
            drafter.confidence_head.proj.bias.zero_()


def with_draft_vocab(drafter: Drafter, draft_to_target: Tensor | None, lm_head: Tensor) -> Drafter:
    """The same drafter over another draft vocabulary.

    ``draft_to_target`` [V'] int64 target ids (None: all of them), ``lm_head`` [V', d] fp32. Tokens
    that were not drafted before start without a sequential term: their row of W2 is zero.
    """
    config = replace(drafter.config, draft_vocab_size=len(lm_head))
    result = Drafter(config, drafter.embedding, lm_head, draft_to_target)
    result.feature_scale.copy_(drafter.feature_scale)
    state = drafter.state_dict()
    w2 = "markov_head.markov_w2.weight"
    if w2 in state:
        by_target_id = lm_head.new_zeros(config.vocab_size, config.markov_rank)
        by_target_id[drafter.draft_to_target] = state[w2]
        state[w2] = by_target_id[result.draft_to_target]
    result.load_state_dict(state)
    return result


def parameter_count(drafter: nn.Module) -> int:
    """Number of trained parameters."""
    return sum(p.numel() for p in drafter.parameters())


def pack_one(features: Tensor, anchor_positions: Sequence[int], token_ids: Tensor) -> PackedContext:
    """Pack anchors of one sequence: ``features`` [n, m * d], ``token_ids`` [n] int64."""
    positions = torch.tensor(anchor_positions, dtype=torch.int64)
    length = int(positions.max())
    return PackedContext(
        features=features[:length],
        context_lens=(length,),
        anchor_positions=positions,
        anchor_counts=(len(anchor_positions),),
        anchor_ids=token_ids[positions],
    )
