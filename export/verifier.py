"""The verifier: a thin rewrite of the target's decoder over packed tokens and a paged cache.

Contract: `runtime.spec.verifier_inputs` and `verifier_outputs`. Linear layers see the N packed
tokens, attention an [R, S] grid, so a step costs what it verifies. The pools are read only; new
keys and values are outputs.

Three modules with plain tensors between them (`Plan`, `Layer` once per layer, `Head`): the exporter
traces one layer and repeats its graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from export.checkpoint import DecoderConfig, TargetConfig, Weights
from export.layers import (
    Embedding,
    Linear,
    Mlp,
    RmsNorm,
    Rope,
    attend,
    fused_linear,
    head_rows,
    output_rows,
    pool_rows,
    query_rows,
    rotate,
    rows_of,
)


class StepPlan(NamedTuple):
    """What every layer of one step needs, computed once: where rows lie and what is visible."""

    cos: Tensor  # [N, 1, D] fp32
    sin: Tensor  # [N, 1, D] fp32
    query_rows: Tensor  # [R, Hk, G*S] int64 into the packed query and key heads
    key_rows: Tensor  # [R, Hk, S] int64 into the same
    value_rows: Tensor  # [R, Hk, S] int64 into the packed values
    output_rows: Tensor  # [N, H] int64 into the attention output
    pool_rows: Tensor  # [R, Hk, M*b] int64 into each pool
    visible: Tensor  # [R, 1, G*S, M*b + S] bool


class Plan(nn.Module):
    """Embeds the tokens and lays out the step."""

    def __init__(self, config: TargetConfig, embedding: Embedding, block_tokens: int) -> None:
        super().__init__()
        self.config, self.block_tokens = config.decoder, block_tokens
        self.embedding = embedding
        self.rope = Rope(config.decoder.rope)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        pad_index: Tensor,
        unpad_index: Tensor,
        segment_lens: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
    ) -> tuple[Tensor, StepPlan]:
        """The residual stream [N, d] fp32 and the plan."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        length, per_token = pad_index.shape[1], heads + kv_heads
        past = pool_rows(block_table, self.block_tokens, kv_heads)
        columns = torch.arange(length)
        causal = columns <= columns[:, None]
        own = (causal & (columns < segment_lens[:, None])[:, None, :]).repeat(
            1, heads // kv_heads, 1
        )
        old = (torch.arange(past.shape[2]) < context_lens[:, None])[:, None, :]
        old = old.expand(-1, own.shape[1], -1)
        cos, sin = self.rope(position_ids)
        plan = StepPlan(
            cos=cos,
            sin=sin,
            query_rows=query_rows(pad_index, per_token, heads, kv_heads),
            key_rows=head_rows(pad_index, per_token, heads, kv_heads),
            value_rows=head_rows(pad_index, kv_heads, 0, kv_heads),
            output_rows=output_rows(unpad_index, length, heads),
            pool_rows=past,
            visible=torch.cat([old, own], dim=-1).unsqueeze(1),
        )
        return self.embedding(token_ids), plan


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, prefix: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.dtype = config.head_dim, dtype
        attention, eps = f"{prefix}self_attn.", config.rms_norm_eps
        self.input_norm = RmsNorm(weights[f"{prefix}input_layernorm.weight"], eps)
        self.qkv = fused_linear(weights, attention, ("q_proj", "k_proj", "v_proj"), dtype)
        self.qk_norm: RmsNorm | None = None
        if config.qk_norm:
            q_norm, k_norm = (weights[f"{attention}{n}_norm.weight"] for n in "qk")
            scale = torch.stack([q_norm] * self.num_heads + [k_norm] * self.num_kv_heads)
            self.qk_norm = RmsNorm(scale, eps)
        self.output = fused_linear(weights, attention, ("o_proj",), dtype)
        self.mlp_norm = RmsNorm(weights[f"{prefix}post_attention_layernorm.weight"], eps)
        self.mlp = Mlp(weights, f"{prefix}mlp.", dtype)

    def forward(
        self, x: Tensor, plan: StepPlan, k_pool: Tensor, v_pool: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Residual stream [N, d] fp32 in; residual stream, new keys and values [N, Hk, D] out."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(self.input_norm(x)).unflatten(-1, (heads + 2 * kv_heads, self.head_dim))
        qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
        qk = qk.float()
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotate(qk, plan.cos, plan.sin).to(self.dtype)
        keys = (rows_of(k_pool, plan.pool_rows), rows_of(qk, plan.key_rows))
        values = (rows_of(v_pool, plan.pool_rows), rows_of(v, plan.value_rows))
        out = attend(rows_of(qk, plan.query_rows), keys, values, plan.visible)
        x = x + self.output(rows_of(out, plan.output_rows).flatten(1)).float()
        x = x + self.mlp(self.mlp_norm(x)).float()
        return x, qk[:, heads:], v


class Head(nn.Module):
    """Final norm and lm_head for the wanted tokens."""

    def __init__(self, norm: RmsNorm, lm_head: Linear) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, lm_head

    def forward(self, x: Tensor, logits_index: Tensor) -> Tensor:
        """Logits [L, V] fp32 of tokens `logits_index` [L] of `x` [N, d]."""
        return self.lm_head(self.norm(F.embedding(logits_index, x))).float()


class Verifier(nn.Module):
    """The target with paged attention, feature taps, and logits only where asked."""

    def __init__(
        self,
        config: TargetConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        block_tokens: int,
        tapped_layers: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        decoder = config.decoder
        self.num_heads, self.tapped_layers = decoder.num_heads, tapped_layers
        embedding = Embedding(weights["model.embed_tokens.weight"], dtype)
        lm_head = embedding.weight if config.tied else weights["lm_head.weight"]
        self.plan = Plan(config, embedding, block_tokens)
        self.layers = nn.ModuleList(
            Layer(decoder, weights, f"model.layers.{i}.", dtype) for i in range(decoder.num_layers)
        )
        self.head = Head(
            RmsNorm(weights["model.norm.weight"], decoder.rms_norm_eps),
            Linear(lm_head, None, dtype),
        )

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`runtime.spec.verifier_inputs` in, `verifier_outputs` out, both in their order."""
        *step, logits_index = inputs[:8]
        pools = inputs[8:]
        x, plan = self.plan(*step)
        taps, new = [], []
        for i, layer in enumerate(self.layers):
            x, k, v = layer(x, plan, pools[2 * i], pools[2 * i + 1])
            new += [k, v]
            if i in self.tapped_layers:
                taps.append(x)
        features = [torch.cat(taps, dim=-1)] if taps else []
        return (self.head(x, logits_index), *features, *new)
