"""The graph contracts: every tensor's name, dtype and dimensions, stated once.

`export` builds graphs that satisfy these lists, `engines` derives optimisation profiles from them,
and the runners bind memory by them. Nothing else in the project spells a tensor name.

Dimension symbols (equal symbols are equal numbers within one call):

    R  requests in the step          N  packed tokens of the step
    S  tokens in the longest segment C  packed context tokens new to the drafter
    M  block-table width             P  blocks in the pool
    L  rows of logits wanted

Fixed numbers come from `VerifierDims` and `DrafterDims`: b tokens per block, Hk KV heads of size D,
m tapped layers of width d, g draft tokens per block, V target and V' draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["int64", "fp32", "fp16", "bf16"]
Dim = int | str

OPSET = 20  # the newest that TensorRT 10, TensorRT 11, TensorRT-RTX and ONNX Runtime all read


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output: its name, dtype and dimensions (numbers or the symbols above)."""

    name: str
    dtype: Dtype
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class KvDims:
    """The KV side of a model: what one token adds to the cache in each layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: Dtype

    @property
    def token_bytes(self) -> int:
        """Bytes that one token occupies, keys and values, all layers."""
        item = 4 if self.dtype == "fp32" else 2
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item

    def pool_specs(self) -> list[TensorSpec]:
        """`k_pool.i`, `v_pool.i` [P, b, Hk, D] per layer, keys before values."""
        dims: tuple[Dim, ...] = ("P", self.block_tokens, self.num_kv_heads, self.head_dim)
        return [
            TensorSpec(f"{kind}_pool.{i}", self.dtype, dims)
            for i in range(self.num_layers)
            for kind in "kv"
        ]

    def new_specs(self, tokens: str) -> list[TensorSpec]:
        """`k_new.i`, `v_new.i` [tokens, Hk, D] per layer, in the order of `pool_specs`."""
        dims: tuple[Dim, ...] = (tokens, self.num_kv_heads, self.head_dim)
        return [
            TensorSpec(f"{kind}_new.{i}", self.dtype, dims)
            for i in range(self.num_layers)
            for kind in "kv"
        ]


@dataclass(frozen=True)
class VerifierDims:
    """Numbers that fix the verifier's graph."""

    kv: KvDims
    hidden_size: int
    vocab_size: int
    max_positions: int
    tapped_layers: tuple[int, ...]  # decoder layers whose outputs feed the drafter; may be empty

    @property
    def feature_size(self) -> int:
        """Width of one token's `features` row, m * d."""
        return len(self.tapped_layers) * self.hidden_size


@dataclass(frozen=True)
class DrafterDims:
    """Numbers that fix the drafter's graph."""

    kv: KvDims
    feature_size: int  # m * d of the verifier it was trained for
    block_size: int  # g
    draft_vocab_size: int  # V'
    has_confidence: bool


def verifier_inputs(dims: VerifierDims) -> list[TensorSpec]:
    """Inputs of the verifier graph, in graph order.

    Linear layers see the N packed tokens; attention sees an [R, S] grid. `pad_index` holds the
    packed index of each grid cell (padding cells hold 0 and are masked by `segment_lens`), and
    `unpad_index` the flat grid cell (row * S + column) of each packed token. `context_lens` counts
    tokens already in the pool, where token t of request r lives in block
    `block_table[r, t // b]`, slot `t % b`; padding entries of the table hold 0, never -1.
    `logits_index` names the packed tokens whose logits are wanted.
    """
    return [
        TensorSpec("token_ids", "int64", ("N",)),
        TensorSpec("position_ids", "int64", ("N",)),
        TensorSpec("pad_index", "int64", ("R", "S")),
        TensorSpec("unpad_index", "int64", ("N",)),
        TensorSpec("segment_lens", "int64", ("R",)),
        TensorSpec("context_lens", "int64", ("R",)),
        TensorSpec("block_table", "int64", ("R", "M")),
        TensorSpec("logits_index", "int64", ("L",)),
        *dims.kv.pool_specs(),
    ]


def verifier_outputs(dims: VerifierDims) -> list[TensorSpec]:
    """Outputs of the verifier graph: `logits` [L, V] fp32, `features` [N, m*d] fp32, new K/V.

    Features are the residual stream after each tapped layer (HF `hidden_states[id + 1]`),
    concatenated; a verifier without a drafter has no such output.
    """
    features = [TensorSpec("features", "fp32", ("N", dims.feature_size))]
    return [
        TensorSpec("logits", "fp32", ("L", dims.vocab_size)),
        *(features if dims.tapped_layers else []),
        *dims.kv.new_specs("N"),
    ]


def drafter_inputs(dims: DrafterDims) -> list[TensorSpec]:
    """Inputs of the drafter graph, in graph order.

    One call injects `segment_lens[r]` new context tokens of each request, packed into C rows of
    verifier features, and drafts a block of g tokens after them: the anchor stands at position
    `context_lens[r] + segment_lens[r]`. `context_lens` counts the drafter's tokens already in its
    pool, which shares block ids and tables with the verifier's. `temperature` 0 means argmax;
    otherwise a draft follows softmax(draft_logits / temperature) after the filters `top_k` (0 keeps
    all), `top_p` (1 keeps all) and `min_p` (0 keeps all): it is the inverse CDF at `uniforms` in
    [0, 1), and where the uniform is below 0 the argmax of draft_logits / temperature + `noise`,
    one number for each draft token id (W = V', or 1 where no request has any).
    """
    return [
        TensorSpec("context_features", "fp32", ("C", dims.feature_size)),
        TensorSpec("context_position_ids", "int64", ("C",)),
        TensorSpec("pad_index", "int64", ("R", "S")),
        TensorSpec("segment_lens", "int64", ("R",)),
        TensorSpec("context_lens", "int64", ("R",)),
        TensorSpec("block_table", "int64", ("R", "M")),
        TensorSpec("anchor_ids", "int64", ("R",)),
        TensorSpec("uniforms", "fp32", ("R", dims.block_size)),
        TensorSpec("noise", "fp32", ("R", dims.block_size, "W")),
        TensorSpec("temperature", "fp32", ("R",)),
        TensorSpec("top_k", "int64", ("R",)),
        TensorSpec("top_p", "fp32", ("R",)),
        TensorSpec("min_p", "fp32", ("R",)),
        *dims.kv.pool_specs(),
    ]


def drafter_outputs(dims: DrafterDims) -> list[TensorSpec]:
    """Outputs of the drafter graph.

    `draft_ids` [R, g] are target-vocabulary ids; `draft_logits` [R, g, V'] include the sequential
    head, precede the temperature and are hugely negative for what the filters dropped, so that
    softmax(draft_logits / temperature) is exactly what was sampled. Two say before a token is drawn
    how likely it is to be accepted, and exist only where the checkpoint has a confidence head:
    `confidence_logits` [R, g], which precede the head's sigmoid, and `certainty_logits` [R, g], the
    log-odds of the likeliest token among all of the draft's (at temperature 1 where that is 0).
    """
    block: tuple[Dim, ...] = ("R", dims.block_size)
    names = ("confidence_logits", "certainty_logits")
    confidence = [TensorSpec(name, "fp32", block) for name in names]
    return [
        TensorSpec("draft_ids", "int64", block),
        TensorSpec("draft_logits", "fp32", (*block, dims.draft_vocab_size)),
        *(confidence if dims.has_confidence else []),
        *dims.kv.new_specs("C"),
    ]
