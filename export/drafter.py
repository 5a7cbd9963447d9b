"""The DSpark drafter: context injection, one block pass and the sequential head, in one graph.

Contract: `runtime.spec.drafter_inputs` and `drafter_outputs`. The method is section 3 of the
DSpark paper (arXiv 2607.05147): features of the target's layers become keys and values of every
drafter layer, the block [anchor, MASK, ...] attends to them and to itself in both directions, and
a light head samples its tokens from left to right. Block keys and values are not kept.

Modules with plain tensors between them, as in `export.verifier`: `Plan`, `Layer` once per layer,
`Heads`, and `Step` once per token of the block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from export.checkpoint import (
    DecoderConfig,
    DrafterConfig,
    TargetConfig,
    Weights,
    draft_vocab,
)
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

CANDIDATES = 64  # tokens among which filters are decided: a whole sort would cost too much
LEAST_DOUBT = 1e-6  # probability that a draft is never surer than
RUN = 64  # entries summed up before the inverse CDF looks at each
LARGEST_UNIFORM = 1 - 2.0**-23  # times any fp32 number it is below that number
DROPPED = -1e30  # logit of what filters drop: no probability, yet finite over any temperature


class DraftPlan(NamedTuple):
    """What every layer of one call needs. Keys and values come for C context tokens, then R*g of
    the block."""

    context: Tensor  # [C, d] fp32, the projected features H
    cos: Tensor  # [C + R*g, 1, D] fp32
    sin: Tensor  # [C + R*g, 1, D] fp32
    query_rows: Tensor  # [R, Hk, G*g] int64 into the block's query heads
    own_rows: Tensor  # [R, Hk, S + g] int64 into the call's keys or values
    output_rows: Tensor  # [R*g, H] int64 into the attention output
    pool_rows: Tensor  # [R, Hk, M*b] int64 into each pool
    visible: Tensor  # [R, 1, 1, M*b + S + g] bool


class Plan(nn.Module):
    """Projects the features, embeds the block and lays out the call."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: Weights,
        embedding: Tensor,
        block_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.block_tokens = config, block_tokens
        # fp32: features of real models leave fp16's range.
        self.project = Linear(weights["fc.weight"], None, torch.float32)
        self.norm = RmsNorm(weights["hidden_norm.weight"], config.decoder.rms_norm_eps)
        self.embedding = Embedding(embedding, dtype)
        self.rope = Rope(config.decoder.rope)

    def forward(
        self,
        context_features: Tensor,
        context_position_ids: Tensor,
        pad_index: Tensor,
        segment_lens: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        anchor_ids: Tensor,
    ) -> tuple[Tensor, DraftPlan]:
        """The block's residual stream [R*g, d] fp32 and the plan."""
        config, g = self.config, self.config.block_size
        heads, kv_heads = config.decoder.num_heads, config.decoder.num_kv_heads
        requests, steps = anchor_ids.shape[0], torch.arange(g)
        masks = torch.full((1, g - 1), config.mask_token_id).expand(requests, -1)
        block_ids = torch.cat([anchor_ids[:, None], masks], dim=1)
        block_positions = (context_lens + segment_lens)[:, None] + steps
        block = torch.arange(requests)[:, None] * g + steps  # [R, g] packed
        positions = torch.cat([context_position_ids, block_positions.flatten()])
        cos, sin = self.rope(positions)
        past = pool_rows(block_table, self.block_tokens, kv_heads)
        own = torch.cat([pad_index, context_features.shape[0] + block], dim=1)
        visible = torch.cat(
            [
                torch.arange(past.shape[2]) < context_lens[:, None],
                torch.arange(pad_index.shape[1]) < segment_lens[:, None],
                torch.ones_like(block, dtype=torch.bool),
            ],
            dim=1,
        )
        plan = DraftPlan(
            context=self.norm(self.project(context_features)),
            cos=cos,
            sin=sin,
            query_rows=query_rows(block, heads, heads, kv_heads),
            own_rows=head_rows(own, kv_heads, 0, kv_heads),
            output_rows=output_rows(block.flatten(), g, heads),
            pool_rows=past,
            visible=visible[:, None, None, :],
        )
        return self.embedding(block_ids.flatten()), plan


class Layer(nn.Module):
    """One drafter layer: block queries against pool, new context and block."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, prefix: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.dtype = config.head_dim, dtype
        attention, eps = f"{prefix}self_attn.", config.rms_norm_eps
        self.input_norm = RmsNorm(weights[f"{prefix}input_layernorm.weight"], eps)
        self.query = fused_linear(weights, attention, ("q_proj",), dtype)
        self.key_value = fused_linear(weights, attention, ("k_proj", "v_proj"), dtype)
        self.q_norm = RmsNorm(weights[f"{attention}q_norm.weight"], eps)
        self.k_norm = RmsNorm(weights[f"{attention}k_norm.weight"], eps)
        self.output = fused_linear(weights, attention, ("o_proj",), dtype)
        self.mlp_norm = RmsNorm(weights[f"{prefix}post_attention_layernorm.weight"], eps)
        self.mlp = Mlp(weights, f"{prefix}mlp.", dtype)

    def forward(
        self, x: Tensor, plan: DraftPlan, k_pool: Tensor, v_pool: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Block [R*g, d] fp32 in; block, the context's keys and values [C, Hk, D] out."""
        kv_heads, context_len = self.num_kv_heads, plan.context.shape[0]
        normed = self.input_norm(x)
        q = self.query(normed).unflatten(-1, (self.num_heads, self.head_dim)).float()
        q = rotate(self.q_norm(q), plan.cos[context_len:], plan.sin[context_len:]).to(self.dtype)
        kv = self.key_value(torch.cat([plan.context, normed]))
        k, v = kv.unflatten(-1, (2 * kv_heads, self.head_dim)).chunk(2, dim=1)
        k = rotate(self.k_norm(k.float()), plan.cos, plan.sin).to(self.dtype)
        keys = (rows_of(k_pool, plan.pool_rows), rows_of(k, plan.own_rows))
        values = (rows_of(v_pool, plan.pool_rows), rows_of(v, plan.own_rows))
        out = attend(rows_of(q, plan.query_rows), keys, values, plan.visible)
        x = x + self.output(rows_of(out, plan.output_rows).flatten(1)).float()
        x = x + self.mlp(self.mlp_norm(x)).float()
        return x, k[:context_len], v[:context_len]


class Sampling(NamedTuple):
    """How each request's drafts are drawn, as in the graph contract."""

    temperature: Tensor  # [R] fp32, 0 for argmax
    top_k: Tensor  # [R] int64, 0 keeps all
    top_p: Tensor  # [R] fp32, 1 keeps all
    min_p: Tensor  # [R] fp32, 0 keeps all


@torch.library.custom_op("dspark::add_noise", mutates_args=())
def add_noise(scores: Tensor, noise: Tensor) -> Tensor:
    """`scores` [R, V'] + `noise` [R, W], W being V' or 1, the same number everywhere.

    An operator of its own, since the tracer takes a dimension for 1 always or never.
    """
    return scores + noise


@add_noise.register_fake
def _(scores: Tensor, noise: Tensor) -> Tensor:
    return torch.empty_like(scores)


def sample(
    logits: Tensor, uniform: Tensor, noise: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft ids [R] int64, `logits` [R, V'] with what the filters drop at `DROPPED`, and the
    log-odds [R] of the likeliest token before filters.

    Argmax where the temperature is 0. Elsewhere the filtered softmax(logits / temperature) is
    sampled: where `uniform` [R] is below 0 by the argmax after adding `noise` [R, W], else by the
    inverse CDF at it.
    """
    warm = sampling.temperature > 0
    safe = torch.where(warm, sampling.temperature, 1.0)
    scaled = logits / safe[:, None]
    probs = scaled.softmax(dim=-1)
    top = probs.topk(min(CANDIDATES, probs.shape[-1])).values
    kept = probs >= cutoff(top, sampling)
    filtered = torch.where(kept, logits, DROPPED)
    highest = add_noise(filtered / safe[:, None], noise).argmax(dim=-1)
    inverse = inverse_cdf(probs * kept.float(), uniform)
    ids = torch.where(warm & (uniform >= 0), inverse, highest)
    certainty = torch.log(top[:, 0] / (1 - top[:, 0] + LEAST_DOUBT))
    return ids, filtered, certainty


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [R] int64 at which the cumulative `weights` [R, n] pass `uniform` [R] of their total.

    First among sums of `RUN` entries, then within one, since summing up all n one by one takes
    longer than a softmax. An entry of no weight is never reached: each time the point looked for
    is held from 0 to below the total.
    """
    runs = F.pad(weights, (0, -weights.shape[-1] % RUN)).unflatten(-1, (-1, RUN))
    sums = runs.sum(dim=-1)
    ends = sums.cumsum(dim=-1)
    point = uniform.clamp(max=LARGEST_UNIFORM)[:, None] * ends[:, -1:]
    run = count(ends <= point)
    within = runs.gather(1, run[:, :, None].expand(-1, -1, RUN)).squeeze(1).cumsum(dim=-1)
    point = (point - (ends - sums).gather(1, run)).clamp(min=0)
    point = torch.minimum(point, LARGEST_UNIFORM * within[:, -1:])
    return (run * RUN + count(within <= point)).squeeze(1)


def count(marks: Tensor) -> Tensor:
    """How many of each row of `marks` [R, n] bool are true: [R, 1] int64."""
    # Sums of fp32 are exact up to 2^24 entries, and many times faster than those of int64.
    return marks.float().sum(dim=-1, keepdim=True).long()


def cutoff(top: Tensor, sampling: Sampling) -> Tensor:
    """The least probability [R, 1] that top-k, top-p and min-p together keep; 0 to keep all.

    `top` [R, n] are the likeliest tokens' probabilities, falling; n is `CANDIDATES` or all.
    The filters are the target's (`runtime.sampling.target_probs`), in its order, as far as they
    are decided among the `CANDIDATES` most likely tokens; where they would keep more, the draft
    is left unfiltered, which costs acceptance and never exactness.
    """
    rank = torch.arange(top.shape[-1])
    every_k = sampling.top_k[:, None] == 0
    within_k = every_k | (rank < sampling.top_k[:, None])
    rest = torch.where(within_k, top, 0.0)
    rest = rest / torch.where(every_k, 1.0, rest.sum(dim=-1, keepdim=True))
    before = rest.cumsum(dim=-1) - rest
    within_p = (sampling.top_p[:, None] >= 1) | (before < sampling.top_p[:, None])
    likely = top >= sampling.min_p[:, None] * top[:, :1]
    num_kept = count(within_k & within_p & likely)
    last = top.gather(-1, (num_kept - 1).clamp(min=0))
    return torch.where(num_kept < top.shape[-1], last, 0.0)


class StepInputs(NamedTuple):
    """What each step of the sequential head takes from the block; R rows each."""

    hidden: Tensor  # [R, d] fp32, normed
    scores: Tensor  # [R, V'] fp32, of the lm_head
    uniform: Tensor  # [R] fp32
    noise: Tensor  # [R, W] fp32


class Heads(nn.Module):
    """The final norm and lm_head, for all positions of the block at once."""

    def __init__(
        self, config: DrafterConfig, weights: Weights, lm_head: Tensor, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.norm = RmsNorm(weights["norm.weight"], config.decoder.rms_norm_eps)
        self.lm_head = Linear(lm_head, None, dtype)

    def forward(
        self, x: Tensor, uniforms: Tensor, noise: Tensor
    ) -> tuple[list[StepInputs], tuple[Tensor, ...]]:
        """Block [R*g, d] fp32 and the contract's noise in; inputs of the g steps out.

        Also the state [R, r] before the first step where the head is an rnn.
        """
        g = self.config.block_size
        packed = self.norm(x)
        hidden = packed.unflatten(0, (-1, g)).unbind(1)
        scores = self.lm_head(packed).float().unflatten(0, (-1, g))
        parts = (hidden, scores.unbind(1), uniforms.unbind(1), noise.unbind(1))
        steps = [StepInputs(*step) for step in zip(*parts, strict=True)]
        if self.config.head != "rnn":
            return steps, ()
        zeros = x.new_zeros(1, self.config.markov_rank)
        return steps, (zeros.expand(uniforms.shape[0], -1),)


class Step(nn.Module):
    """One token of the sequential head, sampled, and the confidence in it."""

    def __init__(self, config: DrafterConfig, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        if config.reduced:
            self.draft_vocab = nn.Parameter(draft_vocab(config, weights), requires_grad=False)
        markov = "markov_head."
        if config.head != "none":
            self.previous = Embedding(weights[f"{markov}markov_w1.weight"], dtype)
            self.bias = fused_linear(weights, markov, ("markov_w2",), dtype)
        if config.head == "gated":
            self.gate = fused_linear(weights, markov, ("gate_proj",), dtype)
        if config.head == "rnn":
            self.joint = fused_linear(weights, markov, ("joint_proj",), dtype)
        if config.has_confidence:
            self.confidence = fused_linear(weights, "confidence_head.", ("proj",), torch.float32)

    def forward(
        self, last: Tensor, inputs: StepInputs, sampling: Sampling, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The token after `last` [R]: its target id [R], the new state, and what it adds to the
        graph's outputs: id [R, 1], logits [R, 1, V'] and, with such a head, confidence and
        certainty [R, 1].
        """
        config = self.config
        scores = inputs.scores
        known = inputs.hidden  # confidence knows what precedes the token, never the token itself
        if config.head != "none":
            previous = self.previous(last)
            if config.confidence_with_markov:
                known = torch.cat([known, previous], dim=-1)
            bias, state = self.markov(previous, inputs.hidden, state)
            scores = scores + bias
        ids, logits, certainty = sample(scores, inputs.uniform, inputs.noise, sampling)
        if config.reduced:
            ids = F.embedding(ids, self.draft_vocab[:, None]).squeeze(-1)
        judged = (self.confidence(known), certainty[:, None]) if config.has_confidence else ()
        return ids, state, (ids[:, None], logits[:, None], *judged)

    def markov(
        self, previous: Tensor, hidden: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logit bias [R, V'] fp32 after a token embedded as `previous` [R, r], and the state."""
        if self.config.head == "gated":
            gate = self.gate(torch.cat([hidden, previous], dim=-1)).float()
            previous = torch.sigmoid(gate) * previous
        if self.config.head == "rnn":
            joint = self.joint(torch.cat([state[0], previous, hidden], dim=-1)).float()
            gate, candidate, output = joint.chunk(3, dim=-1)
            keep = torch.sigmoid(gate)
            state = (keep * state[0] + (1 - keep) * torch.tanh(candidate),)
            previous = torch.tanh(output)
        return self.bias(previous).float(), state


class Drafter(nn.Module):
    """The drafter with paged context and in-graph sampling."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: Weights,
        target: TargetConfig,
        target_weights: Weights,
        *,
        dtype: torch.dtype,
        block_tokens: int,
    ) -> None:
        """Embedding and lm_head that `weights` lacks come from `target_weights`."""
        super().__init__()
        tables = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
        if target.tied:
            tables["lm_head"] = tables["embed_tokens"]
        embedding, lm_head = (
            weights[f"{name}.weight"] if own else target_weights[f"{tables[name]}.weight"]
            for name, own in (
                ("embed_tokens", config.own_embedding),
                ("lm_head", config.own_lm_head),
            )
        )
        if not config.own_lm_head:
            lm_head = lm_head[draft_vocab(config, weights)]
        self.plan = Plan(config, weights, embedding, block_tokens, dtype)
        self.layers = nn.ModuleList(
            Layer(config.decoder, weights, f"layers.{i}.", dtype)
            for i in range(config.decoder.num_layers)
        )
        self.heads = Heads(config, weights, lm_head, dtype)
        self.step = Step(config, weights, dtype)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`runtime.spec.drafter_inputs` in, `drafter_outputs` out, both in their order."""
        call, (anchor_ids, uniforms, noise, *sampling), pools = (
            inputs[:6],
            inputs[6:13],
            inputs[13:],
        )
        x, plan = self.plan(*call, anchor_ids)
        new = []
        for i, layer in enumerate(self.layers):
            x, k, v = layer(x, plan, pools[2 * i], pools[2 * i + 1])
            new += [k, v]
        steps, state = self.heads(x, uniforms, noise)
        last, columns = anchor_ids, []
        for step_inputs in steps:
            last, state, column = self.step(last, step_inputs, Sampling(*sampling), state)
            columns.append(column)
        return (*(torch.cat(rows, dim=1) for rows in zip(*columns, strict=True)), *new)
